"""Weights that a program takes apart where it uses them: their pieces, each gathered by itself."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from redco_cli.sharding.gather.sharded import Sharded, part_spec


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
