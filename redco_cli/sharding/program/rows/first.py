"""Looks rows up before it computes with them, where a program makes a table of weights, row by row.

    concatenate([old, new])[ids]   ->  where(ids < V, old[ids], new[ids - V])
    (table / norm(table))[ids]     ->  table[ids] / norm(table[ids])
    (table + a @ b)[ids]           ->  table[ids] + a[ids] @ b

What is looked up in a weight moves as rows, if these are fewer, and so does its gradient; what is looked up in
something that is made of it would need all of it, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.lax import GatherScatterMode

from redco_cli.sharding.program.marks import GRADIENT_FIRST, SUMMED_AS
from redco_cli.sharding.program.rewrite import INLINED, REMATERIALISED, bind, rewritten, variables_of
from redco_cli.sharding.program.rows.lookups import lookup
from redco_cli.sharding.program.rows.tables import AS_THEY_ARE, Followed, Table, Weight, is_followed, rows_of, value_of

_TURNS = 8
"""How often each row may be made where that takes more than a lookup: devices share what is looked up."""


@dataclass(frozen=True)
class _RowsFirst:
    """The rewriting."""

    enters: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset({GRADIENT_FIRST, SUMMED_AS})
    everywhere: bool = False

    def is_tracked(self, operand: Any) -> bool:
        """Whether it has to do with no example."""
        return isinstance(operand, Followed)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation; rows of what is made of weights are made of rows of these."""
        followed = [x for x in operands if isinstance(x, Followed)]
        if len(followed) == sum(isinstance(x, Followed | jax.core.Tracer) for x in operands):
            is_of_weights = any(x.is_of_weights for x in followed)
            if followed and is_followed(equation):
                return [Table(equation, tuple(operands), is_of_weights)]
            return [Weight(x, is_of_weights) for x in bind(equation, list(map(value_of, operands)))]
        if _looks_up(equation) and isinstance(operands[0], Table) and operands[0].is_made:
            found = _looked_up(equation, *operands)
            if found is not None:
                return [found]
        return bind(equation, list(map(value_of, operands)))


def rows_first(closed: Any, weights: int) -> Any:
    """A program that looks rows up in weights, and not in what it makes of them row by row.

    Args:
        closed: what `jax.make_jaxpr` returned.
        weights: how many of its first inputs are.

    Returns:
        The same, as `jax.make_jaxpr` returns it, of the same arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> closed = jax.make_jaxpr(lambda table, ids: (table * 2)[ids])(jnp.ones((8, 5)), jnp.array([1, 2]))
        >>> [one.primitive.name for one in rows_first(closed, 1).eqns][-2:]
        ['gather', 'mul']
    """
    if not _looks_up_in_made(
        closed.jaxpr, [_WEIGHT if place < weights else _OTHER for place in range(len(closed.in_avals))]
    ):
        return closed

    def run(*arguments: Any) -> list[Any]:
        return rewritten(closed, [*map(Weight, arguments[:weights]), *arguments[weights:]], _RowsFirst())

    return _without_what_nobody_reads(jax.make_jaxpr(run)(*closed.in_avals))


def _without_what_nobody_reads(closed: Any) -> Any:
    """A program without rows that were looked up in vain."""
    wanted, kept = set(variables_of(closed.jaxpr.outvars)), []
    for equation in reversed(closed.jaxpr.eqns):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            wanted.update(variables_of(equation.invars))
            kept.append(equation)
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=kept[::-1]))


_WEIGHT, _MADE, _OTHER = range(3)


def _looks_up_in_made(jaxpr: Any, given: Sequence[int | None]) -> bool:
    """Whether a program may look rows up in what it makes of weights; `given` says of its inputs what they are."""
    known = {x: one for x, one in zip(jaxpr.invars, given, strict=True) if one is not None}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inside = [known[x] for x in variables_of(equation.invars) if x in known]
        if not inside:
            continue
        if name in INLINED | REMATERIALISED:
            (inner,) = core.jaxprs_in_params(equation.params)
            if _looks_up_in_made(
                inner, [None if isinstance(x, core.Literal) else known.get(x) for x in equation.invars]
            ):
                return True
        elif _looks_up(equation) and known.get(equation.invars[0]) == _MADE:
            return True
        as_it_was = name in AS_THEY_ARE and len(inside) == 1
        made = _OTHER if _OTHER in inside else inside[0] if as_it_was else _MADE
        known.update(dict.fromkeys(equation.outvars, made))
    return False


def _looks_up(equation: Any) -> bool:
    """Whether it looks up rows along the first dim."""
    if lookup(equation) is None:
        return False
    numbers = equation.params["dimension_numbers"]
    return bool(numbers.start_index_map == numbers.collapsed_slice_dims == (0,))


def _looked_up(equation: Any, table: Table, ids: Any) -> Any | None:
    """The rows that an equation looks up in what is made of weights; None where that is not made row by row."""
    numbers, mode = equation.params["dimension_numbers"], GatherScatterMode.from_any(equation.params["mode"])
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact):
        return None
    places, count = value_of(ids)[..., 0], table.shape[0]
    if table.costs and places.size > _TURNS * count:
        return None
    is_within = mode == GatherScatterMode.PROMISE_IN_BOUNDS
    rows = rows_of(table, (places if is_within else jnp.clip(places, 0, count - 1),), {})
    if rows is None:
        return None
    if mode == GatherScatterMode.FILL_OR_DROP:
        fill = equation.params["fill_value"]
        there = ((places >= 0) & (places < count)).reshape(*places.shape, *(1,) * (rows.ndim - places.ndim))
        rows = jnp.where(there, rows, jnp.nan if fill is None else fill).astype(rows.dtype)
    features = list(numbers.offset_dims)
    batch = [dim for dim in range(rows.ndim) if dim not in features]
    order = dict(zip([*batch, *features], range(rows.ndim), strict=True))
    return rows.transpose([order[dim] for dim in range(rows.ndim)])
