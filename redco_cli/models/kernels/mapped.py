"""What kernels of attention have in common: where they run, how a mesh divides them, and their plain form.

The compiler partitions no kernel of Pallas: it runs inside of `jax.shard_map`, on each device's own examples and heads.
Which mesh that is, whoever traces the model says (`sharding.tensor_split`). Where programs are for CPUs it is
interpreted, so that tests compare the same code with the plain form.

Shapes: B batch, S sequence, H query heads, G key and value heads, D dims of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from redco_cli.chips.target import current_platform, current_target
from redco_cli.sharding.batch_shards import is_batch_sharded
from redco_cli.sharding.plan import BATCH_AXES, TENSOR
from redco_cli.sharding.tensor_split import current_mesh

Array = Any
ATTENDED = "attended"
"""Name of what attention gives, for policies of what a backward pass recomputes."""
SHORTEST = 128
"""Tokens, below which a block would be mostly padding: the lanes of a TPU, a block of queries on a GPU."""


@dataclass(frozen=True)
class Form:
    """What is fixed when a kernel is made.

    Attributes:
        window: tokens that a token sees, itself included; None for all before it.
        softcap: bound of the scores; None for none.
        interpret: run it as plain JAX operations.
    """

    window: int | None
    softcap: float | None
    interpret: bool


def can_attend(batch: int, length: int) -> bool:
    """Whether a kernel runs for rows of such a number and length in what is traced now.

    Where nobody says for which mesh, as when a user calls a loaded model, several devices may share the arrays, and
    the plain form is right on all of them. A program that is read to be planned runs on none.
    """
    if length < SHORTEST:
        return False
    mesh = current_mesh()
    if mesh is not None:
        return bool(batch % math.prod(mesh.shape[axis] for axis in BATCH_AXES) == 0)
    is_read = is_batch_sharded() or current_target() is not None
    return is_read or current_platform() == "cpu" or jax.device_count() == 1


def on_each_device(
    attend: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sinks: Array | None,
    *biases: Array | None,
) -> Array:
    """What a kernel gives [B, S, H, D], run on the examples and heads of each device of the current mesh.

    Args:
        attend: of the arrays of one device.
        q: [B, S, H, D].
        k: [B, S, G, D], `v` likewise.
        segments: [B, S], or None.
        sinks: [H], or None.
        biases: [B, H, S] each, or None.
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return attend(q, k, v, segments, sinks, *biases)
    ways = mesh.shape[TENSOR]
    heads = TENSOR if q.shape[2] % ways == 0 else None
    if heads and k.shape[2] % ways:
        k, v = (repeat_heads(x, q.shape[2]) for x in (k, v))
    tokens = PartitionSpec(BATCH_AXES, None, heads, None)
    others = [PartitionSpec(BATCH_AXES, None), PartitionSpec(heads)]
    others += [PartitionSpec(BATCH_AXES, heads, None)] * len(biases)
    given = (tokens, tokens, tokens, *others)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=given, out_specs=tokens, check_vma=False)
    mixed: Array = mapped(q, k, v, segments, sinks, *biases)
    return mixed


def repeat_heads(x: Array, heads: int) -> Array:
    """Each of the G heads [B, K, G, D] for every query head that shares it: [B, K, H, D]."""
    batch, keys, own, dims = x.shape
    if own == heads:
        return x
    x = jnp.broadcast_to(x[:, :, :, None], (batch, keys, own, heads // own, dims))
    return x.reshape(batch, keys, heads, dims)


def plain_attention(*operands: Array) -> Array:
    """What the sharding reads of the forward pass of a kernel: who meets whom, without masks.

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
