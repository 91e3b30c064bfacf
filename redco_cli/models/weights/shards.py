"""Arrays that are born in shards: read piece by piece, so that the host never holds much more than a piece.

An array that is small enough is read in one piece. A larger one begins as zeros on its devices, and its pieces are
written into it in place. Pieces are cut in the coordinates of a shard, the same for all: writing one needs no
communication, however the array is split. Files hold most kernels transposed and in half precision: large pieces
travel as they are stored, and are turned and widened by their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Array = np.ndarray[Any, Any]
Box = tuple[slice, ...]

PIECE_BYTES = 256 * 2**20
"""The most bytes of an array that the host holds at a time, all of its devices together."""
_SMALL_BYTES = 4 * 2**20
"""Pieces up to this size are turned on the host, which is faster than compiling a program for it."""


@dataclass(frozen=True)
class Source:
    """An array that can be read in parts.

    Attributes:
        shape: of the array.
        dtype: of the array on its devices.
        order: where its dims are in storage: the array is what is stored, transposed by `order`.
        cut: dims of the array in the order in which it is cut into pieces; the slowest in storage first.
        read: a slice of each dim of the array to that part as it is stored, contiguous, in any number type.
    """

    shape: tuple[int, ...]
    dtype: Any
    order: tuple[int, ...]
    cut: tuple[int, ...]
    read: Callable[[Box], Array]


def fill(source: Source, sharding: Any = None) -> jax.Array:
    """Reads an array onto its devices.

    Args:
        source: the array.
        sharding: a `NamedSharding` or that of a single device; None for the default device.
    """
    wanted = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if sharding is None else sharding
    named = wanted if isinstance(wanted, NamedSharding) else _on_one(wanted)
    shard = named.shard_shape(source.shape)
    size = PIECE_BYTES // np.dtype(source.dtype).itemsize // len(named.addressable_devices)
    step = piece_shape(shard, source.cut, size)
    if prod(shard) * np.dtype(source.dtype).itemsize <= _SMALL_BYTES:
        filled = _small(source, named)
    elif step == shard:
        filled = _turn(_piece(source, named, shard, (0,) * len(shard)), source.dtype, source.order, named)
    else:
        filled = _zeros(source.shape, source.dtype, named)
        for start in _starts(shard, step):
            box = tuple(min(width, end - first) for width, end, first in zip(step, shard, start, strict=True))
            piece = _piece(source, named, box, start)
            filled = _write(filled, piece, np.asarray(start, np.int32), source.order, named)
            filled.block_until_ready()  # else pieces queue up in memory
    return filled if wanted is named else jax.device_put(filled, wanted)


def piece_shape(shape: Sequence[int], cut: Sequence[int], size: int) -> tuple[int, ...]:
    """The shape of pieces with at most `size` elements, where single elements are not more.

    >>> piece_shape((32, 100, 10), (0, 1), 4000), piece_shape((32, 100, 10), (0, 2), 250)
    ((4, 100, 10), (1, 100, 2))
    """
    sizes = list(shape)
    for dim in cut:
        if prod(sizes) > size:
            fits = max(1, size * sizes[dim] // prod(sizes))
            sizes[dim] = -(-sizes[dim] // -(-sizes[dim] // fits))  # pieces of about one size
    return tuple(sizes)


def _starts(shape: Sequence[int], step: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(0, end, width) for end, width in zip(shape, step, strict=True)))


def _on_one(sharding: Any) -> NamedSharding:
    (device,) = sharding.device_set
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


def _small(source: Source, sharding: NamedSharding) -> jax.Array:
    def part(index: Any) -> Array:
        box = tuple(slice(*one.indices(end)[:2]) for one, end in zip(index, source.shape, strict=True))
        return np.ascontiguousarray(source.read(box).transpose(source.order), source.dtype).reshape(
            [one.stop - one.start for one in box]
        )

    return jax.make_array_from_callback(source.shape, sharding, part)


def _piece(source: Source, sharding: NamedSharding, shape: Sequence[int], start: Sequence[int]) -> jax.Array:
    """The piece of every shard that begins at `start` in it, as it is stored, in one array split like the whole."""
    ways = [whole // own for whole, own in zip(source.shape, sharding.shard_shape(source.shape), strict=True)]
    read: dict[tuple[int, ...], Array] = {}
    placed = []
    for device, index in sharding.addressable_devices_indices_map(source.shape).items():
        first = tuple((where.start or 0) + offset for where, offset in zip(index or (), start, strict=True))
        if first not in read:
            read[first] = source.read(tuple(slice(at, at + width) for at, width in zip(first, shape, strict=True)))
        placed.append(jax.device_put(read[first], device))
    together = [width * many for width, many in zip(shape, ways, strict=True)]
    stored = NamedSharding(sharding.mesh, _as_stored(sharding.spec, source.order))
    return jax.make_array_from_single_device_arrays(
        tuple(together[dim] for dim in np.argsort(source.order)), stored, placed
    )


def _as_stored(spec: PartitionSpec, order: Sequence[int]) -> PartitionSpec:
    """How the stored dims are split where `spec` splits the array's."""
    entries = [*spec, *(None,) * (len(order) - len(spec))]
    return PartitionSpec(*(entries[dim] for dim in np.argsort(order)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    zeros: jax.Array = jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)
    return zeros


@partial(jax.jit, static_argnums=(1, 2, 3))
def _turn(piece: jax.Array, dtype: Any, order: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """A piece that is the whole array, as the array."""
    turned: jax.Array = jax.lax.with_sharding_constraint(piece.transpose(order).astype(dtype), sharding)
    return turned


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _write(
    array: jax.Array, piece: jax.Array, start: Any, order: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """The array with `piece` written at `start` of each shard."""
    spec = sharding.spec

    def local(shard: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, part.transpose(order).astype(shard.dtype), tuple(start))

    specs = (spec, _as_stored(spec, order), PartitionSpec())
    written: jax.Array = jax.shard_map(local, mesh=sharding.mesh, in_specs=specs, out_specs=spec, check_vma=False)(
        array, piece, start
    )
    return written
