"""Optimizer state lives where its parameters live, whatever the transformation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

Keys = tuple[str, ...]


def follow(state: Any, params: Any, specs: Any) -> Any:
    """Where each array of a state lives.

    A leaf whose place in the state ends with the place of a parameter belongs to it: moments have its shape, factored
    second moments (Adafactor, arXiv 1804.04235) its shape without one dim. Others, such as counts, live everywhere.

    Args:
        state: of any optax transformation over `params`, arrays or abstract.
        params: the parameters, arrays or abstract.
        specs: like `params`, a `PartitionSpec` each.

    Returns:
        A tree like `state`, of `PartitionSpec`s.
    """
    known = {
        _keys(path): (tuple(leaf.shape), spec)
        for (path, leaf), spec in zip(
            jax.tree.leaves_with_path(params),
            jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)),
            strict=True,
        )
    }
    longest = max(map(len, known), default=0)
    return jax.tree.map_with_path(lambda path, leaf: _spec(_keys(path), tuple(leaf.shape), known, longest), state)


def _spec(
    keys: Keys, shape: tuple[int, ...], known: Mapping[Keys, tuple[tuple[int, ...], PartitionSpec]], longest: int
) -> PartitionSpec:
    for length in range(min(longest, len(keys)), -1, -1):
        found = known.get(keys[len(keys) - length :])
        spec = None if found is None else _fitted(shape, *found)
        if spec is not None:
            return spec
    return PartitionSpec()


def _fitted(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec | None:
    """The spec of a parameter for an array of its shape, of its shape without a dim, or of several of it."""
    entries = [*spec, *(None for _ in range(len(whole) - len(spec)))]
    if shape == whole:
        return spec
    for dropped in range(len(whole)):
        if shape == whole[:dropped] + whole[dropped + 1 :]:
            return PartitionSpec(*entries[:dropped], *entries[dropped + 1 :])
    more = len(shape) - len(whole)
    return PartitionSpec(*(None,) * more, *spec) if more > 0 and shape[more:] == whole else None


def _keys(path: Sequence[Any]) -> Keys:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def bytes_per_device(tree: Any, specs: Any, mesh: Mapping[str, int]) -> int:
    """What one device holds of a tree of arrays.

    Args:
        tree: arrays, or abstract ones.
        specs: like `tree`, a `PartitionSpec` each.
        mesh: sizes of the mesh axes.
    """
    leaves = jax.tree.leaves(tree)
    places = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    return sum(_shard_bytes(leaf, spec, mesh) for leaf, spec in zip(leaves, places, strict=True))


def _shard_bytes(leaf: Any, spec: PartitionSpec, mesh: Mapping[str, int]) -> int:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    ways = math.prod(mesh[axis] for entry in entries for axis in entry)
    whole: int = math.prod(leaf.shape) * leaf.dtype.itemsize
    return whole // ways
