"""From devices to a `Mesh`, and from numpy batches to arrays on it. One device is a mesh of one.

Mesh axes, as in `redco_cli.sharding.plan`: `data` and `fsdp` split the examples of every batch, `fsdp` and `tensor` the
parameters. `tensor` is the innermost: its devices are neighbours, within one process where that has as many. Where an
axis that does not split the batch spans processes, these hold, and collate, the same rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redco_cli.errors import DeviceError
from redco_cli.sharding.plan import AXES, BATCH_AXES


def make_mesh(sizes: Mapping[str, int], where: Callable[[str], str]) -> Mesh:
    """The mesh of a recipe over the devices of all processes.

    Args:
        sizes: of the mesh axes.
        where: dotted recipe key to its place.

    Raises:
        DeviceError: more devices are asked for than there are, or fewer on several processes.
    """
    devices = jax.devices()
    shape = [sizes[axis] for axis in AXES]
    wanted = math.prod(shape)
    asked = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True) if size > 1) or "data 1"
    if wanted > len(devices):
        problem = f"{asked} takes {wanted} devices, but {_described(devices)} found"
        raise DeviceError(where("mesh"), problem, f"take mesh: auto, or sizes with a product of {len(devices)}")
    if wanted < len(devices) and jax.process_count() > 1:
        problem = (
            f"{asked} takes {wanted} devices, but {_described(devices)} found over {jax.process_count()} processes"
        )
        raise DeviceError(where("mesh"), problem, "use all devices of a multi-process run: mesh: auto")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:wanted])


def data_shards(mesh: Mesh) -> int:
    """Into how many shards the leading dim of a batch is cut."""
    return math.prod(int(mesh.shape[axis]) for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """The sharding of an array whose `dim` is split as batches are."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * dim, BATCH_AXES))


@functools.cache
def local_rows(mesh: Mesh, size: int) -> tuple[int, ...]:
    """The rows of a batch of `size` examples that the devices of this process hold, ascending."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((size,)).values()
    return tuple(sorted({row for index in indices for row in range(*_only(index).indices(size))}))


@functools.cache
def counted_rows(mesh: Mesh, size: int) -> tuple[bool, ...]:
    """Of each of `local_rows`, whether this process counts it: those of several processes are counted by the first."""
    first: dict[int, int] = {}
    where: Mapping[Any, Any] = batch_sharding(mesh).devices_indices_map((size,))
    for device, index in where.items():
        for row in range(*_only(index).indices(size)):
            first[row] = min(first.get(row, device.process_index), device.process_index)
    return tuple(first[row] == jax.process_index() for row in local_rows(mesh, size))


def _only(index: tuple[slice, ...] | None) -> slice:
    return index[0] if index else slice(None)


def put(batch: Mapping[str, Any], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Places this process's part of a batch on its devices; does not wait for the copy.

    Args:
        batch: numpy arrays, of the dim that `sharding` splits the rows that `local_rows` says.
        sharding: of every array in the batch.

    Returns:
        Global arrays: the rows of all processes.
    """
    return {name: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)) for name, leaf in batch.items()}


def put_like(value: Any, old: jax.Array) -> jax.Array:
    """A copy of `value` in the place of `old`, with its dtype.

    Args:
        value: an array over all processes; or a numpy array, or one of this process alone, the same on each.
        old: on the mesh.

    Raises:
        ValueError: the shapes differ.
    """
    if np.shape(value) != old.shape:
        raise ValueError(f"an array of shape {list(np.shape(value))} cannot replace one of {list(old.shape)}")
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        copied: jax.Array = jax.jit(_copied, static_argnums=1, out_shardings=old.sharding)(value, old.dtype)
        return copied
    whole = np.asarray(value, old.dtype)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: whole[index])


def _copied(value: jax.Array, dtype: Any) -> jax.Array:
    return jnp.copy(value).astype(dtype)  # a buffer of its own: the next step takes over that of the state


def check_divisible(size: int, mesh: Mesh, where: str, what: str) -> None:
    """Refuses a batch size that the devices cannot share evenly.

    Raises:
        DeviceError: `size` is no multiple of the shards of a batch.
    """
    shards = data_shards(mesh)
    if size % shards:
        below, above = size // shards * shards, (size // shards + 1) * shards
        choices = f"{below} or {above}" if below else str(above)
        problem = f"{what} of {size} examples cannot be split evenly over {shards} devices"
        raise DeviceError(
            where,
            problem,
            f"take a multiple of {shards}, such as {choices}, or fewer devices for data and fsdp: "
            "those of tensor share every example",
        )


def _described(devices: list[Any]) -> str:
    plural = "" if len(devices) == 1 else "s"
    return f"{len(devices)} {devices[0].platform} device{plural}"
