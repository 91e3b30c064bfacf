"""What the kernels have in common: how they are cut, which blocks they read, and the scores of a pair of blocks.

Shapes: B batch, S sequence, H query heads, G key and value heads, D dims of a head, W the next power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from redco_cli.models.kernels.mapped import Form

Array = Any
Kernel = Literal["forward", "keys", "queries"]
"""The last two are of the backward pass: gradients of keys and values, and of queries."""
LOG2_E = math.log2(math.e)
"""Scores are of base 2, as is the exponential of GPUs."""
_MASKED = -0.7 * float(np.finfo(np.float32).max)  # finite: a block that a token sees nothing of is still no NaN


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut.

    Attributes:
        queries: tokens of a block of them.
        keys: of a block of keys.
        warps: of 32 threads each, that compute such a pair of blocks.
    """

    queries: int
    keys: int
    warps: int


_SIZES: dict[int, dict[Kernel, Blocks]] = {
    64: {"forward": Blocks(128, 64, 4), "keys": Blocks(32, 128, 4), "queries": Blocks(128, 32, 4)},
    128: {"forward": Blocks(128, 64, 8), "keys": Blocks(32, 128, 8), "queries": Blocks(128, 32, 8)},
    256: {"forward": Blocks(64, 32, 4), "keys": Blocks(32, 64, 8), "queries": Blocks(64, 32, 8)},
}
"""By the dims of heads up to which they are meant. On H100, A100 and B200 no kernel spills more than 0.6 KB of the
registers of a thread so (ptxas of CUDA 12.9); with four warps for 128 keys of 128 dims it is 18 KB on an A100."""
WIDEST = max(_SIZES)
"""Dims of a head that the kernels take."""


def size_of(kernel: Kernel, dims: int) -> Blocks:
    """How a kernel is cut for heads of so many dims."""
    return next(sizes[kernel] for widest, sizes in _SIZES.items() if dims <= widest)


def scores_of(
    q: Array, k: Array, bias: Array | None, segments_ref: Any, here: Any, there: Any, form: Form
) -> tuple[Array, Array | None]:
    """Scores of base 2 [queries, keys], hidden ones as `_MASKED`, and their slope where they are bounded."""
    scores, slope = triton.dot(q, k.T), None
    if form.softcap is not None:
        bounded = jnp.tanh(scores / form.softcap)
        scores, slope = bounded * form.softcap, 1 - bounded * bounded
    scores = scores if bias is None else scores + bias[None, :]
    distance = (here.start + jnp.arange(here.size))[:, None] - (there.start + jnp.arange(there.size))[None, :]
    seen = distance >= 0
    if form.window is not None:
        seen &= distance < form.window
    if segments_ref is not None:
        seen &= segments_ref[here][:, None] == segments_ref[there][None, :]
    return jnp.where(seen, scores * LOG2_E, _MASKED), slope


def keys_of(number: Array, blocks: Blocks, form: Form, first_ref: Any) -> tuple[Array, Array]:
    """Which blocks of keys a block of queries has to read: from the first to before the last."""
    start = number * blocks.queries
    high = jax.lax.div(start + blocks.queries + blocks.keys - 1, blocks.keys)
    low = jnp.int32(0)
    if form.window is not None:
        low = jax.lax.div(jnp.maximum(start - form.window + 1, 0), blocks.keys)
    return (low if first_ref is None else jnp.maximum(low, first_ref[number])), high


def queries_of(number: Array, blocks: Blocks, form: Form, last_ref: Any, length: int) -> tuple[Array, Array]:
    """Which blocks of queries see a block of keys: from the first to before the last."""
    start = number * blocks.keys
    high = jnp.int32(length // blocks.queries)
    if form.window is not None:
        end = start + blocks.keys - 1 + form.window
        high = jnp.minimum(high, jax.lax.div(end + blocks.queries - 1, blocks.queries))
    return jax.lax.div(start, blocks.queries), (high if last_ref is None else jnp.minimum(high, last_ref[number]))


def first_keys(segments: Array, blocks: Blocks) -> Array:
    """The first block of keys that a block of queries may share a text with [B, blocks of queries], int32."""
    return jnp.argmax(_meet(segments, blocks), axis=2).astype(jnp.int32)


def last_queries(segments: Array, blocks: Blocks) -> Array:
    """Behind the last block of queries that may share a text with a block of keys [B, blocks of keys], int32."""
    meet = _meet(segments, blocks)
    return meet.shape[1] - jnp.argmax(meet[:, ::-1], axis=1).astype(jnp.int32)


def _meet(segments: Array, blocks: Blocks) -> Array:
    """Whether the numbers of a block of queries and a block of keys overlap [B, blocks of queries, blocks of keys]."""
    queries, keys = (segments.reshape(len(segments), -1, size) for size in (blocks.queries, blocks.keys))
    low = queries.min(axis=2)[:, :, None] <= keys.max(axis=2)[:, None, :]
    return low & (queries.max(axis=2)[:, :, None] >= keys.min(axis=2)[:, None, :])


def padded(dims: int) -> int:
    """Triton has blocks of powers of two, and multiplies 16 of them at least."""
    return max(16, int(pl.next_power_of_2(dims)))


def load(ref: Any, rows: Any, dims: int) -> Array:
    """Rows of a block [.., W], with zeros behind its dims."""
    at = ref.at[(*(rows if isinstance(rows, tuple) else (rows,)), slice(None))]
    wide = ref.shape[-1]
    return at[...] if wide == dims else triton.load(at, mask=(jnp.arange(wide) < dims)[None, :], other=0.0)


def store(ref: Any, rows: Array, dims: int) -> None:
    """Writes rows [.., W] to a block, without what is behind its dims."""
    rows, wide = rows.astype(ref.dtype), ref.shape[-1]
    if wide == dims:
        ref[...] = rows
    else:
        triton.store(ref, rows, mask=(jnp.arange(wide) < dims)[None, :])


def name_of(part: str, form: Form) -> str:
    """The name of a kernel, by which a compiled program tells what it computes."""
    return part if form.window is None else f"{part}_window_{form.window}"
