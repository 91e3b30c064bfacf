"""The form in which a state is saved: nested dicts of text keys, whatever the classes of optax or the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def to_state_dict(tree: Any) -> dict[str, Any]:
    """Any pytree as nested dicts of text keys: what is on disk then depends on no class of optax."""
    result: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, name = [jax.tree_util.keystr((part,), simple=True) for part in path]
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = leaf
    return result


def from_state_dict(saved: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `to_state_dict`, with the structure of `like`."""

    def pick(path: Any, _leaf: Any) -> Any:
        inner: Any = saved
        for part in path:
            inner = inner[jax.tree_util.keystr((part,), simple=True)]
        return inner

    return jax.tree_util.tree_map_with_path(pick, like)


def shape_mismatches(saved: Any, wanted: Any) -> list[str]:
    """Each array of nested dicts whose shape differs: `hidden/kernel is [5, 16], not [5, 8]`."""
    there, here = _shapes(saved), _shapes(wanted)
    wrong = [
        f"{path} is {there[path]}, not {here[path]}" for path in there if path in here and there[path] != here[path]
    ]
    return [
        *wrong,
        *(f"{path} is missing" for path in here if path not in there),
        *(f"{path} is not used" for path in there if path not in here),
    ]


def _shapes(tree: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.shape) for path, leaf in leaves}
