"""The forward pass.

Shapes: B batch, S sequence, H query heads, G key and value heads, D dims of a head, W the next power of two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from redco_cli.models.kernels.flash.blocks import (
    LOG2_E,
    Blocks,
    first_keys,
    keys_of,
    load,
    name_of,
    padded,
    scores_of,
    size_of,
    store,
)
from redco_cli.models.kernels.mapped import Form

Array = Any


def forward(
    q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, bias: Array | None, form: Form
) -> tuple[Array, Array]:
    """What attention gives [B, S, H, D], and the logarithms of base 2 of what the weights were divided by [B, H, S]."""
    batch, length, heads, dims = q.shape
    blocks, share, wide = size_of("forward", dims), heads // k.shape[2], padded(dims)
    pieces = length // blocks.queries
    first = None if segments is None else first_keys(segments, blocks)
    in_specs = [
        pl.BlockSpec((None, blocks.queries, None, wide), lambda b, h, i: (b, i, h, 0)),
        *[pl.BlockSpec((None, length, None, wide), lambda b, h, i: (b, 0, h // share, 0))] * 2,
        None if segments is None else pl.BlockSpec((None, length), lambda b, h, i: (b, 0)),
        None if first is None else pl.BlockSpec((None, pieces), lambda b, h, i: (b, 0)),
        None if sinks is None else pl.BlockSpec((heads,), lambda b, h, i: (0,)),
        None if bias is None else pl.BlockSpec((None, None, length), lambda b, h, i: (b, h, 0)),
    ]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
    mixed, log_sums = pl.pallas_call(
        partial(_forward_kernel, form=form, blocks=blocks, dims=dims),
        out_shape=results,
        grid=(batch, heads, pieces),
        in_specs=in_specs,
        out_specs=[
            pl.BlockSpec((None, blocks.queries, None, wide), lambda b, h, i: (b, i, h, 0)),
            pl.BlockSpec((None, None, blocks.queries), lambda b, h, i: (b, h, i)),
        ],
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=form.interpret,
        name=name_of("flash_forward", form),
    )(q, k, v, segments, first, None if sinks is None else sinks.astype(jnp.float32), bias)
    return mixed, log_sums


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    segments_ref: Any,
    first_ref: Any,
    sinks_ref: Any,
    bias_ref: Any,
    mixed_ref: Any,
    log_sums_ref: Any,
    *,
    form: Form,
    blocks: Blocks,
    dims: int,
) -> None:
    """A block of queries [blocks.queries, W] of one head, over the keys and values [S, W] of a row."""
    number = pl.program_id(2)
    here = pl.ds(number * blocks.queries, blocks.queries)
    q = load(q_ref, slice(None), dims)

    def add(at: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, largest, total = carry
        there = pl.ds(at * blocks.keys, blocks.keys)
        bias = None if bias_ref is None else bias_ref[there]
        scores, _ = scores_of(q, load(k_ref, there, dims), bias, segments_ref, here, there, form)
        now = jnp.maximum(largest, jnp.max(scores, axis=1))
        shrunk, weights = jnp.exp2(largest - now), jnp.exp2(scores - now[:, None])
        v = load(v_ref, there, dims)
        mixed = mixed * shrunk[:, None] + triton.dot(weights.astype(v.dtype), v)
        return mixed, now, total * shrunk + jnp.sum(weights, axis=1)

    nothing = jnp.zeros((blocks.queries, q.shape[1]), jnp.float32)
    start = nothing, jnp.full((blocks.queries,), -jnp.inf, jnp.float32), jnp.zeros((blocks.queries,), jnp.float32)
    low, high = keys_of(number, blocks, form, first_ref)
    mixed, largest, total = jax.lax.fori_loop(low, high, add, start)
    if sinks_ref is not None:
        sink = sinks_ref[pl.program_id(1)] * LOG2_E
        now = jnp.maximum(largest, sink)
        shrunk = jnp.exp2(largest - now)
        mixed, total, largest = mixed * shrunk[:, None], total * shrunk + jnp.exp2(sink - now), now
    store(mixed_ref, mixed / total[:, None], dims)
    log_sums_ref[...] = largest + jnp.log2(total)
