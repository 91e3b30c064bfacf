"""What is kept of a quantised weight: a code for each element, and a scale for each 64 inputs of an output.

    nf4 (QLoRA, arXiv 2305.14314, appendix E)    w = scale * level[code]    16 levels, scale = the largest |w| of the 64
    int8                                         w = scale * code           -127 to 127, scale = that / 127

Tiles of 64 along the input are the blocks of 64 that bitsandbytes cuts from a PyTorch weight [out, in], and nf4 has
bit for bit its codes and scales. (qwix 0.1.8 divides by a scale and looks for the nearest level, where bitsandbytes
multiplies by a reciprocal and compares with the middle between two: codes differ within a rounding of that middle.)
Scales are float32; they are not quantised once more (`double_quant` of bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.adapters.uses import Use

Kind = Literal["int8", "nf4"]
Array = Any

TILE = 64
"""Inputs that have one scale."""
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the codes of nf4 mean."""
_MIDDLES = (np.array(LEVELS[:-1], np.float32) + np.array(LEVELS[1:], np.float32)) / np.float32(2)
_LARGEST = np.float32(127)
_TINY = np.float32(1e-38)
"""Least scale to divide by, as in bitsandbytes."""


@dataclass(frozen=True)
class Form:
    """What a quantised weight was.

    Attributes:
        kind: of codes.
        use: of the weight: along what it is quantised.
        shape: of the weight, as it is stored.
        dtype: in which a program sees it.
    """

    kind: Kind
    use: Use
    shape: tuple[int, ...]
    dtype: str

    @property
    def tiles(self) -> tuple[int, ...]:
        """Its shape as [*stack, inputs / 64, 64, outputs]."""
        return (*self.use.stack, self.use.inputs // TILE, TILE, self.use.outputs)

    @property
    def abstract(self) -> Quantized:
        """What is kept of it, abstractly."""
        *before, rows, outputs = self.tiles
        packed = rows // 2 if self.kind == "nf4" else rows
        codes = jax.ShapeDtypeStruct((*before, packed, outputs), jnp.uint8 if self.kind == "nf4" else jnp.int8)
        return Quantized(codes, jax.ShapeDtypeStruct((*before, outputs), jnp.float32), self)


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["form"])
@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised weight, or some of its layers; a tree of two arrays.

    Attributes:
        codes: [*stack, inputs / 64, 64, outputs] int8; of nf4 [*stack, inputs / 64, 32, outputs] uint8, with the codes
            of the first 32 inputs in the lower halves of the bytes, and those of the others in the upper halves.
        scales: [*stack, inputs / 64, outputs] float32.
        form: what it was.
    """

    codes: Array
    scales: Array
    form: Form

    def dense(self, dtype: Any = None) -> Array:
        """The weight, or as many of its layers, as they are stored; in the type that a program sees, or another."""
        values = _levels(self.codes) if self.form.kind == "nf4" else self.codes.astype(jnp.float32)
        tiled = values.reshape(*self.scales.shape[:-1], TILE, self.scales.shape[-1]) * self.scales[..., None, :]
        matrix = tiled.reshape(*tiled.shape[:-3], self.form.use.inputs, self.form.use.outputs)
        return self.form.use.stored(matrix.astype(dtype or self.form.dtype), self.form.shape)


def is_quantized(leaf: Any) -> bool:
    """Whether a leaf of parameters is a quantised weight."""
    return isinstance(leaf, Quantized)


def _levels(codes: Array) -> Array:
    """What packed codes mean, [..., 2, 32, outputs].

    Looked up: for selects, the constants would be whole arrays that the backward pass of a loop keeps.
    """
    both = (codes[..., None, :, :] >> jnp.array([0, 4], jnp.uint8)[:, None, None]) & jnp.uint8(15)
    return jnp.asarray(LEVELS, jnp.float32).at[both].get(mode="promise_in_bounds")


def quantized(form: Form, weight: jax.Array, places: Quantized) -> Quantized:
    """A weight quantised on the devices where it lives; the same bits on any.

    Args:
        form: how.
        weight: as it is stored, of any floating type; deleted.
        places: where codes and scales are to live: a `Quantized` of `NamedSharding`s.
    """
    tiled = partial(_tiled, form)
    largest = jax.jit(lambda weight: jnp.abs(tiled(weight)).max(-2), out_shardings=places.scales)(weight)
    # Accelerators round quotients in their own ways: these few are the host's, and products are the same everywhere.
    divisor = _LARGEST if form.kind == "int8" else np.float32(1)
    scales = _on_host(lambda largest: largest / divisor, largest)
    inverse = _on_host(lambda scales: np.float32(1) / np.maximum(scales, _TINY), scales)
    encode = _nf4 if form.kind == "nf4" else _int8
    codes = jax.jit(lambda weight, inverse: encode(tiled(weight) * inverse[..., None, :]), out_shardings=places.codes)(
        weight, inverse
    )
    codes.block_until_ready()
    weight.delete()
    return Quantized(codes, scales, form)


def _tiled(form: Form, weight: Array) -> Array:
    return form.use.matrix(weight.astype(jnp.float32)).reshape(form.tiles)


def _on_host(function: Callable[[Any], Any], array: jax.Array) -> jax.Array:
    """An elementwise function of an array, computed by the host of each of its shards."""
    shards = [jax.device_put(function(np.asarray(shard.data)), shard.device) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _nf4(scaled: Array) -> Array:
    codes = jnp.zeros(scaled.shape, jnp.uint8)
    for middle in _MIDDLES:
        codes += (scaled > middle).astype(jnp.uint8)
    first, second = codes[..., : TILE // 2, :], codes[..., TILE // 2 :, :]
    return first | (second << jnp.uint8(4))


def _int8(scaled: Array) -> Array:
    return jnp.clip(jnp.round(scaled), -_LARGEST, _LARGEST).astype(jnp.int8)
