"""YAML with the scalars of YAML 1.2, the line of every value, no repeated keys, and merge keys.

PyYAML reads `1e-5` as a string, `no` as False and `1_000` as 1000, and lets the last of two equal keys win; none of
that is what the author of a recipe means. `<<: *anchor` takes the keys of another mapping, as in YAML 1.1: 1.2 has no
word for it, and everyone writes it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from redco_cli.errors import RecipeError
from redco_cli.recipe.secrecy import is_secret

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
_MERGE = "<<"
_NAMED = re.compile(r"(alias|anchor|tag handle) (?:'[^']*'|\"[^\"]*\")")
"""What PyYAML calls by a name that may be a piece of a value that somebody forgot to quote: `password: *hunter2`."""
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
_Yaml12Dumper.add_implicit_resolver(f"{_STANDARD}merge", re.compile(f"{_MERGE}\\Z"), ["<"])  # quotes a key that is text


_Pair = tuple[yaml.Node, yaml.Node]
"""The nodes of a key and of its value."""


@dataclass(frozen=True)
class Document:
    """A parsed document.

    Attributes:
        data: the value, of dicts, lists and scalars.
        lines: dotted path of each key and list item (`data.train.path`, `train.freeze.0`) to its line, from 1; of what
            is merged or an alias, the line where it was written.
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
            number that is not finite, a merge of something that is no mapping, or a document of a size that no recipe
            has.
    """
    try:
        loader = _Yaml12Loader(text)
        try:
            builder = _Builder(loader, source)
            node = loader.get_single_node()
            data = None if node is None else builder.build(node, "", ())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = _NAMED.sub(r"\1", " ".join(part for part in (error.context, error.problem) if part))
        raise RecipeError(
            where, f"not valid YAML: {problem}", "check the indentation and quotes near that line"
        ) from None
    except yaml.YAMLError as error:
        raise RecipeError(
            source, f"not valid YAML: {error}".splitlines()[0], "save the recipe as plain UTF-8 text"
        ) from None
    except RecursionError:
        raise RecipeError(source, "its values are nested too deeply", _TOO_LARGE) from None
    return Document(data, builder.lines)


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


class _Builder:
    """Makes values of nodes, and notes their lines.

    `parents` are the nodes around one, by identity: an alias to any of them would never end.
    """

    def __init__(self, loader: _Yaml12Loader, source: str) -> None:
        self.lines: dict[str, int] = {}
        self._loader, self._source = loader, source
        self._merged = 0  # mappings and keys of theirs that merges went through: they may repeat without adding values

    def build(self, node: yaml.Node, path: str, parents: tuple[int, ...]) -> Any:
        """The value of a node at a dotted path."""
        where = self._enter(node, path, parents)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(self._loader, node, where, path)
        inside = (*parents, id(node))
        if node.tag not in (f"{_STANDARD}map", f"{_STANDARD}seq"):
            raise _refused_tag(node, where, path)
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Any] = {}
            for key, (key_node, value_node) in self._pairs(node, path, parents).items():
                child = f"{path}.{key}" if path else key
                self.lines[child] = key_node.start_mark.line + 1
                mapping[key] = self.build(value_node, child, inside)
            return mapping
        items = []
        for index, item in enumerate(node.value):
            child = f"{path}.{index}"
            self.lines[child] = item.start_mark.line + 1
            items.append(self.build(item, child, inside))
        return items

    def _enter(self, node: yaml.Node, path: str, parents: tuple[int, ...]) -> str:
        """The place of a node that is allowed where it stands."""
        where = f"{self._source}:{node.start_mark.line + 1}"
        if id(node) in parents:
            raise RecipeError(where, f"{path} contains itself", "remove the alias")
        if len(parents) > _MAX_DEPTH:
            raise RecipeError(where, f"values are nested more than {_MAX_DEPTH} levels deep", _TOO_LARGE)
        if len(self.lines) + self._merged > _MAX_VALUES:
            raise RecipeError(where, f"there are more than {_MAX_VALUES} values, aliases written out", _TOO_LARGE)
        return where

    def _pairs(self, node: yaml.MappingNode, path: str, parents: tuple[int, ...]) -> dict[str, _Pair]:
        """Key to the nodes of key and value: those of a mapping, then those it merges, of which the first wins."""
        own: dict[str, _Pair] = {}
        merged: dict[str, _Pair] = {}
        merges: yaml.Node | None = None
        for key_node, value_node in node.value:
            key = _key(key_node, self._source)
            child = f"{path}.{key}" if path else key
            is_merge = key == _MERGE and key_node.style is None  # in quotes it is text
            first = merges if is_merge else own[key][0] if key in own else None
            if first is not None:
                where = f"{self._source}:{key_node.start_mark.line + 1}: {child}"
                remedy = "merge a list: <<: [*a, *b]" if is_merge else "keep one of the two"
                raise RecipeError(where, f"already given on line {first.start_mark.line + 1}", remedy)
            if is_merge:
                merges, merged = key_node, self._merge(key_node, value_node, child, (*parents, id(node)))
            else:
                own[key] = key_node, value_node
        return {**merged, **own}

    def _merge(self, key_node: yaml.Node, value: yaml.Node, path: str, parents: tuple[int, ...]) -> dict[str, _Pair]:
        """The keys that `<<: value` gives: those of one mapping, or of several, of which an earlier one wins."""
        sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
        merged: dict[str, _Pair] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                where = f"{self._source}:{key_node.start_mark.line + 1}: {path}"
                found = (
                    "a list in a list"
                    if isinstance(source, yaml.SequenceNode)
                    else _told(source.value, path) or "nothing"
                )
                problem = f"{found} given, but a mapping or a list of mappings is expected"
                raise RecipeError(where, problem, "merge an anchor of a mapping: <<: *name")
            place = self._enter(source, path, parents)
            if source.tag != f"{_STANDARD}map":
                raise _refused_tag(source, place, path)
            pairs = self._pairs(source, path.removesuffix(_MERGE).removesuffix("."), parents)
            self._merged += 1 + len(pairs)
            merged.update(pairs)
        return merged


def _scalar(loader: _Yaml12Loader, node: yaml.ScalarNode, where: str, path: str) -> Any:
    plain = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    if node.tag not in (plain, f"{_STANDARD}str"):  # `!!int abc` as well
        raise _refused_tag(node, where, path)
    try:
        value = loader.construct_object(node)
    except ValueError:  # Python refuses to read thousands of digits
        value = math.inf
    if isinstance(value, float) and not math.isfinite(value):
        shown = node.value if len(node.value) <= 20 else f"a number of {len(node.value)} digits"
        raise RecipeError(f"{where}: {path}", f"{_told(shown, path)} is not a finite number", "give a finite one")
    if isinstance(value, str) and "\0" in value:
        raise RecipeError(f"{where}: {path}", "the text holds a NUL character", "write a backslash as two")
    return value


def _refused_tag(node: yaml.Node, where: str, path: str) -> RecipeError:
    tag = _told(f"the tag {node.tag.replace(_STANDARD, '!!')}", path)
    return RecipeError(where, f"{tag} is not allowed", "remove the tag; quotes make a value text")


def _told(text: str, path: str) -> str:
    """A piece of a value for an error; of one that is a secret nothing."""
    return "this, which is not shown," if text and is_secret(path) else text


def _key(node: yaml.Node, source: str) -> str:
    """Keys are text as written, as in JSON: `id2label: {0: no, 1: yes}` has the keys "0" and "1"."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise RecipeError(
        f"{source}:{node.start_mark.line + 1}", "a key must be text", "remove the brackets around the key"
    )
