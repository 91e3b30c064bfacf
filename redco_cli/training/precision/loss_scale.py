"""Dynamic loss scaling: gradients in float16 vanish below 6e-8 and overflow above 65504, so the loss is scaled up.

What is differentiated is `scale / w` times the loss sum of a micro-batch, with w its weight rounded up to a power of
two: the mean loss times the scale, as PyTorch has it. The gradient is divided by the same factor in float32, which is
exact, for it is a power of two. A step whose loss or gradient is not finite halves the scale; many in a row that are
finite double it.

Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740; the numbers are those of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.models.several import section_of
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import Recipe

Array = Any
FIRST = (65536.0, 0)
"""What a run begins with: the scale, and steps in a row with a finite gradient."""
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """How much a loss is scaled up.

    Attributes:
        scale: float32 scalar, a power of two; what the mean loss is multiplied by.
        finite_steps: int32 scalar; steps in a row with a finite gradient since it last changed.
    """

    scale: Array
    finite_steps: Array


def first_scale(recipe: Recipe) -> LossScale | None:
    """What a run begins with; None where no model of it computes in float16."""
    dtypes = {section_of(recipe, name).dtype for name in ("model", *recipe.models)}
    return saved_scale(FIRST) if "float16" in dtypes else None


def saved_scale(values: tuple[float, int]) -> LossScale:
    """A scale from what `values_of` says of it."""
    return LossScale(jnp.float32(values[0]), jnp.int32(values[1]))


def values_of(scale: LossScale | None) -> tuple[float, int] | None:
    """A scale as plain numbers, exact; None for none."""
    return None if scale is None else (float(scale.scale), int(scale.finite_steps))


def scaled(total: Array, weight: Array, scale: LossScale | None) -> Array:
    """What is differentiated instead of a loss sum; the sum itself without a scale.

    Args:
        total: the loss sum of a micro-batch.
        weight: what it will be divided by; not differentiated.
        scale: of this step.
    """
    return total if scale is None else total * _factor(weight, scale)


def unscaled(gradient: Params, weight: Array, scale: LossScale | None) -> Params:
    """The gradient of the loss sum itself.

    Args:
        gradient: in float32, of what `scaled` returned; likewise `weight` and `scale`.
    """
    return gradient if scale is None else jax.tree.map(lambda leaf: leaf / _factor(weight, scale), gradient)


def following(scale: LossScale | None, finite: Array, weight: Array) -> LossScale | None:
    """The scale of the next step.

    Args:
        scale: of this step.
        finite: bool scalar; whether loss and gradient were.
        weight: of the whole batch: a batch without any is not finite whatever the scale, which then stays.
    """
    if scale is None:
        return None
    grows = scale.finite_steps + 1 >= _INTERVAL
    after = jnp.where(grows, scale.scale * _GROWTH, scale.scale)
    failed = jnp.where(weight == 0, scale.scale, scale.scale * _BACKOFF)
    in_a_row = jnp.where(grows, 0, scale.finite_steps + 1)
    return LossScale(jnp.where(finite, after, failed), jnp.where(finite, in_a_row, 0))


def _factor(weight: Array, scale: LossScale) -> Array:
    _, exponent = jnp.frexp(jax.lax.stop_gradient(weight).astype(jnp.float32))
    return scale.scale / jnp.ldexp(jnp.float32(1), exponent)
