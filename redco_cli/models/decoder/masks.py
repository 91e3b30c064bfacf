"""What attention knows besides queries, keys and values: masks, biases and positions of the tokens.

Shapes: B batch, Q queries, K keys, H query heads, G key and value heads, D dims of a head, L layers, R kinds of rope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.models.decoder.cache import KVCache
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.positions import alibi_bias, rotary_angles

Array = Any
NO_WINDOW = _NEVER_SEEN = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionContext:
    """What is the same for every layer.

    Attributes:
        queries: index of each query in its row [Q].
        keys: index of each key [K].
        mask: beyond the order of the row, which keys a query may see: bool, broadcasts to [B, 1, Q, K]; None for all.
        bias: float32, broadcasts to [B, H, Q, K]; None for none.
        cos: rotary cosines of each kind of rope [R, B, Q, P]; None without rotary positions.
        sin: likewise.
        segments: what `mask` says of queries that are the keys too, by numbers: a token sees those with its own
            [B, Q], int32; None for all.
    """

    queries: Array
    keys: Array
    mask: Array | None
    bias: Array | None
    cos: Array | None
    sin: Array | None
    segments: Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTraits:
    """What tells one layer from another, an element each of arrays over the layers.

    Attributes:
        window: tokens that a token sees, itself included; more than the row is long for all.
        rope: index of the kind of rope.
        scale: of the attention scores.
        sinks: what each query head may look at instead of keys [H], a parameter of the layer; None for nothing.
    """

    window: Array
    rope: Array
    scale: Array
    sinks: Array | None = None


def token_positions(config: DecoderConfig, queries: Array, mask: Array | None) -> Array:
    """Positions [1 or B, S] of the queries [S]."""
    if config.positions_skip_padding and mask is not None:
        counted = jnp.cumsum(mask, axis=1, dtype=jnp.int32) * mask - 1
        return counted[:, queries]
    return queries[None]


def texts_by_position(position_ids: Array) -> Array | None:
    """Numbers [1 or B, S] of the texts that positions [1 or B, S] tell apart: each begins where they do not go on by 1.

    As `find_packed_sequence_indices` in transformers' `masking_utils.py`.

    Returns:
        None where the positions are at hand and tell no text from another.
    """
    steps = jnp.diff(position_ids, axis=1) != 1
    if not isinstance(steps, jax.core.Tracer) and not steps.any():
        return None
    return jnp.pad(jnp.cumsum(steps, axis=1), ((0, 0), (1, 0)))


def padding_last(attention_mask: Array) -> tuple[Array, Array]:
    """An order of the tokens of each row with its padding behind them: what is real sees the same without any mask.

    Args:
        attention_mask: [B, S], wherever the padding is.

    Returns:
        Which token stands at each place [B, S], and at which place each token stands [B, S]; for `reordered`.
    """
    order = jnp.argsort(~attention_mask.astype(bool), axis=1, stable=True)
    return order, jnp.argsort(order, axis=1)


@jax.custom_vjp
def reordered(x: Array, order: Array, back: Array) -> Array:
    """The tokens of rows [B, S, ...] in another order [B, S], which `back` [B, S] undoes.

    Its gradient is gathered too: the compiler would add it up token by token.
    """
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)


def _reordered(x: Array, order: Array, back: Array) -> tuple[Array, tuple[Array, Array]]:
    return reordered(x, order, back), (order, back)


def _reordered_back(orders: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    order, back = orders
    return reordered(gradient, back, order), None, None


reordered.defvjp(_reordered, _reordered_back)


def layer_traits(config: DecoderConfig) -> LayerTraits:
    """What tells the layers apart, as arrays [L]."""
    windows = [NO_WINDOW if window is None else window for window in config.windows]
    ropes = [len(config.ropes) if rope is None else rope for rope in config.layer_ropes or [0] * config.layers]
    scales = config.layer_scales or [1.0] * config.layers
    return LayerTraits(jnp.asarray(windows, jnp.int32), jnp.asarray(ropes, jnp.int32), jnp.asarray(scales, jnp.float32))


def attention_context(
    config: DecoderConfig,
    queries: Array,
    positions: Array,
    attention_mask: Array | None,
    segment_ids: Array | None,
    cache: KVCache | None,
) -> AttentionContext:
    """What is the same for every layer, from the inputs.

    Args:
        config: the decoder's.
        queries: index of each query in its row [Q]. The keys are those of the cache, and then the same tokens.
        positions: of the queries [1 or B, Q].
        attention_mask: which tokens of a row are real, up to the last query or the room of the cache; None for all.
        segment_ids: of queries and keys, which are then the same tokens [B, Q]; None for one text in a row.
        cache: what was before; None for nothing.
    """
    keys = slots = queries
    seen = bias = None
    if cache is not None and cache.capacity:
        before = jnp.arange(cache.capacity, dtype=jnp.int32)
        slots = jnp.concatenate([before, queries])
        keys = jnp.concatenate([jnp.where(before < cache.length, before, _NEVER_SEEN), queries])
    if attention_mask is not None:
        seen = _at(attention_mask, slots, queries)[:, None, None, :].astype(bool)
    if segment_ids is not None:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        seen = same if seen is None else seen & same
    segments = None if slots is not queries else _segments(attention_mask, segment_ids, queries)
    if config.alibi:
        counted = None if attention_mask is None else (jnp.cumsum(attention_mask, axis=1) - 1) * attention_mask
        standing = slots[None] if counted is None else _at(counted, slots, queries)
        standing = positions if segment_ids is not None else standing  # small ones, as of a text alone, round alike
        bias = alibi_bias(standing, config.heads, rounded=config.alibi_rounded)
        bias = bias * config.attention_scale if config.alibi_rounded else bias
    if not config.ropes:
        return AttentionContext(queries, keys, seen, bias, None, None, segments)
    # Where texts share a row its length counts, so that none depends on how long its neighbours are.
    length = jnp.max(positions) + 1 if segment_ids is None else jnp.int32(positions.shape[-1])
    angles = [rotary_angles(rope, positions, length) for rope in config.ropes]
    if None in config.layer_ropes:
        angles.append((jnp.ones_like(angles[0][0]), jnp.zeros_like(angles[0][1])))
    cos, sin = (jnp.stack(kinds) for kinds in zip(*angles, strict=True))
    return AttentionContext(queries, keys, seen, bias, cos, sin, segments)


def _segments(attention_mask: Array | None, segment_ids: Array | None, queries: Array) -> Array | None:
    """Numbers [B, S] that padding has for itself, so that no row of the mask is empty."""
    if attention_mask is None:
        return None if segment_ids is None else segment_ids.astype(jnp.int32)
    real = _at(attention_mask, queries, queries).astype(bool)
    return jnp.where(real, 0 if segment_ids is None else segment_ids, -1).astype(jnp.int32)


def _at(array: Array, slots: Array, queries: Array) -> Array:
    """Columns of [B, S]; where the slots are the queries, which are all of them, it stays as it is."""
    return array if slots is queries else array[:, slots]
