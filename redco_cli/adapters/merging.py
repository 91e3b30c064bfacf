"""Weights merged with their low-rank factors, and the norms that DoRA needs without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.adapters.uses import Use

Array = Any
_TINY = 1e-30
"""Least square of a norm, so that a weight of zeros divides nothing by zero."""


@dataclass(frozen=True)
class LowRank:
    """How one weight is adapted.

    Attributes:
        rank: r.
        scale: s.
        dropout: the share of the path's input that is dropped in training, 0 to 1.
    """

    rank: int
    scale: float
    dropout: float = 0.0


def whole_path(factors: Mapping[str, Array]) -> tuple[Array, Array]:
    """A [..., in, r] and B [..., r, out] of all that is beside a weight.

    Where the path began with a part of the weight (`adapters.principal`), that part is subtracted, and these are twice
    as wide: A·B - A0·B0 = [A | A0]·[B ; -B0].

    Args:
        factors: `A` and `B`, and perhaps `initial_A` and `initial_B`.
    """
    if "initial_A" not in factors:
        return factors["A"], factors["B"]
    a = jnp.concatenate([factors["A"], factors["initial_A"]], axis=-1)
    return a, jnp.concatenate([factors["B"], -factors["initial_B"]], axis=-2)


def column_norms(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """|W + s·A·B| of each output, float32; nothing is differentiated through it.

    Args:
        weight: [..., in, out].
        a: [..., in, r].
        b: [..., r, out].
        scale: s.
    """
    return norms_of(squared_norms(weight, a, b, scale))


def norms_of(squares: Array) -> Array:
    """Norms from their squares."""
    return jnp.sqrt(jnp.maximum(squares, _TINY))


def squared_norms(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """The squares of `column_norms`: of parts of the input, they add up to those of the whole."""
    weight, a, b = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in (weight, a, b))
    both = jnp.einsum("...ir,...io->...ro", a, weight)
    squared = jnp.einsum("...ir,...iq->...rq", a, a)
    mixed = 2 * scale * both + scale**2 * jnp.einsum("...rq,...qo->...ro", squared, b)
    return jnp.square(weight).sum(-2) + (b * mixed).sum(-2)


def magnitude_ratio(weight: Array, factors: Mapping[str, Array], scale: float) -> Array:
    """What DoRA multiplies each output by, m / |W + s·A·B|; float32.

    Args:
        weight: [..., in, out].
        factors: as for `adapting`; `ratio` among them is that.
        scale: s.
    """
    if "ratio" in factors:
        return factors["ratio"]
    return factors["magnitude"] / path_norms(weight, factors, scale)


def path_norms(weight: Array, factors: Mapping[str, Array], scale: float) -> Array:
    """`column_norms` of a weight with all that is beside it."""
    return column_norms(weight, *whole_path(factors), scale)


def merged(weight: Array, factors: Mapping[str, Array], how: LowRank, use: Use) -> Array:
    """A weight that computes alone what it computes with its adapter.

    Args:
        weight: as it is stored.
        factors: as for `adapting`.
        how: rank and scale.
        use: of the weight.

    Returns:
        In shape and type of the weight; computed in float32.
    """
    a, b = (factor.astype(jnp.float32) for factor in whole_path(factors))
    own = use.matrix(weight.astype(jnp.float32))
    total = own + how.scale * (a @ b)
    if "magnitude" in factors:
        total *= magnitude_ratio(own, factors, how.scale)[..., None, :]
    return use.stored(total, weight.shape).astype(weight.dtype)
