"""The parts that a U-Net and an autoencoder are put together from; each named as diffusers names it.

Shapes: B batch, Y height, X width, C channels, S places (of an image Y * X, or of what is attended to), L tokens of a
prompt, D size of their states, T size of the embedding of a time, H heads. Parameters are float32, and cast to the
compute type where they are used. A convolution of one pixel is a matrix here: `naming` knows how it is stored.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.chips.target import current_platform

Array = Any

_BEFORE_ATTENTION_EPS = 1e-6
_WIDEST_HEAD = 128
"""Of cuDNN's attention before Hopper."""

conv3x3 = partial(nn.Conv, kernel_size=(3, 3), padding=1)
"""A convolution that keeps height and width."""


def group_norm(groups: int, eps: float, dtype: Any, name: str) -> nn.GroupNorm:
    """A group norm, whose mean and variance are float32."""
    return nn.GroupNorm(groups, epsilon=eps, dtype=dtype, use_fast_variance=False, name=name)


class Residual(nn.Module):  # type: ignore[misc]
    """Two convolutions, between which the time shifts each channel (`ResnetBlock2D`).

    Attributes:
        channels: of what comes out.
        groups: of its norms.
        eps: of its norms.
        dtype: compute type.
    """

    channels: int
    groups: int
    eps: float
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, time: Array | None = None) -> Array:
        """`x` [B, Y, X, C] and the embedding of a time [B, T] to [B, Y, X, channels]."""
        y = nn.silu(group_norm(self.groups, self.eps, self.dtype, "norm1")(x))
        y = conv3x3(self.channels, dtype=self.dtype, name="conv1")(y)
        if time is not None:
            shift = nn.Dense(self.channels, dtype=self.dtype, name="time_emb_proj")(nn.silu(time))
            y = y + shift[:, None, None]
        y = nn.silu(group_norm(self.groups, self.eps, self.dtype, "norm2")(y))
        y = conv3x3(self.channels, dtype=self.dtype, name="conv2")(y)
        if x.shape[-1] != self.channels:
            x = nn.Dense(self.channels, dtype=self.dtype, name="conv_shortcut")(x)
        return x + y


class Downsample(nn.Module):  # type: ignore[misc]
    """A convolution that halves height and width (`Downsample2D`).

    Attributes:
        padding: rows before and behind the image, columns likewise.
        dtype: compute type.
    """

    padding: tuple[int, int]
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [B, Y, X, C] to [B, Y / 2, X / 2, C]."""
        sides = (self.padding, self.padding)
        return nn.Conv(x.shape[-1], (3, 3), strides=2, padding=sides, dtype=self.dtype, name="conv")(x)


class Upsample(nn.Module):  # type: ignore[misc]
    """Each pixel four times, then a convolution (`Upsample2D`).

    Attributes:
        dtype: compute type.
    """

    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, like: Array | None = None) -> Array:
        """`x` [B, Y, X, C] to [B, 2 Y, 2 X, C], or one row and one column less where `like` has them."""
        x = x.repeat(2, axis=1).repeat(2, axis=2)
        if like is not None:
            x = x[:, : like.shape[1], : like.shape[2]]
        return conv3x3(x.shape[-1], dtype=self.dtype, name="conv")(x)


def attend(x: Array, seen: Array, heads: int, *, bias: bool, dtype: Any) -> Array:
    """Places [B, S, C] that look at [B, L, D], by projections that become those of the module that calls this.

    Args:
        x: the places.
        seen: what they look at.
        heads: how many; they divide C.
        bias: whether queries, keys and values have one.
        dtype: compute type; scores and their softmax are float32.
    """
    channels = x.shape[-1]
    project = partial(nn.Dense, channels, use_bias=bias, dtype=dtype)
    q, k, v = project(name="to_q")(x), project(name="to_k")(seen), project(name="to_v")(seen)
    q, k, v = (one.reshape(*one.shape[:2], heads, channels // heads) for one in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, implementation="cudnn" if _is_fused(q, k) else "xla")
    return nn.Dense(channels, dtype=dtype, name="to_out")(mixed.reshape(x.shape))


def _is_fused(q: Array, k: Array) -> bool:
    """Whether cuDNN attends: in 16 bits on a GPU; it has no gradient for an odd number of places."""
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= _WIDEST_HEAD and not (q.shape[1] % 2 or k.shape[1] % 2)
    return bool(current_platform() == "gpu" and half and fits)


class Attention(nn.Module):  # type: ignore[misc]
    """Places that look at others, or at the tokens of a prompt.

    Attributes:
        heads: how many; they divide C.
        dtype: compute type.
    """

    heads: int
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, seen: Array) -> Array:
        """`x` [B, S, C] and what it looks at [B, L, D] to [B, S, C]."""
        return attend(x, seen, self.heads, bias=False, dtype=self.dtype)


class FeedForward(nn.Module):  # type: ignore[misc]
    """A gated feed-forward layer, four times as wide inside (`FeedForward` with `GEGLU`).

    Attributes:
        dtype: compute type.
    """

    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [B, S, C] to the same shape."""
        channels = x.shape[-1]
        up, gate = (nn.Dense(4 * channels, dtype=self.dtype, name=name)(x) for name in ("up", "gate"))
        return nn.Dense(channels, dtype=self.dtype, name="down")(up * jax.nn.gelu(gate, approximate=False))


class TransformerBlock(nn.Module):  # type: ignore[misc]
    """Places look at each other and at the prompt, and are thought over (`BasicTransformerBlock`).

    Attributes:
        heads: of attention.
        dtype: compute type.
    """

    heads: int
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, states: Array) -> Array:
        """`x` [B, S, C] and the states of a prompt [B, L, D] to [B, S, C]."""
        norm = partial(nn.LayerNorm, epsilon=1e-5, dtype=self.dtype, use_fast_variance=False)
        y = norm(name="norm1")(x)
        x = x + Attention(self.heads, self.dtype, name="attn1")(y, y)
        x = x + Attention(self.heads, self.dtype, name="attn2")(norm(name="norm2")(x), states)
        return x + FeedForward(self.dtype, name="ff")(norm(name="norm3")(x))


class ImageTransformer(nn.Module):  # type: ignore[misc]
    """A transformer block over the places of an image (`Transformer2DModel`).

    Attributes:
        heads: of attention.
        groups: of the norm before it.
        dtype: compute type.
    """

    heads: int
    groups: int
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, states: Array) -> Array:
        """`x` [B, Y, X, C] and the states of a prompt [B, L, D] to [B, Y, X, C]."""
        channels = x.shape[-1]
        y = group_norm(self.groups, _BEFORE_ATTENTION_EPS, self.dtype, "norm")(x)
        y = nn.Dense(channels, dtype=self.dtype, name="proj_in")(y.reshape(len(y), -1, channels))
        y = TransformerBlock(self.heads, self.dtype, name="transformer_blocks_0")(y, states)
        y = nn.Dense(channels, dtype=self.dtype, name="proj_out")(y)
        return x + y.reshape(x.shape)


class ImageAttention(nn.Module):  # type: ignore[misc]
    """Places of an image look at each other by one head, in the middle of an autoencoder (`Attention`).

    Attributes:
        groups: of the norm before it.
        dtype: compute type.
    """

    groups: int
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [B, Y, X, C] to the same shape."""
        y = group_norm(self.groups, _BEFORE_ATTENTION_EPS, self.dtype, "group_norm")(x)
        y = y.reshape(len(y), -1, y.shape[-1])
        return x + attend(y, y, 1, bias=True, dtype=self.dtype).reshape(x.shape)
