"""Causal attention on TPUs by JAX's splash kernel, which never writes the weights to memory.

Source: jax/experimental/pallas/ops/tpu/splash_attention (JAX 0.10), FlashAttention (arXiv 2205.14135).

Shapes: B batch, S sequence, H query heads, G key and value heads, D dims of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.chips.target import current_platform
from redco_cli.models.kernels.mapped import ATTENDED, Form, on_each_device, plain_attention
from redco_cli.sharding.program.reference import register_reference

Array = Any
NAME = "splash_attention"
_BLOCKS = (512, 256, 128)
"""Tokens of a block of queries or keys, at best. Blocks of 2,048 need more of a core's memory than the compiler gives a
kernel by itself."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sinks: Array | None,
    *,
    window: int | None,
    softcap: float | None,
) -> Array:
    """The weighted sum of values [B, S, H, D], each token's over those before it and itself.

    Args:
        q: [B, S, H, D], with the scale of the scores in it.
        k: [B, S, G, D], `v` likewise.
        segments: tokens see those with the same number only [B, S], int32; None for all.
        sinks: what each query head may look at instead of keys [H]; None for nothing.
        window: tokens that a token sees, itself included; None for all before it.
        softcap: bound of the scores; None for none.
    """
    form = Form(window, softcap, interpret=current_platform() == "cpu")
    return on_each_device(partial(_on_one_device, form=form), q, k, v, segments, sinks)


def _on_one_device(q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, *, form: Form) -> Array:
    """`attend` of the examples and heads of one device, padded to whole blocks: what is added is after all tokens."""
    length = q.shape[1]
    block = next((size for size in _BLOCKS if length >= 2 * size), _BLOCKS[-1])
    more = -length % block
    if more:
        q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q, k, v))
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)

    def splash_attention(q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None) -> Array:
        return _blocks(q, k, v, segments, sinks, form=form, block=block)

    assert splash_attention.__name__ == NAME
    mixed: Array = jax.jit(splash_attention)(q, k, v, segments, sinks)
    return mixed[:, :length] if more else mixed


def _blocks(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, *, form: Form, block: int
) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    seen: Any = masks.CausalMask((length, length))
    if form.window is not None and form.window < length:
        seen = masks.LocalMask((length, length), (form.window - 1, 0), 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([seen] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=form.softcap,
        residual_checkpoint_name=ATTENDED,
        interpret=form.interpret,
    )

    def row(q: Array, k: Array, v: Array, numbers: Array | None) -> Array:
        among = None if numbers is None else kernels.SegmentIds(numbers, numbers)
        return kernel(q, k, v, among, sinks)

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    mixed: Array = jax.vmap(row)(q, k, v, segments)
    return jnp.swapaxes(mixed, 1, 2)


register_reference(NAME, plain_attention, causal=True)
