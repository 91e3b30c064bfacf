"""YAML with the scalars of YAML 1.2, the line of every value, and no repeated keys.

PyYAML reads `1e-5` as a string, `no` as False and `1_000` as 1000, and lets the last of two equal keys win; none of
that is what the author of a recipe means.
"""

from __future__ import annotations

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

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Yaml12Loader(yaml.SafeLoader):
    """A safe loader whose plain scalars resolve as in the YAML 1.2 core schema."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]


for _tag, _pattern, _first in _SCALARS:
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


def _construct_int(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_float(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


_Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


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
        RecipeError: for a syntax error, a repeated key, a key that is no string, or a tag such as `!!python/object`.
    """
    loader = _Yaml12Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        data = _build(loader, node, "", lines, source, ()) if node is not None else None
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
    finally:
        loader.dispose()
    return Document(data, lines)


def parse_scalar(text: str) -> Any:
    """The value of `text` on the right of an override: a scalar, or a flow list or mapping (`[a, b]`).

    Raises:
        RecipeError: when `text` is not valid YAML.
    """
    return parse_yaml(text, "command line").data


def _build(
    loader: _Yaml12Loader, node: yaml.Node, path: str, lines: dict[str, int], source: str, parents: tuple[int, ...]
) -> Any:
    if id(node) in parents:
        raise RecipeError(f"{source}:{node.start_mark.line + 1}", f"{path} contains itself", "remove the alias")
    inside = (*parents, id(node))
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
        raise RecipeError(
            f"{source}:{node.start_mark.line + 1}", f"the tag {node.tag} is not allowed", "remove the tag"
        )
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
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            child = f"{path}.{index}"
            lines[child] = item.start_mark.line + 1
            items.append(_build(loader, item, child, lines, source, inside))
        return items
    return loader.construct_object(node, deep=True)


def _key(node: yaml.Node, source: str) -> str:
    """Keys are text as written, as in JSON: `id2label: {0: no, 1: yes}` has the keys "0" and "1"."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise RecipeError(
        f"{source}:{node.start_mark.line + 1}", "a key must be text", "remove the brackets around the key"
    )
