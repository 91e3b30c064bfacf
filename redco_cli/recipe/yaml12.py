"""YAML with the scalars of YAML 1.2, the line of every value, and no repeated keys.

PyYAML reads `1e-5` as a string, `no` as False and `1_000` as 1000, and lets the last of two equal keys win; none of
that is what the author of a recipe means.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from redco_cli.errors import RecipeError

_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)

_STANDARD = "tag:yaml.org,2002:"
_MAX_DEPTH = 64
_MAX_VALUES = 100_000
_TOO_LARGE = "a recipe is small: put data into a file of its own, and name that file"


class _Yaml12Loader(yaml.SafeLoader):
    """A safe loader whose plain scalars resolve as in the YAML 1.2 core schema."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]


class _Yaml12Dumper(yaml.SafeDumper):
    """Quotes what the loader above would not read as text (`"1e-5"`); every scalar stays on its line."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Yaml12Loader, _Yaml12Dumper):
        _class.add_implicit_resolver(f"{_STANDARD}{_tag}", re.compile(f"(?:{_pattern})\\Z"), list(_first))


def _construct_int(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_float(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    breaks_line = any(sign in text for sign in "\n\r\x85\u2028\u2029")
    return dumper.represent_scalar(f"{_STANDARD}str", text, style='"' if breaks_line else None)


_Yaml12Loader.add_constructor(f"{_STANDARD}int", _construct_int)
_Yaml12Loader.add_constructor(f"{_STANDARD}float", _construct_float)
_Yaml12Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True)
class Document:
    """A parsed document.

    Attributes:
        data: the value, of dicts, lists and scalars.
        lines: dotted path of each key and list item (`data.train.path`, `train.freeze.0`) to its line, from 1.
    """

    data: Any
    lines: dict[str, int] = field(default_factory=dict)


def parse_yaml(text: str, source: str) -> Document:
    """Parses one document.

    Args:
        text: the YAML.
        source: what to call it in errors, a path as a rule.

    Raises:
        RecipeError: for a syntax error, a repeated key, a key that is no string, a tag such as `!!python/object`, a
            number that is not finite, or a document of a size that no recipe has.
    """
    lines: dict[str, int] = {}
    try:
        loader = _Yaml12Loader(text)
        try:
            node = loader.get_single_node()
            data = None if node is None else _build(loader, node, "", lines, source, ())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(
            where, f"not valid YAML: {problem}", "check the indentation and quotes near that line"
        ) from None
    except yaml.YAMLError as error:
        raise RecipeError(
            source, f"not valid YAML: {error}".splitlines()[0], "save the recipe as plain UTF-8 text"
        ) from None
    except RecursionError:
        raise RecipeError(source, "its values are nested too deeply", _TOO_LARGE) from None
    return Document(data, lines)


def parse_scalar(text: str) -> Any:
    """The value of `text` on the right of an override: a scalar, or a flow list or mapping (`[a, b]`).

    Raises:
        RecipeError: when `text` is not valid YAML.
    """
    return parse_yaml(text, "command line").data


def dump_yaml(data: Any) -> str:
    """YAML that `parse_yaml` reads back as `data`: dicts with text keys, lists and scalars; one line per scalar."""
    text: str = yaml.dump(data, Dumper=_Yaml12Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def _build(
    loader: _Yaml12Loader, node: yaml.Node, path: str, lines: dict[str, int], source: str, parents: tuple[int, ...]
) -> Any:
    where = f"{source}:{node.start_mark.line + 1}"
    if id(node) in parents:
        raise RecipeError(where, f"{path} contains itself", "remove the alias")
    if len(parents) > _MAX_DEPTH:
        raise RecipeError(where, f"values are nested more than {_MAX_DEPTH} levels deep", _TOO_LARGE)
    if len(lines) > _MAX_VALUES:
        raise RecipeError(where, f"there are more than {_MAX_VALUES} values, aliases written out", _TOO_LARGE)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node, where, path)
    inside = (*parents, id(node))
    if node.tag not in (f"{_STANDARD}map", f"{_STANDARD}seq"):
        raise _refused_tag(node, where)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = _key(key_node, source), key_node.start_mark.line + 1
            child = f"{path}.{key}" if path else key
            if key in mapping:
                first = lines[child]
                raise RecipeError(f"{source}:{line}: {child}", f"already given on line {first}", "keep one of the two")
            lines[child] = line
            mapping[key] = _build(loader, value_node, child, lines, source, inside)
        return mapping
    items = []
    for index, item in enumerate(node.value):
        child = f"{path}.{index}"
        lines[child] = item.start_mark.line + 1
        items.append(_build(loader, item, child, lines, source, inside))
    return items


def _scalar(loader: _Yaml12Loader, node: yaml.ScalarNode, where: str, path: str) -> Any:
    plain = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    if node.tag not in (plain, f"{_STANDARD}str"):  # `!!int abc` as well
        raise _refused_tag(node, where)
    try:
        value = loader.construct_object(node)
    except ValueError:  # Python refuses to read thousands of digits
        value = math.inf
    if isinstance(value, float) and not math.isfinite(value):
        shown = node.value if len(node.value) <= 20 else f"a number of {len(node.value)} digits"
        raise RecipeError(f"{where}: {path}", f"{shown} is not a finite number", "give a finite one")
    if isinstance(value, str) and "\0" in value:
        raise RecipeError(f"{where}: {path}", "the text holds a NUL character", "write a backslash as two")
    return value


def _refused_tag(node: yaml.Node, where: str) -> RecipeError:
    tag = node.tag.replace(_STANDARD, "!!")
    return RecipeError(where, f"the tag {tag} is not allowed", "remove the tag; quotes make a value text")


def _key(node: yaml.Node, source: str) -> str:
    """Keys are text as written, as in JSON: `id2label: {0: no, 1: yes}` has the keys "0" and "1"."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise RecipeError(
        f"{source}:{node.start_mark.line + 1}", "a key must be text", "remove the brackets around the key"
    )
