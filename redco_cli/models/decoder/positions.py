"""Where a token stands: rotary angles with every way of stretching them, and ALiBi's slopes.

Shapes: B batch, S sequence, H heads, D dims of a head, P pairs of dims that turn together.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.models.decoder.config import Rope

Array = Any


def rotary_angles(rope: Rope, positions: Array, length: Array) -> tuple[Array, Array]:
    """Cosines and sines [B, S, P] of the angles at positions [B, S], float32, times the rope's magnitude.

    Args:
        rope: which kind.
        positions: of the tokens.
        length: tokens of the text, for kinds that depend on it.
    """
    angles = positions[..., None].astype(jnp.float32) * _frequencies(rope, length)
    return jnp.cos(angles) * rope.magnitude, jnp.sin(angles) * rope.magnitude


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Turns the first 2P dims of each head.

    Args:
        x: queries or keys [B, S, H, D].
        cos: [B, S, P]; `sin` likewise.
        interleaved: whether a pair is two dims side by side, or dim i with dim i + P.
    """
    dims = 2 * cos.shape[-1]
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    turned, rest = x[..., :dims], x[..., dims:]
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], dims // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        pairs = jnp.concatenate(
            [(first * cos - second * sin)[..., None], (second * cos + first * sin)[..., None]], axis=-1
        )
        turned = pairs.reshape(turned.shape)
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """The slope of each head [H]: a geometric series, filled up from the next finer one where H is no power of two."""
    closest = 2 ** math.floor(math.log2(heads))
    slopes = _series(closest)
    if closest != heads:
        slopes = np.concatenate([slopes, _series(2 * closest)[::2][: heads - closest]])
    return slopes


def alibi_bias(positions: Array, heads: int, *, rounded: bool) -> Array:
    """What ALiBi adds to the scores of each key, float32 [B, H, 1, S].

    Only differences along the keys matter to a softmax, so the bias depends on the key's position alone.

    Args:
        positions: of the keys [B, S].
        heads: H.
        rounded: whether slopes and products are bfloat16.
    """
    # XLA may leave out a cast to bfloat16 and back, but not this one
    narrow = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7) if rounded else jnp.asarray
    slopes = jnp.asarray(alibi_slopes(heads), jnp.float32)
    return narrow(narrow(slopes)[:, None, None] * narrow(positions.astype(jnp.float32))[:, None, None])


def _series(heads: int) -> np.ndarray[Any, Any]:
    base = np.float32(2.0 ** -(2.0 ** -(math.log2(heads) - 3)))
    slopes: np.ndarray[Any, Any] = np.power(base, np.arange(1, heads + 1, dtype=np.float32), dtype=np.float32)
    return slopes


def _frequencies(rope: Rope, length: Array) -> Array:
    """Radians per position [P]; traced only where they depend on the length of the sequence."""
    exponents = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    plain = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "dynamic":
        length = jnp.maximum(length, rope.positions).astype(jnp.float32)
        growth = rope.factor * length / rope.positions - (rope.factor - 1)
        return 1.0 / (rope.theta * growth ** (rope.dims / (rope.dims - 2))) ** exponents
    if rope.kind == "longrope":
        short = plain / np.asarray(rope.short_factors, np.float32)
        long = plain / np.asarray(rope.long_factors, np.float32)
        return jnp.where(length > rope.positions, long, short)
    return plain


def _llama3(rope: Rope, plain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Long wavelengths divided by the factor, short ones kept, a linear passage between."""
    turns = rope.positions * plain / np.float32(2 * math.pi)
    kept = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    kept = np.clip(kept, 0.0, 1.0).astype(np.float32)
    frequencies: np.ndarray[Any, Any] = (1 - kept) * plain / np.float32(rope.factor) + kept * plain
    return frequencies


def _yarn(rope: Rope, plain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pairs that turn often kept, those that turn rarely divided by the factor, a linear passage over the pairs."""

    def pair(turns: float) -> float:
        return rope.dims * math.log(rope.positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.fast_turns), pair(rope.slow_turns)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    span = high - low if high != low else 0.001
    stretched = np.clip((np.arange(rope.dims // 2, dtype=np.float32) - low) / span, 0, 1).astype(np.float32)
    frequencies: np.ndarray[Any, Any] = plain / np.float32(rope.factor) * stretched + plain * (1 - stretched)
    return frequencies
