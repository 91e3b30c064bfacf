"""Which keys of a config transformers reads to build, run or generate with a PyTorch model: decides what is refused.

A key that is read and not honoured here is refused by name; one that nothing reads changes nothing there either, and
is a warning. `known_keys.json` is data, so that neither torch nor a network is needed: tests/models/config/reads.py
records what tiny models ask their configs for, adds what the sources of transformers load, and writes it; a test
compares.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from redco_cli.console import warn

FILE = Path(__file__).with_suffix(".json")


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


@functools.cache
def generation_keys() -> frozenset[str]:
    """Settings of generation that a `config.json` may hold: generation reads them, or refuses what it cannot follow."""
    return frozenset(_table()["generation"])


def is_read(model_type: str, key: str) -> bool:
    """Whether transformers reads a key of a config; every key counts as read of a type that the table does not know.

    >>> is_read("gpt2", "scale_attn_weights"), is_read("gpt2", "n_ctx"), is_read("gpt2", "sliding_window")
    (True, False, True)
    """
    own = _table()["model_types"].get(model_type)
    return own is None or key in own or key in _table()["everywhere"] or key in generation_keys()


def own_keys(model_type: str) -> frozenset[str]:
    """What the classes of a model type read themselves; empty where the table does not know it."""
    return frozenset(_table()["model_types"].get(model_type, ()))


@functools.cache
def rope_keys(kind: str) -> frozenset[str]:
    """What a kind of `rope_scaling` reads of it, besides the key that names the kind."""
    return frozenset(_table()["rope_scaling"].get(kind, ()))


@functools.cache
def any_rope_key() -> frozenset[str]:
    """What any kind of `rope_scaling` holds, the keys that name the kind and transformers 5 adds among them."""
    return frozenset({"type", "rope_type", "rope_theta"}).union(*map(rope_keys, _table()["rope_scaling"]))


def warn_unread(place: str, model_type: str, keys: Iterable[str]) -> None:
    """One line, once in a process, about keys that transformers does not read.

    Args:
        place: of the config, or of the first of them.
        model_type: of the config.
        keys: their names, those in mappings with dots; nothing is said when there are none.
    """
    names = ", ".join(sorted(keys))
    if names:
        version = _table()["transformers"]
        problem = f"nothing in transformers {version} reads these settings of {model_type}, and they are ignored"
        _warn_once(f"{place}: {problem}: {names}")


@functools.cache
def _warn_once(text: str) -> None:
    warn(text)
