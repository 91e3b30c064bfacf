"""Optimizer state lives where its parameters live, whatever the transformation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_cli.sharding.ownership import Owner, owners
from redco_cli.sharding.plan import Plan, Row, Usage


def follow(state: Any, params: Any, specs: Any) -> Any:
    """Where each array of a state lives.

    A leaf lives as the parameter that it belongs to (`ownership.owners`). Others, such as counts, live everywhere.

    Args:
        state: of any optax transformation over `params`, arrays or abstract.
        params: the parameters, arrays or abstract.
        specs: like `params`, a `PartitionSpec` each.

    Returns:
        A tree like `state`, of `PartitionSpec`s.
    """
    given = _leaves(specs)
    found = [
        PartitionSpec() if owner is None else _spec(owner, given[owner.parameter]) for owner in owners(state, params)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), found)


def used_alike(state: Any, params: Any, usage: Any) -> Any:
    """How each array of a state is used: as the parameter is that it is another copy of, such as a teacher's.

    Args:
        state: as for `follow`.
        params: the parameters.
        usage: like `params`, a `Usage` each.

    Returns:
        A tree like `state`.
    """
    given, shapes = jax.tree.leaves(usage), [leaf.shape for leaf in jax.tree.leaves(params)]
    found = [
        given[owner.parameter] if owner is not None and shapes[owner.parameter] == leaf.shape else Usage()
        for leaf, owner in zip(jax.tree.leaves(state), owners(state, params), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), found)


def followers(state: Any, plan: Plan, params: Any) -> tuple[Row, ...]:
    """Each array of a state as a row of a plan: where it lives and is used, and why.

    Args:
        state: arrays, or abstract ones.
        plan: of the parameters.
        params: arrays, or abstract ones.
    """
    lives, used = (_leaves(follow(state, params, specs)) for specs in (plan.specs, plan.gathered))
    found = []
    for (path, leaf), spec, gathered, owner in zip(
        jax.tree.leaves_with_path(state), lives, used, owners(state, params), strict=True
    ):
        reason = "whole: belongs to no parameter" if owner is None else f"lies as {plan.rows[owner.parameter].path}"
        whole, size = leaf.size * leaf.dtype.itemsize, _shard_bytes(leaf, spec, plan.mesh)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append(Row(name, tuple(leaf.shape), str(leaf.dtype), spec, gathered, reason, whole, size))
    return tuple(found)


def _leaves(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def _spec(owner: Owner, spec: PartitionSpec) -> PartitionSpec:
    entries = [None if dim is None or dim >= len(spec) else spec[dim] for dim in owner.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def bytes_per_device(tree: Any, specs: Any, mesh: Mapping[str, int]) -> int:
    """What one device holds of a tree of arrays.

    Args:
        tree: arrays, or abstract ones.
        specs: like `tree`, a `PartitionSpec` each.
        mesh: sizes of the mesh axes.
    """
    leaves = jax.tree.leaves(tree)
    return sum(_shard_bytes(leaf, spec, mesh) for leaf, spec in zip(leaves, _leaves(specs), strict=True))


def _shard_bytes(leaf: Any, spec: PartitionSpec, mesh: Mapping[str, int]) -> int:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    ways = math.prod(mesh[axis] for entry in entries for axis in entry)
    whole: int = math.prod(leaf.shape) * leaf.dtype.itemsize
    return whole // ways
