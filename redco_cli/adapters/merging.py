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


def merged(weight: Array, factors: Mapping[str, Array], how: LowRank, use: Use) -> Array:
    """A weight that computes alone what it computes with its adapter.

    Args:
        weight: as it is stored.
        factors: `A`, `B` and perhaps `magnitude`, as for `adapting`.
        how: rank and scale.
        use: of the weight.

    Returns:
        In shape and type of the weight; computed in float32.
    """
    a, b = (factors[name].astype(jnp.float32) for name in ("A", "B"))
    own = use.matrix(weight.astype(jnp.float32))
    total = own + how.scale * (a @ b)
    if "magnitude" in factors:
        total *= (factors["magnitude"] / column_norms(own, a, b, how.scale))[..., None, :]
    return use.stored(total, weight.shape).astype(weight.dtype)
