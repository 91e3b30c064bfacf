"""Rings of a torus: what a sum is scattered along one after the other, where a mesh axis spans several dims of one.

XLA's compiler for TPUs (libtpu 0.0.42) scatters a sum over 2 x 4, 4 x 8 and 8 x 16 devices. Over 4 x 4, 8 x 8, 16 x 16
and three dims of v5p it adds up all of it on every device, twice the bytes, and cuts its own part out. Scattered along
the rings of one dim, then those of the next, each device is sent what is to become its own and no more. XLA also adds
up the whole of some sums that are cut within their rows, and of rows whose tiles it cannot cut evenly, as those of
128,256 or 151,936 numbers: columns are scattered as rows here, and such rows filled up. JAX may order the devices
otherwise than their coordinates do, those of 4 x 4 along one ring that winds through all of them: the parts are put in
the order of the torus before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

_LANES = 128
"""Numbers of a row that a TPU has in one tile."""
_LARGEST_PRIME = 13
"""Among the factors of a row's tiles, for which it was seen to be cut into pieces; with 31 it was not."""


class Torus(NamedTuple):
    """How a mesh axis lies on a torus.

    Attributes:
        order: places along the axis, in the order of their devices' coordinates.
        rings: for each dim of the torus, of the one that changes slowest first: the places that each ring joins.
    """

    order: tuple[int, ...]
    rings: tuple[tuple[tuple[int, ...], ...], ...]


def scatter_sum(x: Any, mesh: Mesh, axis: str, dim: int) -> Any:
    """The sum over a mesh axis, of which each device keeps its part of a dim; in a `shard_map`.

    Args:
        x: what a device adds.
        mesh: the devices.
        axis: of the mesh.
        dim: of the array, cut in as many parts as the axis has devices, in their order.
    """
    on_tpu = all(one.platform == "tpu" for one in mesh.devices.flat)
    if x.ndim > 2 or (on_tpu and dim > 0):  # of three dims libtpu scatters some one at a time, or fails
        rows = jnp.moveaxis(x, dim, 0)
        rows, shape = rows.reshape(-1, rows.shape[-1]), rows.shape
        return jnp.moveaxis(scatter_sum(rows, mesh, axis, 0).reshape(-1, *shape[1:]), 0, dim)
    if not on_tpu:
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    torus = torus_of(mesh, axis)
    added = _filled_up(x) if torus is None else _in_order(_filled_up(x), torus.order)
    for groups in (None,) if torus is None else torus.rings:
        added = _row_by_row(added)
        added = jax.lax.psum_scatter(added, axis, scatter_dimension=0, axis_index_groups=groups, tiled=True)
    if added.shape[1:] == x.shape[1:]:
        return added
    # Cut at once, XLA makes one slice of both cuts where it scatters, and fails an assertion of its own.
    return jax.lax.optimization_barrier(added)[:, : x.shape[1]]


def torus_of(mesh: Mesh, axis: str) -> Torus | None:
    """The torus along whose rings a sum over a mesh axis is to be scattered; none where XLA does so by itself.

    Args:
        mesh: the devices; those of TPUs have coordinates.
        axis: of the mesh; along a part of a slice XLA scatters.
    """
    size = mesh.shape[axis]
    slices = [getattr(one, "slice_index", 0) for one in mesh.devices.flat]
    if any(slices.count(one) != size for one in set(slices)):
        return None
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, size)
    found = {_torus(tuple(line)) for line in lines}
    torus = found.pop() if len(found) == 1 else None
    return None if torus is None or _is_crossed_at_once([len(rings[0]) for rings in torus.rings]) else torus


def _is_crossed_at_once(sizes: Sequence[int]) -> bool:
    """Whether XLA scatters a sum over a whole torus of these sizes."""
    return len(sizes) < 2 or (len(sizes) == 2 and (sizes[0] != sizes[1] or sizes[0] == 2))


def _filled_up(x: Any) -> Any:
    """Rows with as many tiles as XLA can cut evenly."""
    if x.ndim < 2:
        return x
    least = -(-x.shape[1] // _LANES)
    tiles = next(tiles for tiles in itertools.count(least) if _largest_prime(tiles) <= _LARGEST_PRIME)
    return x if tiles == least else jnp.pad(x, ((0, 0), (0, tiles * _LANES - x.shape[1])))


def _in_order(x: Any, order: Sequence[int]) -> Any:
    """Of as many parts, each where the device is that keeps it."""
    if list(order) == list(range(len(order))):
        return x
    return jnp.take(x.reshape(len(order), -1, *x.shape[1:]), np.array(order), axis=0).reshape(x.shape)


def _row_by_row(x: Any) -> Any:
    """As it lies in memory; XLA would rather scatter columns, and then scatters nothing."""
    return x if x.ndim < 2 else with_layout_constraint(x, Layout(major_to_minor=(0, 1)))


def _largest_prime(number: int) -> int:
    """The largest prime factor; 1 of 1."""
    largest, factor = 1, 2
    while factor <= number:
        if number % factor:
            factor += 1
        else:
            largest, number = factor, number // factor
    return largest


def _torus(devices: Sequence[Any]) -> Torus | None:
    if not all(one.platform == "tpu" and hasattr(one, "coords") for one in devices):  # GPUs may have them, too
        return None
    coords = np.array([one.coords for one in devices])
    dims = [dim for dim in range(coords.shape[1]) if len({*coords[:, dim]}) > 1]
    dims.sort(key=lambda dim: np.flatnonzero(coords[:, dim] != coords[0, dim])[0], reverse=True)
    seen = [list(dict.fromkeys(coords[:, dim].tolist())) for dim in dims]  # a dim may be gone through backwards
    found = [tuple(one.index(at) for one, at in zip(seen, row, strict=True)) for row in coords[:, dims].tolist()]
    shape = [len(one) for one in seen]
    if not dims or len(set(found)) != len(devices) or math.prod(shape) != len(devices):
        return None
    order = sorted(range(len(devices)), key=found.__getitem__)
    box = np.array(order).reshape(shape)
    rings = (np.moveaxis(box, at, -1).reshape(-1, ring).tolist() for at, ring in enumerate(shape))
    return Torus(tuple(order), tuple(tuple(map(tuple, one)) for one in rings))


def share(x: Any, dim: int, axis: str, mesh: Mesh, *, blocks: int = 1) -> Any:
    """What one device along a mesh axis has of an array, in a `shard_map`; of each of so many blocks of a dim."""
    before, after, size = x.shape[:dim], x.shape[dim + 1 :], x.shape[dim] // blocks // mesh.shape[axis]
    cut = x.reshape(*before, blocks, -1, *after)
    own = jax.lax.dynamic_slice_in_dim(cut, jax.lax.axis_index(axis) * size, size, dim + 1)
    return own.reshape(*before, blocks * size, *after)
