"""Rings of a torus: what a sum is scattered along one after the other, where a mesh axis spans several dims of one.

XLA's compiler for TPUs (libtpu 0.0.42) scatters a sum over 2 x 4, 4 x 8 and 8 x 16 devices, as long as rows can be cut
evenly. Over 4 x 4, 8 x 8 and 16 x 16, over three dims of v5p, and of rows of 128,256 numbers, it adds up all of it on
every device, twice the bytes, and cuts its own part out. Scattered along the rings of one dim, then those of the next,
each device is sent what is to become its own and no more. (Not so over 4 x 4: JAX orders these devices along one ring
that winds through all of them, and their parts are not in the order of any dim.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

_LANES = 128
"""Numbers of a row that a TPU has in one tile."""
_LARGEST_PRIME = 13
"""Among the factors of a row's tiles, for which it was seen to be cut into pieces; with 31 it was not."""

Rings = tuple[tuple[int, ...], ...]
"""Places along a mesh axis, those of each ring together."""


def scatter_sum(x: Any, mesh: Mesh, axis: str, dim: int) -> Any:
    """The sum over a mesh axis, of which each device keeps its part of a dim; in a `shard_map`.

    Args:
        x: what a device adds.
        mesh: the devices.
        axis: of the mesh.
        dim: of the array, cut in as many parts as the axis has devices, in their order.
    """
    if x.ndim > 2:  # of three dims libtpu 0.0.42 scatters some one at a time, and fails at others
        rows = jnp.moveaxis(x, dim, 0)
        rows, shape = rows.reshape(-1, rows.shape[-1]), rows.shape
        return jnp.moveaxis(scatter_sum(rows, mesh, axis, 0).reshape(-1, *shape[1:]), 0, dim)
    for groups in rings_for(mesh, axis, x.shape[-1]) or (None,):
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
    return x


def rings_for(mesh: Mesh, axis: str, row: int) -> tuple[Rings, ...]:
    """The rings of each torus dim that a mesh axis spans, of the dim whose coordinate changes slowest first.

    Args:
        mesh: the devices; those of TPUs have coordinates.
        axis: of the mesh.
        row: numbers in the last dim of what is added up.

    Returns:
        Nothing where XLA scatters by itself, or the axis does not have all devices of a slice, in their order.
    """
    size = mesh.shape[axis]
    slices = [getattr(one, "slice_index", 0) for one in mesh.devices.flat]
    if any(slices.count(one) != size for one in set(slices)):
        return ()
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, size)
    found = {_rings(tuple(line)) for line in lines}
    rings = found.pop() if len(found) == 1 else ()
    return () if _is_scattered_at_once([len(one[0]) for one in rings], row) else rings


def _is_scattered_at_once(sizes: Sequence[int], row: int) -> bool:
    """Whether XLA scatters a sum over a torus of these sizes."""
    if len(sizes) < 2:
        return True
    tiles = -(-row // _LANES)
    for factor in range(2, _LARGEST_PRIME + 1):
        while tiles % factor == 0:
            tiles //= factor
    return len(sizes) == 2 and (sizes[0] != sizes[1] or sizes[0] == 2) and tiles == 1


def _rings(devices: Sequence[Any]) -> tuple[Rings, ...]:
    if not all(one.platform == "tpu" and hasattr(one, "coords") for one in devices):  # GPUs may have them, too
        return ()
    coords = np.array([one.coords for one in devices])
    dims = [dim for dim in range(coords.shape[1]) if len({*coords[:, dim]}) > 1]
    dims.sort(key=lambda dim: np.flatnonzero(coords[:, dim] != coords[0, dim])[0], reverse=True)
    shape = [len({*coords[:, dim]}) for dim in dims]
    if not dims or math.prod(shape) != len(devices):
        return ()
    box = coords[:, dims].reshape(*shape, len(dims))
    if any(np.ptp(np.moveaxis(box[..., at], at, 0).reshape(ring, -1), axis=1).any() for at, ring in enumerate(shape)):
        return ()  # a coordinate changes along another dim, too
    places = np.arange(len(devices)).reshape(shape)
    return tuple(
        tuple(map(tuple, np.moveaxis(places, at, -1).reshape(-1, ring).tolist())) for at, ring in enumerate(shape)
    )
