"""Causal attention on TPUs by JAX's splash kernel, which never writes the weights to memory.

The compiler partitions no kernel of Pallas: it runs inside of `jax.shard_map`, on each device's own examples and heads.
Which mesh that is, whoever traces the model says (`sharding.tensor_split`). Where programs are for CPUs it is
interpreted, so that tests compare the same code with the plain form.

Source: jax/experimental/pallas/ops/tpu/splash_attention (JAX 0.10), FlashAttention (arXiv 2205.14135).

Shapes: B batch, S sequence, H query heads, G key and value heads, D dims of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_cli.chips.target import current_platform, current_target
from redco_cli.sharding.batch_shards import is_batch_sharded
from redco_cli.sharding.plan import BATCH_AXES, TENSOR
from redco_cli.sharding.program.reference import register_reference
from redco_cli.sharding.tensor_split import current_mesh

Array = Any
NAME = "splash_attention"
ATTENDED = "attended"
"""Name of what attention gives, for policies of what a backward pass recomputes."""
_SHORTEST = 128
"""Tokens, below which a block would be mostly padding: the lanes of a TPU."""
_BLOCKS = (512, 256, 128)
"""Tokens of a block of queries or keys, at best. Blocks of 2,048 need more of a core's memory than the compiler gives a
kernel by itself."""


@dataclass(frozen=True)
class Splash:
    """What is fixed when the kernel is made.

    Attributes:
        window: tokens that a token sees, itself included; None for all before it.
        softcap: bound of the scores; None for none.
        interpret: run it as plain JAX operations.
    """

    window: int | None
    softcap: float | None
    interpret: bool


def can_attend(batch: int, length: int) -> bool:
    """Whether the kernel runs for rows of such a number and length in what is traced now.

    Where nobody says for which mesh, as when a user calls a loaded model, several devices may share the arrays, and
    the plain form is right on all of them. A program that is read to be planned runs on none.
    """
    if length < _SHORTEST:
        return False
    mesh = current_mesh()
    if mesh is not None:
        return bool(batch % math.prod(mesh.shape[axis] for axis in BATCH_AXES) == 0)
    is_read = is_batch_sharded() or current_target() is not None
    return is_read or current_platform() == "cpu" or jax.device_count() == 1


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
    splash = Splash(window, softcap, interpret=current_platform() == "cpu")
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return _on_one_device(q, k, v, segments, sinks, splash=splash)
    ways = mesh.shape[TENSOR]
    heads = TENSOR if q.shape[2] % ways == 0 else None
    if heads and k.shape[2] % ways:
        k, v = (repeat_heads(x, q.shape[2]) for x in (k, v))
    tokens = PartitionSpec(BATCH_AXES, None, heads, None)
    given = (tokens, tokens, tokens, PartitionSpec(BATCH_AXES, None), PartitionSpec(heads))
    mapped = jax.shard_map(
        partial(_on_one_device, splash=splash), mesh=mesh, in_specs=given, out_specs=tokens, check_vma=False
    )
    mixed: Array = mapped(q, k, v, segments, sinks)
    return mixed


def _on_one_device(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, *, splash: Splash
) -> Array:
    """`attend` of the examples and heads of one device, padded to whole blocks: what is added is after all tokens."""
    length = q.shape[1]
    block = next((size for size in _BLOCKS if length >= 2 * size), _BLOCKS[-1])
    more = -length % block
    if more:
        q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q, k, v))
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)

    def splash_attention(q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None) -> Array:
        return _blocks(q, k, v, segments, sinks, splash=splash, block=block)

    assert splash_attention.__name__ == NAME
    mixed: Array = jax.jit(splash_attention)(q, k, v, segments, sinks)
    return mixed[:, :length] if more else mixed


def _blocks(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, *, splash: Splash, block: int
) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    seen: Any = masks.CausalMask((length, length))
    if splash.window is not None and splash.window < length:
        seen = masks.LocalMask((length, length), (splash.window - 1, 0), 0)
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
        attn_logits_soft_cap=splash.softcap,
        residual_checkpoint_name=ATTENDED,
        interpret=splash.interpret,
    )

    def row(q: Array, k: Array, v: Array, numbers: Array | None) -> Array:
        among = None if numbers is None else kernels.SegmentIds(numbers, numbers)
        return kernel(q, k, v, among, sinks)

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    mixed: Array = jax.vmap(row)(q, k, v, segments)
    return jnp.swapaxes(mixed, 1, 2)


def repeat_heads(x: Array, heads: int) -> Array:
    """Each of the G heads [B, K, G, D] for every query head that shares it: [B, K, H, D]."""
    batch, keys, own, dims = x.shape
    if own == heads:
        return x
    x = jnp.broadcast_to(x[:, :, :, None], (batch, keys, own, heads // own, dims))
    return x.reshape(batch, keys, heads, dims)


def _plain(*operands: Array) -> Array:
    """What the sharding reads of the forward pass: who meets whom, without masks.

    Flax takes out of a loop over layers what is the same for all of them. What it takes out of the kernel's function,
    masks and numbers, has its name too: queries, keys and values are not among the operands there.
    """
    arrays = [x for x in operands if x.ndim == 4]
    if len(arrays) != 3:
        return NotImplemented
    q, k, v = arrays
    k, v = (repeat_heads(x, q.shape[2]) for x in (k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, implementation="xla")
    for sinks in operands:
        if sinks.shape == q.shape[2:3] and jnp.issubdtype(sinks.dtype, jnp.floating):
            mixed = mixed * sinks[:, None].astype(mixed.dtype)
    return mixed


register_reference(NAME, _plain, causal=True)
