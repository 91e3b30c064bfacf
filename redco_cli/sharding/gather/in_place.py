"""What is done with a weight where it lives, and gathers nothing of it.

taken apart         its pieces, each gathered by itself where it is used
summed              sums of what is computed from each of its entries, as weight decay in a loss is
looked up by all    a few rows that every device uses, as of sampled negatives: these are gathered
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.sharding.gather.sharded import Sharded, part_spec
from redco_cli.sharding.plan import FSDP, as_dims
from redco_cli.sharding.program.lookups import lookup
from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.program.rewrite import INLINED, REMATERIALISED, bind

_SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_OF_EACH = frozenset(ELEMENTWISE.split()) - {"sharding_constraint"}


def taken_apart(equation: Any, weight: Any) -> list[Sharded] | None:
    """The pieces of a weight; None where an equation does something else.

    Args:
        equation: any.
        weight: its first operand.
    """
    if equation.primitive.name != "split" or not isinstance(weight, Sharded) or weight.views:
        return None
    cut, params, ndim = weight.usage.cut, equation.params, weight.value.ndim
    if cut is None or (params["axis"], tuple(params["sizes"])) != (cut.dim, cut.sizes):
        return None

    def where_it_lives(x: Any) -> Any:
        """Told of each piece; else XLA moves the whole to where pieces are used, and the pieces once more."""
        spec = weight.spec if x.ndim == ndim else part_spec(weight.spec, ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(weight.mesh, spec))

    leaves, tree = jax.tree.flatten(weight.arrays)
    pieces = zip(*(map(where_it_lives, jax.lax.split(leaf, cut.sizes, cut.dim)) for leaf in leaves), strict=True)
    return [
        Sharded(jax.tree.unflatten(tree, own), weight.spec, gathered, weight.mesh, usage, is_cast=weight.is_cast)
        for own, (gathered, usage) in zip(pieces, weight.usage.pieces, strict=True)
    ]


def summed_in_place(jaxpr: Any, is_weight: Sequence[bool]) -> frozenset[Any]:
    """Variables of a program, and of the programs inside it, that are computed of weights alone, entry by entry, and of
    which nothing but sums is used.

    Args:
        jaxpr: the program.
        is_weight: for each of its inputs.
    """
    return frozenset(_summed(jaxpr, is_weight))


def _summed(jaxpr: Any, is_weight: Sequence[bool]) -> Iterator[Any]:
    weights = {variable for variable, yes in zip(jaxpr.invars, is_weight, strict=True) if yes}
    computed: list[Any] = []
    others: set[Any] = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    for equation in jaxpr.eqns:
        name, variables = equation.primitive.name, [x for x in equation.invars if not isinstance(x, core.Literal)]
        given = [not isinstance(x, core.Literal) and x in weights for x in equation.invars]
        if name in INLINED | REMATERIALISED and any(given):
            for inner in core.jaxprs_in_params(equation.params):
                yield from _summed(inner, given)
        shapes = {x.aval.shape for x in variables}
        if name in _OF_EACH and variables and weights.issuperset(variables) and len(shapes) == 1:
            weights.update(equation.outvars)
            computed.append(equation)
        elif name not in _SUMS:
            others.update(variables)
    for equation in reversed(computed):
        if equation.outvars[0] in others:
            others.update(x for x in equation.invars if not isinstance(x, core.Literal))
        else:
            yield equation.outvars[0]


def done_in_place(equation: Any, operands: Sequence[Any], summed: Collection[Any]) -> list[Any] | None:
    """The results of an equation that needs no whole weight; None where it does, or has none.

    Args:
        equation: one that looks up no rows of examples.
        operands: its own, of which some may be a `Sharded`.
        summed: see `summed_in_place`.
    """
    if _is_inner_product(equation, operands):
        one, other = (in_place(x).astype(equation.outvars[0].aval.dtype) for x in operands)
        return [(one * other).sum()]
    sums = equation.primitive.name in _SUMS and isinstance(operands[0], Sharded) and not operands[0].views
    if sums or (equation.outvars and equation.outvars[0] in summed):
        return list(bind(equation, [in_place(x) for x in operands]))
    return [_looked_up_by_all(equation, *operands)] if _are_rows_of_all(equation, operands) else None


def in_place(weight: Any) -> Any:
    """The array of a weight where it lives, where its gradient is added up, too; any other operand as it is."""
    if not isinstance(weight, Sharded):
        return weight

    def value(arrays: Any) -> Any:
        return weight.having(arrays).value

    def backward(_: None, gradient: Any) -> tuple[Any]:
        gradient = jax.lax.with_sharding_constraint(gradient, NamedSharding(weight.mesh, weight.spec))
        return (weight.with_sum(gradient),)

    take = jax.custom_vjp(value)
    take.defvjp(lambda arrays: (value(arrays), None), backward)
    return take(weight.arrays)


def _is_inner_product(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether it sums over the products of all entries of two weights of one form."""
    if equation.primitive.name != "dot_general" or not all(isinstance(x, Sharded) for x in operands):
        return False
    contracted, (batched, _) = equation.params["dimension_numbers"]
    in_order = tuple(range(equation.invars[0].aval.ndim))
    views = {tuple(view.primitive.name for view in x.views) for x in operands}
    is_flat = views in ({()}, {("reshape",)})
    same = operands[0].value.shape == operands[1].value.shape
    return same and is_flat and not batched and all(tuple(dims) == in_order for dims in contracted)


def _are_rows_of_all(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether it looks up rows of a weight in shards, fewer than it has, that every device is to have."""
    if lookup(equation) is None or not isinstance(operands[0], Sharded) or isinstance(operands[1], Sharded):
        return False
    table: Sharded = operands[0]
    is_in_shards = any(FSDP in axes for axes in as_dims(table.spec)) and not table.views
    is_float = jnp.issubdtype(table.value.dtype, jnp.floating)
    return bool(is_in_shards and is_float and 2 * math.prod(equation.outvars[0].aval.shape) < table.value.size)


def _looked_up_by_all(equation: Any, table: Sharded, ids: Any) -> Any:
    found = lookup(equation)
    assert found is not None
    used = as_dims(table.gathered, table.value.ndim)
    dims: list[Any] = [None] * equation.outvars[0].aval.ndim
    for place, dim in found.features.items():
        dims[place] = tuple(axis for axis in used[dim] if axis != FSDP) or None
    (rows,) = bind(equation, [in_place(table), ids])
    return jax.lax.with_sharding_constraint(rows, NamedSharding(table.mesh, PartitionSpec(*dims)))
