"""Options whose names say that they are secret: their values stay in this process, and are written nowhere.

A name says so by its last word: `api_key`, `hfToken`, `password`. What is written in the place of such a value is
always the same text, not even a digest of it. What reads a written recipe must be given the value again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer

from redco_cli.errors import Problem, RecipeError
from redco_cli.recipe.yaml12 import parse_scalar

HIDDEN = "<hidden>"
"""Stands for a value that is not written."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = frozenset({"password", "passwd", "passphrase", "secret", "credential"})
"""What is never a number that counts something: a password of digits is one too."""
_MAYBE = frozenset({"key", "apikey", "token"})
_SPECIAL = re.compile(
    "added|audio|begin|blank|bos|boundary|class|cls|end|eom|eos|eot|fill|filler|fim|image|mask|middle|newline|pad|"
    "padding|prefix|sentinel|sep|separator|special|start|stop|suffix|unk|unknown|video"
)
"""Words before `token` that speak of a tokenizer: `pad_token`."""

_TELLING = 8
"""Characters of a secret that is looked for in what others say: a shorter one may be a word of any sentence."""
_remembered: set[str] = set()


def says_secret(name: str) -> bool:
    """Whether the name of an option says that its value is a secret.

    >>> [says_secret(name) for name in ("api_key", "hfToken", "db-passwords", "secret2")]
    [True, True, True, True]
    >>> [says_secret(name) for name in ("max_tokens_seen", "pad_token", "keyboard", "tokenizer", "key_length")]
    [False, False, False, False, False]
    """
    return _kind(name) is not None


def hidden(value: Any, name: str = "") -> Any:
    """The same plain data, with `HIDDEN` for each secret, at any depth.

    Text is a secret below a name that says so; in a list or mapping there, every text is. Numbers are under `password`
    and the like, but not under `key` and `token`, where they count (`max_tokens`).

    Args:
        value: of dicts, lists and scalars.
        name: of the option that holds it, or its dotted key.

    >>> hidden({"api_key": "k", "max_tokens": 5, "servers": [{"host": "h", "password": 123}]})
    {'api_key': '<hidden>', 'max_tokens': 5, 'servers': [{'host': 'h', 'password': '<hidden>'}]}
    """
    return _hidden(value, _kind(name))


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
    kinds = [kind for part in key.split(".") if (kind := _kind(part)) is not None]
    return _hidden(value, _SECRET if _SECRET in kinds else kinds[0] if kinds else None)


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

    def again(value: Any, key: str, says: bool) -> Any:
        if isinstance(value, Mapping):
            return {name: again(one, f"{key}.{name}", says or says_secret(name)) for name, one in value.items()}
        if not _is_gone(value, says):
            return value
        variable = variable_of(key)
        if variable in environ:
            return parse_value(key, environ[variable], f"environment {variable}")
        ways = f"{key}=... on the command line, or {variable} in the environment"
        remedy = f"give it again: {ways}; an option that is no secret needs a name that does not say so"
        problems.append(Problem(where(key), "this value is a secret, which is not kept with a run", remedy))
        return None

    found: dict[str, Any] = again(options, "plugin.options", False)
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
    return "REDCO_" + key.upper().replace(".", "__")


def parse_value(key: str, text: str, where: str) -> Any:
    """The value of a dotted key given as text, in YAML.

    Raises:
        RecipeError: it is not valid YAML; the message shows nothing of a secret.
    """
    try:
        return parse_scalar(text)
    except RecipeError as error:
        found, is_syntax = error.problems[0], error.problems[0].problem.startswith("not valid YAML")
        remedy = "quote the value" if is_syntax or _is_secret(key) else found.remedy
        problem = "the value, which is not shown, is not valid YAML" if _is_secret(key) else found.problem
        raise RecipeError(where, problem, remedy) from None


def shown_override(override: str) -> str:
    """An override as a message may show it, right or wrong."""
    name = re.split(r"[=:\s]", override, maxsplit=1)[0]
    return f"{name}={HIDDEN}" if _is_secret(name) and len(override) > len(name) else override


def _is_secret(key: str) -> bool:
    """Whether any part of a dotted key says so."""
    return any(map(says_secret, key.split(".")))


def _kind(name: str) -> frozenset[str] | None:
    """The words that the last one of a name is among; None for a name that says nothing."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    if not words:
        return None
    last = words[-1] if words[-1] in _SECRET | _MAYBE else words[-1].removesuffix("s")
    if last == "token" and len(words) > 1 and _SPECIAL.fullmatch(words[-2]):
        return None
    return next((kind for kind in (_SECRET, _MAYBE) if last in kind), None)


def _hidden(value: Any, kind: frozenset[str] | None) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _hidden(one, _SECRET if kind is _SECRET else _kind(str(name)) or kind) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hidden(one, kind) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_secret = kind is not None and ((isinstance(value, str) and value) or (is_number and kind is _SECRET))
    return HIDDEN if is_secret else value


def _is_gone(value: Any, says: bool) -> bool:
    """Whether a value that is no mapping was not written, or one in it; no line of a recipe gives an item of a list."""
    if isinstance(value, list):
        return any(_is_gone(one, says) for one in value)
    if isinstance(value, Mapping):
        return any(_is_gone(one, says or says_secret(name)) for name, one in value.items())
    return says and value == HIDDEN
