"""Options whose names say that they are secret: their values stay in this process, and are written nowhere.

Which names do is told by `secrecy`. What is written in the place of such a value is always the same text, not even a
digest of it. What reads a written recipe must be given the value again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer

from redco_cli.errors import Problem, RecipeError
from redco_cli.recipe.secrecy import is_secret, may_count, parts_of, says_secret
from redco_cli.recipe.yaml12 import parse_scalar

HIDDEN = "<hidden>"
"""Stands for a value that is not written."""

_TEXTS, _ALL = 1, 2  # of what is hidden below a name: not its numbers where they may count, or those too
_TELLING = 8
"""Characters of a secret that is looked for in what others say: a shorter one may be a word of any sentence."""
_remembered: set[str] = set()


def hidden(value: Any, name: str = "") -> Any:
    """The same plain data, with `HIDDEN` for each secret, at any depth.

    Text is a secret below a name that says so; in a list or mapping there, every text is. So are numbers, but not where
    they may count (`tokens`).

    Args:
        value: of dicts, lists and scalars.
        name: of the option that holds it, or its dotted key.

    >>> hidden({"api_key": "k", "tokens": 5, "servers": [{"host": "h", "password": 123}]})
    {'api_key': '<hidden>', 'tokens': 5, 'servers': [{'host': 'h', 'password': '<hidden>'}]}
    """
    return _hidden(value, _kind(name), name)


def holds_secrets(options: Any) -> bool:
    """Whether `hidden` would hide anything of plain data: two that differ in no more than that are written alike."""
    return bool(hidden(options) != options)


def without_secrets(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as plain data, which an earlier version may have written with the secrets of its plugin."""
    plugin = recipe.get("plugin")
    if not isinstance(plugin, Mapping) or "options" not in plugin:
        return dict(recipe)
    return {**recipe, "plugin": {**plugin, "options": hidden(plugin["options"])}}


def shown_value(key: str, value: Any) -> Any:
    """A value of a recipe as a message may show it.

    Args:
        key: its dotted key, of which any part may say that it is a secret.
        value: as in the recipe.
    """
    parts = parts_of(key)
    kinds = [_kind(name, parent) for parent, name in zip(["", *parts], parts, strict=False)]
    return _hidden(value, max(kinds), parts[-1])


Options = Annotated[dict[str, Any], PlainSerializer(hidden, return_type=dict[str, Any], when_used="json")]
"""Of a plugin: whatever is written of a recipe is written as JSON is, and has no secrets."""


def filled(value: Any, known: Any) -> Any:
    """Written data with each `HIDDEN` replaced by what is at the same place of the data that were written."""
    if isinstance(value, Mapping) and isinstance(known, Mapping):
        return {name: filled(one, known.get(name)) for name, one in value.items()}
    if isinstance(value, list) and isinstance(known, list) and len(value) == len(known):
        return [filled(one, other) for one, other in zip(value, known, strict=True)]
    return known if value == HIDDEN and known is not None else value


def given_again(options: Mapping[str, Any], environ: Mapping[str, str], where: Callable[[str], str]) -> dict[str, Any]:
    """`plugin.options` as the plugin gets them: never with `HIDDEN` in the place of a value.

    Args:
        options: of a recipe, which may be one that redco wrote.
        environ: may hold what was not written: `REDCO_PLUGIN__OPTIONS__API_KEY`. Of the recipe of a run that is loaded
            from Python, and of an exported model, nothing else is taken from there.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: naming each that is not given, and how to give it.
    """
    problems: list[Problem] = []

    def again(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: again(one, f"{key}.{name}") for name, one in value.items()}
        if not _is_gone(value, is_secret(key), key.rpartition(".")[2]):
            return value
        variable = variable_of(key)
        if variable in environ:
            return parse_value(key, environ[variable], f"environment {variable}")
        ways = f"{key}=... on the command line, or {variable} in the environment"
        remedy = f"give it again: {ways}; an option that is no secret needs a name that does not say so"
        problems.append(Problem(where(key), "this value is a secret, which is not kept with a run", remedy))
        return None

    found: dict[str, Any] = again(options, "plugin.options")
    if problems:
        raise RecipeError.of(problems)
    return found


def remember(options: Any, written: Any) -> None:
    """Notes the secrets among the options that a plugin gets, for `scrubbed`.

    Args:
        options: as the plugin gets them.
        written: what `hidden` makes of them.
    """
    if isinstance(options, Mapping):
        for name, value in options.items():
            remember(value, written[name])
    elif isinstance(options, list | tuple):
        for value, other in zip(options, written, strict=True):
            remember(value, other)
    elif written == HIDDEN and len(str(options)) >= _TELLING:
        _remembered.add(str(options))


def scrubbed(text: str) -> str:
    """What plugin code raised, without the secrets that it was given: libraries put addresses with keys into errors."""
    for value in sorted(_remembered, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def variable_of(key: str) -> str:
    """The environment variable of a dotted recipe key: `REDCO_TRAIN__STEPS`."""
    return "REDCO_" + key.upper().replace(".", "__").replace("-", "_")


def key_among(key: str, values: Any, where: str) -> str:
    """The dotted key of an environment variable, which knows neither cases nor dashes, as the recipe writes it.

    Args:
        key: in small letters: `plugin.options.hftoken`.
        values: of the recipe, which may hold `hfToken` there.
        where: the place for the error.

    Raises:
        RecipeError: it has several such keys, none of them written like this.
    """
    found = []
    for part in key.split("."):
        known = values if isinstance(values, Mapping) else {}
        alike = [name for name in known if name.lower().replace("-", "_") == part]
        if len(alike) > 1 and part not in alike:
            raise RecipeError(where, f"may mean {' or '.join(alike)}", "give it on the command line, which knows cases")
        found.append(part if part in alike or not alike else alike[0])
        values = known.get(found[-1])
    return ".".join(found)


def parse_value(key: str, text: str, where: str) -> Any:
    """The value of a dotted key given as text, in YAML.

    Raises:
        RecipeError: it is not valid YAML; the message shows nothing of a secret.
    """
    try:
        return parse_scalar(text)
    except RecipeError as error:
        found, is_syntax = error.problems[0], error.problems[0].problem.startswith("not valid YAML")
        remedy = "quote the value" if is_syntax or is_secret(key) else found.remedy
        problem = "the value, which is not shown, is not valid YAML" if is_secret(key) else found.problem
        raise RecipeError(where, problem, remedy) from None


def shown_override(override: str) -> str:
    """An override as a message may show it, right or wrong: without a value that is a secret or holds one."""
    name, text = name_of(override), override[len(name_of(override)) :].lstrip("=: \t\r\n")
    if not text:
        return override
    try:
        value = parse_scalar(text)
        safe = shown_value(name, value) == value
    except RecipeError:
        safe = name.partition(".")[0] != "plugin" and not is_secret(name)
    return override if safe else f"{name}={HIDDEN}"


def name_of(override: str) -> str:
    """The name in an override, also in one that was meant to be written with `=`."""
    return re.split(r"[=:\s]", override, maxsplit=1)[0]


def _kind(name: str, parent: str = "") -> int:
    """What to hide below a name: 0 for one that says nothing."""
    return 0 if not says_secret(name, parent) else _TEXTS if may_count(name, parent) else _ALL


def _hidden(value: Any, kind: int, parent: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _hidden(one, max(kind, _kind(str(name), parent)), str(name)) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(one, kind, parent) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_gone = (is_number and kind == _ALL) or (isinstance(value, str) and value and kind)
    return HIDDEN if is_gone else value


def _is_gone(value: Any, says: bool, parent: str) -> bool:
    """Whether a value that is no mapping was not written, or one in it; no line of a recipe gives an item of a list."""
    if isinstance(value, list):
        return any(_is_gone(one, says, parent) for one in value)
    if isinstance(value, Mapping):
        return any(_is_gone(one, says or says_secret(name, parent), name) for name, one in value.items())
    return says and value == HIDDEN
