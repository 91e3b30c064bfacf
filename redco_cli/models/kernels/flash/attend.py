"""The weighted sum of values, and its gradient.

Shapes: B batch, S sequence, H query heads, G key and value heads, D dims of a head, W the next power of two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from redco_cli.chips.target import current_platform
from redco_cli.models.kernels.flash.backward import key_gradients, query_gradients
from redco_cli.models.kernels.flash.blocks import LOG2_E
from redco_cli.models.kernels.flash.forward import forward
from redco_cli.models.kernels.mapped import ATTENDED, SHORTEST, Form, on_each_device, plain_attention
from redco_cli.sharding.program.reference import register_reference

Array = Any
NAME = "flash_attention"


def attend(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sinks: Array | None,
    bias: Array | None = None,
    *,
    window: int | None,
    softcap: float | None,
) -> Array:
    """The weighted sum of values [B, S, H, D], each token's over those before it and itself; as `splash.attend`.

    Args:
        q: [B, S, H, D], with the scale of the scores in it.
        k: [B, S, G, D], `v` likewise.
        segments: tokens see those with the same number only [B, S], int32; None for all.
        sinks: what each query head may look at instead of keys [H]; None for nothing.
        bias: what each key adds to its scores [1 or B, H, S], float32; None for nothing. It has no gradient.
        window: tokens that a token sees, itself included; None for all before it.
        softcap: bound of the scores; None for none.
    """
    form = Form(window, softcap, interpret=current_platform() == "cpu")
    bias = None if bias is None else jnp.broadcast_to(bias, (q.shape[0], *bias.shape[1:]))
    return on_each_device(partial(_on_one_device, form=form), q, k, v, segments, sinks, bias)


def _on_one_device(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, bias: Array | None, *, form: Form
) -> Array:
    """`attend` of the examples and heads of one device, padded to whole blocks: what is added is after all tokens."""
    length = q.shape[1]
    more = -length % SHORTEST
    if more:
        q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q, k, v))
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)
        bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, 0), (0, more)))

    def flash_attention(q: Array, k: Array, v: Array, *others: Array | None) -> Array:
        return _attention(q, k, v, *others, form)

    assert flash_attention.__name__ == NAME
    mixed: Array = jax.jit(flash_attention)(q, k, v, segments, sinks, bias)
    return mixed[:, :length] if more else mixed


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, bias: Array | None, form: Form
) -> Array:
    return forward(q, k, v, segments, sinks, bias, form)[0]


def _kept(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, bias: Array | None, form: Form
) -> tuple[Array, tuple[Any, ...]]:
    mixed, log_sums = (checkpoint_name(x, ATTENDED) for x in forward(q, k, v, segments, sinks, bias, form))
    return mixed, (q, k, v, segments, sinks, bias, mixed, log_sums)


def _backward(form: Form, kept: tuple[Any, ...], gradient: Array) -> tuple[Array | None, ...]:
    q, k, v, segments, sinks, bias, mixed, log_sums = kept
    moved = jnp.einsum("bshd,bshd->bhs", mixed, gradient, preferred_element_type=jnp.float32)
    given = (q, k, v, segments, bias, gradient, log_sums, moved)
    dk, dv = key_gradients(*given, form)
    dq = query_gradients(*given, form)
    if sinks is None:
        return dq, dk, dv, None, None, None
    weights = jnp.exp2(sinks.astype(jnp.float32)[:, None] * LOG2_E - log_sums)
    return dq, dk, dv, None, -jnp.sum(weights * moved, axis=(0, 2)).astype(sinks.dtype), None


_attention.defvjp(_kept, _backward)


register_reference(NAME, plain_attention, causal=True)
