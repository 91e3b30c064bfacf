"""Attention of a decoder: who sees whom, and the weighted sum.

Shapes: B batch, Q queries, K keys, H query heads, G key and value heads, D dims of a head, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from redco_cli.models.decoder.cache import KVCache
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.layers import Dense, Norm, output_std
from redco_cli.models.decoder.masks import NO_WINDOW, AttentionContext, LayerTraits
from redco_cli.models.decoder.positions import rotate
from redco_cli.models.kernels import splash
from redco_cli.models.kernels.choice import Kernel
from redco_cli.models.kernels.flash import attend as flash
from redco_cli.models.kernels.mapped import ATTENDED, can_attend, repeat_heads

Array = Any
_MASKED = float(np.finfo(np.float32).min)  # finite: a row that sees nothing is still no NaN
_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 8
PROJECTED = "projected"
"""Name of queries, keys and values, for policies of what a backward pass recomputes; `ATTENDED` likewise."""
_WEIGHTS = "attention_weights"
_keep_weights = jax.checkpoint_policies.save_only_these_names(_WEIGHTS)


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention of one layer.

    Attributes:
        config: the decoder's.
        dtype: compute type.
        train: whether dropout is active.
        kernel: which code computes it.
    """

    config: DecoderConfig
    dtype: Any
    train: bool
    kernel: Kernel

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(
        self, x: Array, layer: LayerTraits, context: AttentionContext, cache: KVCache | None
    ) -> tuple[Array, KVCache | None]:
        """`x` [B, Q, E] to the same shape, and what the cache keeps of these tokens."""
        c = self.config
        project = partial(Dense, bias=c.qkv_bias, dtype=self.dtype, init_std=c.initializer_range)
        q = self._heads(project(c.heads * c.head_dim, name="q")(x), c.heads, "q_norm")
        k = self._heads(project(c.kv_heads * c.head_dim, name="k")(x), c.kv_heads, "k_norm")
        v = self._heads(project(c.kv_heads * c.head_dim, name="v")(x), c.kv_heads, None)
        if context.cos is not None and context.sin is not None:
            cos, sin = context.cos[layer.rope], context.sin[layer.rope]
            q = rotate(q, cos, sin, interleaved=c.interleaved)
            k = rotate(k, cos, sin, interleaved=c.interleaved)
        if c.attention_sinks:
            layer = replace(layer, sinks=self.param("sinks", nn.initializers.normal(c.initializer_range), (c.heads,)))
        if cache is not None and cache.capacity:
            mixed = self._attend_from_cache(q, k, v, cache, layer, context)
        elif (attend := self._pallas(q.shape, context)) is not None:
            mixed = self._attend_by_kernel(attend, q, k, v, layer, context)
        else:
            attend = self._attend_fused if self._can_fuse(q.shape[1]) else self._attend_in_blocks
            mixed = attend(q, repeat_heads(k, c.heads), repeat_heads(v, c.heads), layer, context)
            if self.kernel != "cudnn":  # which is known by its primitive, and keeps more than this
                mixed = checkpoint_name(mixed, ATTENDED)
        flat = mixed.reshape(*mixed.shape[:2], c.heads * c.head_dim)
        new = None if cache is None else KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), cache.length)
        return Dense(c.hidden_size, c.out_bias, self.dtype, output_std(c), name="o")(flat), new

    def _heads(self, x: Array, heads: int, norm: str | None) -> Array:
        """[B, Q, heads * D] as [B, Q, heads, D], normalised where the config says so."""
        c = self.config
        x = checkpoint_name(x, PROJECTED)
        if norm and c.qk_norm == "all_heads":
            x = Norm(c, self.dtype, name=norm)(x)
        x = x.reshape(*x.shape[:2], heads, c.head_dim)
        return Norm(c, self.dtype, name=norm)(x) if norm and c.qk_norm == "head" else x

    def _can_fuse(self, length: int) -> bool:
        """Whether JAX's function computes what is to be; by cuDNN, it has a gradient for even lengths alone."""
        has_gradient = self.kernel != "cudnn" or length % 2 == 0
        return has_gradient and is_fused(self.config, self.kernel, train=self.train)

    def _pallas(self, shape: Sequence[int], context: AttentionContext) -> Callable[..., Array] | None:
        """The kernel of Pallas for queries [B, Q, H, D], where one computes what is to be and cuDNN's is not better."""
        drops = self.train and self.config.attention_dropout
        if drops or not can_attend(*shape[:2]):
            return None
        if self.kernel == "splash":
            return splash.attend if context.bias is None else None
        told = context.mask is None and context.bias is None and self._can_fuse(shape[1])
        return flash.attend if self.kernel == "flash" or (self.kernel == "cudnn" and not told) else None

    def _attend_by_kernel(
        self,
        attend: Callable[..., Array],
        q: Array,
        k: Array,
        v: Array,
        layer: LayerTraits,
        context: AttentionContext,
    ) -> Array:
        """What `_attend_in_blocks` returns, without repeated keys and values. Windows that differ are a `switch`."""
        c = self.config
        scale = c.attention_scale * (layer.scale if c.layer_scales else 1.0)
        q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        windows = _kinds(c)
        kinds = [partial(attend, window=window, softcap=c.attention_softcap) for window in windows]
        biases = () if context.bias is None else (context.bias[:, :, 0],)
        return _by_window(kinds, windows, layer, (q, k, v, context.segments, layer.sinks, *biases))

    def _attend_fused(self, q: Array, k: Array, v: Array, layer: LayerTraits, context: AttentionContext) -> Array:
        """What `_attend_in_blocks` returns, by JAX's function, told of the order and the window where it can be.

        Windows that differ are a `switch`, but where there is a mask, which has them in it then.
        """
        c = self.config
        q = q * layer.scale.astype(q.dtype) if c.layer_scales else q
        windows = _kinds(c)
        bias = _for_each_query(context.bias, q.shape[1])
        if context.mask is None or len(windows) == 1:
            mask = _for_each_query(context.mask, q.shape[1])
            kinds = [partial(self._fused, is_causal=True, window=window) for window in windows]
            return _by_window(kinds, windows, layer, (q, k, v, mask, bias))
        mask = _for_each_query(_visible(layer, context, windowed=True), q.shape[1])
        return self._fused(q, k, v, mask, bias, is_causal=False, window=None)

    def _fused(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None,
        bias: Array | None,
        *,
        is_causal: bool,
        window: int | None,
    ) -> Array:
        assert self.kernel in ("xla", "cudnn")
        mixed: Array = jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
            mask,
            scale=self.config.attention_scale,
            is_causal=is_causal,
            local_window_size=(window - 1, 0) if window else None,
            implementation=self.kernel,
        )
        return mixed

    def _attend_in_blocks(self, q: Array, k: Array, v: Array, layer: LayerTraits, context: AttentionContext) -> Array:
        """The weighted sum of values [B, Q, H, D] for `q` [B, Q, H, D], `k` and `v` [B, K, H, D].

        A block of queries meets the keys up to its end only. For the backward pass the weights are kept, and queries,
        keys and values once, not the pieces of them that each block reads.
        """
        c, length = self.config, q.shape[1]
        block = max(_SMALLEST_BLOCK, -(-length // _MOST_BLOCKS))
        ends = [min(start + block, length) for start in range(0, length, block)]

        def blocks(q: Array, k: Array, v: Array) -> Array:
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # once, not by the products of every block
            done = [
                self._attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], layer, _part(context, start, end))
                for start, end in zip([0, *ends], ends, strict=False)
            ]
            return jnp.swapaxes(jnp.concatenate(done, axis=2) if len(done) > 1 else done[0], 1, 2)

        if self.train and c.attention_dropout:
            return blocks(q, k, v)
        mixed: Array = jax.checkpoint(blocks, prevent_cse=False, policy=_keep_weights)(q, k, v)
        return mixed

    def _attend(self, q: Array, k: Array, v: Array, layer: LayerTraits, context: AttentionContext) -> Array:
        """The weighted sum of values [B, H, Q, D] for `q` [B, H, Q, D], `k` and `v` [B, H, K, D]."""
        c = self.config
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
        weights = checkpoint_name(self._weights(scores, layer, context), _WEIGHTS)
        if self.train and c.attention_dropout:
            weights = nn.Dropout(c.attention_dropout, deterministic=False)(weights)
        return jnp.einsum("bhqk,bhkd->bhqd", weights, v)

    def _attend_from_cache(
        self, q: Array, k: Array, v: Array, cache: KVCache, layer: LayerTraits, context: AttentionContext
    ) -> Array:
        """The weighted sum of values [B, Q, H, D] in the cache and of the next tokens.

        Keys and values stay as they are: neither copied next to the new ones nor repeated for the query heads.

        Args:
            q: [B, Q, H, D].
            k: of the next tokens [B, Q, G, D], `v` likewise.
            cache: of this layer.
            layer: what tells it from the others.
            context: of which the keys are those of the cache and then the next tokens: K + Q.
        """
        batch, length, heads, dims = q.shape
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        grouped = q.reshape(batch, length, k.shape[2], -1, dims)
        before = product("bqgrd,bgkd->bgrqk", grouped, cache.keys.astype(q.dtype))
        among = product("bqgrd,bkgd->bgrqk", grouped, k)
        scores = jnp.concatenate([before, among], axis=-1)
        weights = self._weights(scores.reshape(batch, heads, length, -1), layer, context).reshape(scores.shape)
        old, new = weights[..., : cache.capacity], weights[..., cache.capacity :]
        mixed = product("bgrqk,bgkd->bqgrd", old, cache.values.astype(v.dtype))
        return (mixed + product("bgrqk,bkgd->bqgrd", new, v)).reshape(q.shape).astype(self.dtype)

    def _weights(self, scores: Array, layer: LayerTraits, context: AttentionContext) -> Array:
        """Products of queries and keys [B, H, Q, K], float32, to the shares of the keys, in the compute type."""
        c = self.config
        scores = scores * (c.attention_scale * (layer.scale if c.layer_scales else 1.0))
        if c.attention_softcap is not None:
            scores = jnp.tanh(scores / c.attention_softcap) * c.attention_softcap
        if context.bias is not None:
            scores = scores + context.bias
        mask = _visible(layer, context, windowed=any(c.windows))
        return _shares(jnp.where(mask, scores, _MASKED), layer.sinks).astype(self.dtype)


def is_fused(config: DecoderConfig, kernel: Kernel, *, train: bool) -> bool:
    """Whether JAX's function computes the attention of a config, by one of its kernels."""
    drops = train and config.attention_dropout
    return kernel in ("xla", "cudnn") and config.attention_softcap is None and not config.attention_sinks and not drops


def _kinds(config: DecoderConfig) -> list[int | None]:
    """The windows of a decoder, each once."""
    return sorted({*config.windows}, key=lambda window: window or 0)


def _by_window(
    kinds: Sequence[Callable[..., Array]], windows: Sequence[int | None], layer: LayerTraits, given: tuple[Any, ...]
) -> Array:
    """What the one of some kinds of attention returns whose window is that of the layer."""
    if len(kinds) == 1:
        return kinds[0](*given)
    sizes = jnp.asarray([NO_WINDOW if window is None else window for window in windows], jnp.int32)
    mixed: Array = jax.lax.switch(jnp.argmax(sizes == layer.window), kinds, *given)
    return mixed


def _shares(scores: Array, sinks: Array | None) -> Array:
    """The softmax of scores [B, H, Q, K], less what sinks [H] take of it."""
    if sinks is None:
        shares: Array = jax.nn.softmax(scores, axis=-1)
        return shares
    sink = sinks.astype(jnp.float32)[:, None, None]
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sink))
    parts = jnp.exp(scores - largest)
    return parts / (parts.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest))


def _part(context: AttentionContext, start: int, end: int) -> AttentionContext:
    """What the queries from `start` to `end` know of the keys up to `end`."""

    def cut(array: Array | None) -> Array | None:
        if array is None:
            return None
        array = array[..., :end]
        return array if array.shape[-2] == 1 else array[..., start:end, :]

    queries, keys = context.queries[start:end], context.keys[:end]
    return AttentionContext(queries, keys, cut(context.mask), cut(context.bias), None, None)


def _visible(layer: LayerTraits, context: AttentionContext, *, windowed: bool) -> Array:
    """Which keys a query sees: bool, broadcasts to [B, 1, Q, K]."""
    distance = context.queries[:, None] - context.keys[None, :]
    seen = distance >= 0
    if windowed:
        seen &= distance < layer.window
    seen = seen[None, None]
    return seen if context.mask is None else seen & context.mask


def _for_each_query(array: Array | None, length: int) -> Array | None:
    """[..., 1 or Q, K] as [..., Q, K]: cuDNN takes no mask and no bias that stands for all queries."""
    return None if array is None else jnp.broadcast_to(array, (*array.shape[:-2], length, array.shape[-1]))
