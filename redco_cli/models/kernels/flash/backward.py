"""The backward pass: one kernel for keys and values, one for queries.

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
    Blocks,
    first_keys,
    keys_of,
    last_queries,
    load,
    name_of,
    padded,
    queries_of,
    scores_of,
    size_of,
    store,
)
from redco_cli.models.kernels.mapped import Form

Array = Any


def key_gradients(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    bias: Array | None,
    gradient: Array,
    log_sums: Array,
    moved: Array,
    form: Form,
) -> tuple[Array, Array]:
    """Of keys and values [B, S, G, D]: those of all the query heads that share them, added up in the kernel."""
    batch, length, heads, dims = q.shape
    own = k.shape[2]
    blocks, share, wide = size_of("keys", dims), heads // own, padded(dims)
    pieces = length // blocks.keys
    last = None if segments is None else last_queries(segments, blocks)
    of_queries = pl.BlockSpec((None, length, share, wide), lambda b, g, j: (b, 0, g, 0))
    of_keys = pl.BlockSpec((None, blocks.keys, None, wide), lambda b, g, j: (b, j, g, 0))
    per_query = pl.BlockSpec((None, share, length), lambda b, g, j: (b, g, 0))
    dk, dv = pl.pallas_call(
        partial(_key_kernel, form=form, blocks=blocks, dims=dims, share=share, length=length),
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        grid=(batch, own, pieces),
        in_specs=[
            of_queries,
            of_keys,
            of_keys,
            None if segments is None else pl.BlockSpec((None, length), lambda b, g, j: (b, 0)),
            None if last is None else pl.BlockSpec((None, pieces), lambda b, g, j: (b, 0)),
            None if bias is None else per_query,
            of_queries,
            per_query,
            per_query,
        ],
        out_specs=[of_keys, of_keys],
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=form.interpret,
        name=name_of("flash_backward_dkv", form),
    )(q, k, v, segments, last, bias, gradient, log_sums, moved)
    return dk, dv


def _key_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    segments_ref: Any,
    last_ref: Any,
    bias_ref: Any,
    gradient_ref: Any,
    log_sums_ref: Any,
    moved_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    form: Form,
    blocks: Blocks,
    dims: int,
    share: int,
    length: int,
) -> None:
    """A block of keys and values [blocks.keys, W], over the queries [S, share, W] of the heads that share them."""
    number = pl.program_id(2)
    there = pl.ds(number * blocks.keys, blocks.keys)
    k, v = load(k_ref, slice(None), dims), load(v_ref, slice(None), dims)
    low, high = queries_of(number, blocks, form, last_ref, length)

    def add_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def add(at: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            here = pl.ds(at * blocks.queries, blocks.queries)
            q, gradient = load(q_ref, (here, head), dims), load(gradient_ref, (here, head), dims)
            bias = None if bias_ref is None else bias_ref[head, there]
            scores, slope = scores_of(q, k, bias, segments_ref, here, there, form)
            weights = jnp.exp2(scores - log_sums_ref[head, here][:, None])
            dv = dv + triton.dot(weights.T.astype(gradient.dtype), gradient)
            pull = weights * (triton.dot(gradient, v.T) - moved_ref[head, here][:, None])
            pull = pull if slope is None else pull * slope
            return dk + triton.dot(pull.T.astype(q.dtype), q), dv

        done: tuple[Array, Array] = jax.lax.fori_loop(low, high, add, carry)
        return done

    nothing = jnp.zeros((blocks.keys, k.shape[1]), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, share, add_head, (nothing, nothing))
    store(dk_ref, dk, dims)
    store(dv_ref, dv, dims)


def query_gradients(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    bias: Array | None,
    gradient: Array,
    log_sums: Array,
    moved: Array,
    form: Form,
) -> Array:
    """Of the queries [B, S, H, D]."""
    batch, length, heads, dims = q.shape
    blocks, share, wide = size_of("queries", dims), heads // k.shape[2], padded(dims)
    pieces = length // blocks.queries
    first = None if segments is None else first_keys(segments, blocks)
    of_queries = pl.BlockSpec((None, blocks.queries, None, wide), lambda b, h, i: (b, i, h, 0))
    of_keys = pl.BlockSpec((None, length, None, wide), lambda b, h, i: (b, 0, h // share, 0))
    per_query = pl.BlockSpec((None, None, blocks.queries), lambda b, h, i: (b, h, i))
    dq: Array = pl.pallas_call(
        partial(_query_kernel, form=form, blocks=blocks, dims=dims),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch, heads, pieces),
        in_specs=[
            of_queries,
            of_keys,
            of_keys,
            None if segments is None else pl.BlockSpec((None, length), lambda b, h, i: (b, 0)),
            None if first is None else pl.BlockSpec((None, pieces), lambda b, h, i: (b, 0)),
            None if bias is None else pl.BlockSpec((None, None, length), lambda b, h, i: (b, h, 0)),
            of_queries,
            per_query,
            per_query,
        ],
        out_specs=of_queries,
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=form.interpret,
        name=name_of("flash_backward_dq", form),
    )(q, k, v, segments, first, bias, gradient, log_sums, moved)
    return dq


def _query_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    segments_ref: Any,
    first_ref: Any,
    bias_ref: Any,
    gradient_ref: Any,
    log_sums_ref: Any,
    moved_ref: Any,
    dq_ref: Any,
    *,
    form: Form,
    blocks: Blocks,
    dims: int,
) -> None:
    """A block of queries [blocks.queries, W] of one head, over the keys and values [S, W] of a row."""
    number = pl.program_id(2)
    here = pl.ds(number * blocks.queries, blocks.queries)
    q, gradient = load(q_ref, slice(None), dims), load(gradient_ref, slice(None), dims)
    log_sums, moved = log_sums_ref[...], moved_ref[...]

    def add(at: Array, dq: Array) -> Array:
        there = pl.ds(at * blocks.keys, blocks.keys)
        k = load(k_ref, there, dims)
        bias = None if bias_ref is None else bias_ref[there]
        scores, slope = scores_of(q, k, bias, segments_ref, here, there, form)
        pull = jnp.exp2(scores - log_sums[:, None])
        pull = pull * (triton.dot(gradient, load(v_ref, there, dims).T) - moved[:, None])
        pull = pull if slope is None else pull * slope
        return dq + triton.dot(pull.astype(k.dtype), k)

    low, high = keys_of(number, blocks, form, first_ref)
    store(dq_ref, jax.lax.fori_loop(low, high, add, jnp.zeros(q.shape, jnp.float32)), dims)
