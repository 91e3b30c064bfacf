"""What pydantic found wrong with a recipe, told with place, value, reason and remedy."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from redco_cli.errors import Problem, RecipeError
from redco_cli.recipe.redaction import shown_value
from redco_cli.recipe.schema import Recipe

_CONSENT = "checkpoint.accept"
_WANTED = {
    "string_type": "text",
    "string_too_short": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "tuple_type": "a list",
}


def explain(error: ValidationError, where: Callable[[str], str]) -> list[Problem]:
    """One problem per mistake, in the order of the schema.

    Args:
        error: what `Recipe.model_validate` raised.
        where: dotted key to the place where its value (or its nearest parent) was given, with the key.
    """
    by_key: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key(detail), []).append(detail)
    for key, details in list(by_key.items()):
        deeper = any(other.startswith(f"{key}.") for other in by_key)
        if deeper and isinstance(details[0]["input"], dict | list):  # what was meant is clear, and wrong further down
            del by_key[key]
    return [_problem(key, details, where) for key, details in by_key.items()]


def matching_paths(patterns: Sequence[str], known: Sequence[str], where: str, meant: Callable[[str], str]) -> list[str]:
    """Those of the parameter paths that regular expressions of a recipe match whole, in the order of the paths.

    Args:
        patterns: each must match something.
        known: paths.
        where: the place of the patterns.
        meant: of a pattern that matches nothing, what to write instead.

    Raises:
        RecipeError: a pattern is malformed or matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            matches = {path for path in known if re.fullmatch(pattern, path)}
        except re.error as error:
            raise RecipeError(where, f"{pattern!r} is no regular expression: {error}", "escape special signs") from None
        if not matches:
            raise RecipeError(where, f"{pattern!r} matches no parameter path", meant(pattern))
        chosen |= matches
    return [path for path in known if path in chosen]


def refuse_written_consent(origins: Mapping[str, str]) -> None:
    """Refuses `checkpoint.accept` from anywhere but the command line, by the origins of the keys of a recipe.

    Raises:
        RecipeError: a file or the environment gives it.
    """
    written = {key: origin for key, origin in origins.items() if f"{key}.".startswith(f"{_CONSENT}.")}
    for origin in written.values():
        if origin != "command line":
            problem = "is consent to one change, and what is written down would consent to every later one too"
            raise RecipeError(f"{origin}: {_CONSENT}", problem, "give it on the command line, when a run was refused")


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """A remedy for an unknown name: the closest known one, or all of them."""
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _key(detail: Mapping[str, Any]) -> str:
    """The dotted key, without the names pydantic adds for the members of a union."""
    if detail["type"] == "contradiction":
        return str(detail["ctx"]["key"])
    parts: list[str] = []
    fields: Any = Recipe
    for part in detail["loc"]:
        section = _section(fields)
        if section is not None and part in section.model_fields:
            fields = section.model_fields[part].annotation
            parts.append(str(part))
        elif isinstance(part, int):
            fields = _item(fields)
            parts.append(str(part))
        elif typing.get_origin(fields) is dict and part != "[key]":
            fields = typing.get_args(fields)[1]
            parts.append(str(part))
        elif detail["type"] == "extra_forbidden" and part == detail["loc"][-1]:
            parts.append(str(part))
    return ".".join(parts)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section among the members of an annotation such as `MeshSection | Literal["auto"]`."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _item(annotation: Any) -> Any:
    """What a list holds, such as `OverrideSection` of `tuple[OverrideSection, ...]`."""
    for member in _members(annotation):
        if typing.get_origin(member) is tuple:
            return typing.get_args(member)[0]
    return None


def _members(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    elif typing.get_origin(annotation) is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    else:
        yield annotation


def _problem(key: str, details: Sequence[Mapping[str, Any]], where: Callable[[str], str]) -> Problem:
    detail = details[0]
    if detail["type"] == "contradiction":
        return Problem(where(key), detail["ctx"]["problem"], detail["ctx"]["remedy"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, where)
    if detail["type"] == "missing":
        return Problem(where(key), "is missing", f"add it: {_described(key)}")
    reasons = list(dict.fromkeys(_reason(one) for one in details))
    return Problem(
        where(key), f"{_shown(shown_value(key, detail['input']))} given, but {' or '.join(reasons)}", _described(key)
    )


def _unknown_key(key: str, where: Callable[[str], str]) -> Problem:
    parent, _, name = key.rpartition(".")
    section = field_section(parent)
    if section is None:
        return Problem(where(key), f"unknown key: {parent} is one value, and has no keys below it", _described(parent))
    known = sorted(section.model_fields)
    if name in known:
        return Problem(where(key), "unknown key", f"write {name} below {parent}; dots are for the command line")
    meant = did_you_mean(name, known)
    elsewhere = [one for one in _nested(Recipe) if one.rpartition(".")[2] == name.rpartition(".")[2]]
    if elsewhere and (not parent or meant.startswith("known")):
        meant = f"did you mean {' or '.join(elsewhere)}?"
    return Problem(where(key), "unknown key", meant)


def _nested(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted key of each field of the sections below a section, those apart that stand below names."""
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            yield from (f"{prefix}{name}.{one}" for one in inner.model_fields)
            yield from _nested(inner, f"{prefix}{name}.")


def field_section(key: str) -> type[BaseModel] | None:
    """The section that the dotted `key` names; the recipe itself for the empty key; None for anything else."""
    annotation: Any = Recipe
    for part in key.split(".") if key else ():
        section = _section(annotation)
        if section is not None and part in section.model_fields:
            annotation = section.model_fields[part].annotation
        elif part.isdecimal():
            annotation = _item(annotation)
        elif typing.get_origin(annotation) is dict:  # sections by name
            annotation = typing.get_args(annotation)[1]
        else:
            return None
    return _section(annotation)


def accepts_only_text(key: str) -> bool:
    """Whether the schema takes text and nothing else at the dotted `key`, so that `name=123` means "123"."""
    parent, _, name = key.rpartition(".")
    section = field_section(parent)
    if section is None or name not in section.model_fields:
        return False
    members = set(_members(section.model_fields[name].annotation)) - {type(None)}
    return members == {str}


def _reason(detail: Mapping[str, Any]) -> str:
    wanted = _WANTED.get(detail["type"])
    if wanted:
        return f"{wanted} is expected"
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        return f"one of {context['expected']} is expected"
    if detail["type"] == "value_error":
        return str(context["error"])
    bounds = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", ">="), "less_than": ("lt", "<")}
    bounds["less_than_equal"] = ("le", "<=")
    if detail["type"] in bounds:
        name, sign = bounds[detail["type"]]
        return f"a number {sign} {context[name]} is expected"
    return str(detail["msg"])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _described(key: str) -> str:
    """What the schema says of the nearest documented key."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        section = field_section(".".join(parts[: end - 1]))
        if section is not None and parts[end - 1] in section.model_fields:
            description = section.model_fields[parts[end - 1]].description or ""
            return f"{'.'.join(parts[:end])}: {' '.join(description.split())}"
    return ""
