"""What must be alike on all processes, told as digests: a value that differs is named by each from its own copy.

No value leaves its process, and neither does a name. The digests are keyed by the secret of the run, so that who does
not have it cannot try values until one fits. Imports no JAX.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redco_cli.recipe import redaction
from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.peers.cluster import Cluster
from redco_cli.runtime.peers.messages import SHOWN

VERSIONED = ("redco", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
"""Packages of which all processes must have the same version."""
_DEVICES = "devices"  # not every process knows of its own before JAX starts: who does not is no different
_DIGITS, _WIDTH = 32, 60
_RECIPE = "recipe "


def facts(cluster: Cluster, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all processes: versions, devices of a process, every value of the recipe."""
    versions = {name: importlib.metadata.version(name) for name in VERSIONED}
    return {
        "python": platform.python_version(),
        **versions,
        _DEVICES: cluster.local_devices,
        **{f"{_RECIPE}{key}": value for key, value in _flat(recipe).items()},
    }


def compared(recipe: Recipe, secret: bytes) -> dict[str, Any]:
    """The values of a recipe for `facts`; secret ones only where the digests are keyed, so that none can be tried."""
    plain = recipe.model_dump(mode="json")
    return {**plain, "plugin": {**plain["plugin"], "options": recipe.plugin.options}} if secret else plain


@dataclass(frozen=True)
class Digests:
    """The facts of a process, for others to compare with theirs.

    Attributes:
        table: digests of names to digests of values.
        whole: of all of the table but the devices.
        devices: None where this process does not know of its own.
    """

    table: Mapping[str, str]
    whole: str
    devices: str | None


def digests(known: Mapping[str, Any], secret: bytes) -> Digests:
    """The facts of this process as digests."""
    named = _named(known, secret)
    table = {
        digest: _digest(secret, "value", name, json.dumps(known[name], sort_keys=True, default=str))
        for digest, name in sorted(named.items())
    }
    devices = table.get(_digest(secret, "name", _DEVICES))
    pairs = [f"{name}={value}" for name, value in table.items() if named[name] != _DEVICES]
    return Digests(table, _digest(secret, "whole", *pairs), devices)


def differing(known: Mapping[str, Any], secret: bytes, theirs: Mapping[str, str]) -> tuple[list[str], int]:
    """Some names of what is not the same here as in another's table, as digests, and how many more there are."""
    mine, devices = digests(known, secret).table, _digest(secret, "name", _DEVICES)
    names = {_digest(secret, "name", name): None for name in known} | dict.fromkeys(theirs)
    one_sided = devices not in mine or devices not in theirs
    found = [name for name in names if mine.get(name) != theirs.get(name) and not (name == devices and one_sided)]
    return found[:SHOWN], max(len(found) - SHOWN, 0)


def differences(
    known: Mapping[str, Any], secret: bytes, process: int, found: Sequence[tuple[int, Sequence[str], int]]
) -> str:
    """What process 0 found to differ, in the words of this process and with its own values.

    Args:
        known: the facts of this process.
        secret: of the run.
        process: which one this is.
        found: of each process that differs from process 0: which, digests of names, and how many more there are.
    """
    named = _named(known, secret)
    mine = [one for one in found if one[0] == process]
    texts, more = [], 0
    for other, names, further in mine or found:
        there, more = 0 if mine else other, more + further
        texts += [_difference(known, named.get(name), there) for name in names]
        if not names:
            texts.append(f"this process and process {there}")
    rest = [other for other, *_ in found if mine and other != process]
    more += len(texts[SHOWN:])
    shown = ", ".join(dict.fromkeys(texts[:SHOWN])) + (f", and {more} more" if more else "")
    if not rest:
        return f"the processes differ: {shown}"
    others = f"process {rest[0]} differs" if len(rest) == 1 else f"process {rest[0]} and {len(rest) - 1} more differ"
    return f"the processes differ: {shown}; {others} from process 0 too"


def shown_value(name: str, value: object) -> str:
    """A value of a recipe for people to read, unless it is a secret or holds one."""
    if redaction.shown_value(name.removeprefix(_RECIPE), value) != value:
        return "a value that is not shown"
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def _difference(known: Mapping[str, Any], name: str | None, there: int) -> str:
    if name is None:
        return f"process {there} has a key that is not there on this process"
    return f"{name} is {shown_value(name, known[name])} here, but not on process {there}"


def _named(known: Mapping[str, Any], secret: bytes) -> dict[str, str]:
    """Digests of names to names, of what this process knows."""
    return {_digest(secret, "name", name): name for name in known if not (name == _DEVICES and known[_DEVICES] is None)}


def _digest(secret: bytes, *parts: str) -> str:
    words = json.dumps(["redco facts", *parts]).encode()
    return hmac.digest(secret, words, "sha256").hex()[:_DIGITS]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
