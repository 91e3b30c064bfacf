"""Moves the rows that are looked up, not the table, where they are fewer.

A table [V, H] in shards over `fsdp`, and ids [B, S] of B examples over D x F devices of `data` and `fsdp`. Gathered as
other parameters are, all of its V rows go to every device, and come back as a gradient, for the sake of B·S / (D·F).
With its features split, [V, H/F], every device knows a part of any row:

    ids         [B/D, S]            of all devices of `fsdp`: a few bytes
    look up     [B/D, S, H/F]       nothing moves
    all-to-all  [B/(D·F), S, H]     over `fsdp`: all features of a device's own tokens

and the gradients of the rows go the same way back, to be added up where the table lives: nothing of it is gathered, and
nothing scattered. Where its features do not divide, the table is split by its rows, [V/F, H]: each device looks up
those that it has, and a reduce-scatter brings rows to their tokens, an all-gather their gradients back. Tables of
recommendation models are split so, by columns or by rows (arXiv 2104.05158).

A few rows that all examples are compared with, as of sampled negatives, are looked up in the devices' parts, and
gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.sharding.decide.tables import are_fewer
from redco_cli.sharding.gather.in_place import in_place
from redco_cli.sharding.gather.sharded import SMALL, Sharded, cut, part_spec, scattered
from redco_cli.sharding.plan import BATCH_AXES, DATA, FSDP, as_dims
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.rewrite import bind
from redco_cli.sharding.program.rows.lookups import lookup


def moves_rows(equation: Any, operands: Sequence[Any], examples: Examples, turns: int = 1) -> bool:
    """Whether an equation looks rows of examples up in a table in shards, and moving these is cheaper.

    Args:
        equation: any.
        operands: its own, of which some are a `Sharded`.
        examples: where they are in its program.
        turns: of a loop, in each of which it does.
    """
    found = lookup(equation)
    if found is None or not isinstance(operands[0], Sharded) or isinstance(operands[1], Sharded):
        return False
    table: Sharded = operands[0]
    shape, ids = table.value.shape, equation.invars[1]
    lives, used = (as_dims(spec, len(shape)) for spec in (table.spec, table.gathered))
    over_fsdp = {dim for dim in range(len(shape)) if FSDP in lives[dim] and FSDP not in used[dim]}
    features = set(found.features.values())
    by_features, by_rows = over_fsdp <= features, not over_fsdp & features
    if table.views or not table.divides or not over_fsdp or not (by_features or by_rows):
        return False
    ways = math.prod(table.mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    rows = math.prod(shape[dim] for dim in range(len(shape)) if dim not in features)
    divides = set(BATCH_AXES) <= set(table.mesh.shape) and ids.aval.shape[0] % ways == 0
    is_float = jnp.issubdtype(table.value.dtype, jnp.floating)
    times = turns * (table.mesh.shape[FSDP] if by_rows else 1)
    few = are_fewer(times * math.prod(ids.aval.shape[:-1]), ways, rows, table.value.nbytes)
    return bool(divides and is_float and few and examples.lead(ids))


def looked_up(equation: Any, table: Sharded, ids: Any, dtype: Any) -> Any:
    """The rows of an equation that `moves_rows`; gradients go back to where the table lives.

    Args:
        equation: the lookup.
        table: whose features are in shards.
        ids: of whole examples.
        dtype: in which rows are moved.
    """
    found, mesh = lookup(equation), table.mesh
    assert found is not None
    ways = mesh.shape[DATA]

    def constrained(x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def where(batch: Any, lives: PartitionSpec) -> PartitionSpec:
        dims: list[Any] = [None] * equation.outvars[0].aval.ndim
        dims[found.ids] = batch
        for place, dim in found.features.items():
            dims[place] = lives[dim] if dim < len(lives) else None
        return PartitionSpec(*dims)

    over_tensor = scattered(table.gathered, table.spec, table.value.ndim)  # as the rows are used
    way = list(dict.fromkeys([where(DATA, table.spec), where(DATA, over_tensor), where(BATCH_AXES, table.gathered)]))

    def moved(x: Any, way: Sequence[PartitionSpec]) -> Any:
        x = x.astype(dtype)
        for spec in way:
            x = constrained(x, spec)
        return x

    def run(arrays: Any, ids: Any) -> Any:
        rows = bind(equation, [table.having(arrays).value, constrained(ids, PartitionSpec(DATA))])[0]
        return moved(rows, way).astype(rows.dtype)

    def forward(arrays: Any, ids: Any) -> tuple[Any, Any]:
        return run(arrays, ids), ids

    def backward(ids: Any, gradient: Any) -> tuple[Any, None]:
        gradient = moved(gradient, way[::-1])
        ids = constrained(ids, PartitionSpec(DATA))
        parts = jax.vmap(part, (0, found.ids), -1)(cut(ids, 0, ways), cut(gradient, found.ids, ways))
        parts = constrained(parts, part_spec(table.spec, parts.ndim - 1)).astype(table.value.dtype)
        if table.is_apart:
            return replace(table.arrays, value=None, parts=parts), None
        return constrained(parts.sum(-1), table.spec), None

    def part(ids: Any, gradient: Any) -> Any:
        """Added up in float32, as a row may have many gradients."""
        anywhere = jnp.zeros(table.value.shape, jnp.float32)
        return jax.vjp(lambda table: bind(equation, [table, ids])[0], anywhere)[1](gradient.astype(jnp.float32))[0]

    apply = jax.custom_vjp(run)
    apply.defvjp(forward, backward)
    return apply(table.arrays, ids)


def looked_up_by_all(equation: Any, operands: Sequence[Any], examples: Examples) -> list[Any] | None:
    """What an equation looks up in a weight but rows of whole examples, evenly shared; None for any other equation.

    Args:
        equation: any.
        operands: its own, of which some may be a `Sharded`.
        examples: where they are in its program.
    """
    if _are_rows_of_all(equation, operands, examples):
        return [_looked_up_by_all(equation, *operands)]
    return [_looked_up_raggedly(equation, *operands)] if _is_ragged(equation, operands) else None


def _are_rows_of_all(equation: Any, operands: Sequence[Any], examples: Examples) -> bool:
    """Whether it looks up rows of a weight in shards, fewer than it has, for no example in particular."""
    if lookup(equation) is None or not isinstance(operands[0], Sharded) or isinstance(operands[1], Sharded):
        return False
    table, ids = operands[0], equation.invars[1]
    is_in_shards = any(FSDP in axes for axes in as_dims(table.spec)) and not table.views
    is_float = jnp.issubdtype(table.value.dtype, jnp.floating) and table.value.nbytes >= SMALL
    few = 2 * math.prod(equation.outvars[0].aval.shape) < table.value.size
    return bool(is_in_shards and is_float and few and (isinstance(ids, core.Literal) or ids not in examples.dims))


def _looked_up_by_all(equation: Any, table: Sharded, ids: Any) -> Any:
    found = lookup(equation)
    assert found is not None
    used = as_dims(table.gathered, table.value.ndim)
    dims: list[Any] = [None] * equation.outvars[0].aval.ndim
    for place, dim in found.features.items():
        dims[place] = tuple(axis for axis in used[dim] if axis != FSDP) or None
    (rows,) = bind(equation, [in_place(table), ids])
    return jax.lax.with_sharding_constraint(rows, NamedSharding(table.mesh, PartitionSpec(*dims)))


def _is_ragged(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether it looks up rows of a weight, of a number that does not divide over the devices that share examples."""
    if lookup(equation) is None or not isinstance(operands[0], Sharded):
        return False
    ways = math.prod(operands[0].mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    return bool(equation.invars[1].aval.shape[0] % ways)


def _looked_up_raggedly(equation: Any, table: Sharded, ids: Any) -> Any:
    """The rows, on every device: XLA fills up what it splits, and adds the gradients of what it filled up to a row."""
    (rows,) = bind(equation, [table.array(), ids.array() if isinstance(ids, Sharded) else ids])
    found = lookup(equation)
    assert found is not None
    dims = [PartitionSpec.UNCONSTRAINED if dim in found.features else None for dim in range(rows.ndim)]
    return jax.lax.with_sharding_constraint(rows, NamedSharding(table.mesh, PartitionSpec(*dims)))
