"""From devices to a `Mesh`, and from numpy batches to arrays on it. One device is a mesh of one.

Mesh axes, as in `redco_cli.sharding.plan`: `data` and `fsdp` split the examples of every batch, `fsdp` and `tensor` the
parameters. `tensor` is the innermost: its devices are neighbours, within one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redco_cli.errors import DeviceError
from redco_cli.sharding.plan import AXES, BATCH_AXES, TENSOR


def make_mesh(sizes: Mapping[str, int], where: Callable[[str], str]) -> Mesh:
    """The mesh of a recipe over the devices of all processes.

    Args:
        sizes: of the mesh axes.
        where: dotted recipe key to its place.

    Raises:
        DeviceError: more devices are asked for than there are, or fewer on several processes, or a tensor axis that
            would span processes.
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
    if jax.local_device_count() % sizes[TENSOR] and jax.process_count() > 1:
        problem = f"tensor {sizes[TENSOR]} would span processes, which have {jax.local_device_count()} devices each"
        raise DeviceError(where("mesh.tensor"), problem, "take a divisor of the devices of a process")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:wanted])


def data_shards(mesh: Mesh) -> int:
    """Into how many shards the leading dim of a batch is cut."""
    return math.prod(int(mesh.shape[axis]) for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def over_data(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """The sharding of an array whose `dim` is split as batches are."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * dim, BATCH_AXES))


def put(batch: Mapping[str, Any], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Places this process's part of a batch on its devices; does not wait for the copy.

    Args:
        batch: numpy arrays, this process's rows of each dim that `sharding` splits.
        sharding: of every array in the batch.

    Returns:
        Global arrays: the rows of all processes.
    """
    return {name: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)) for name, leaf in batch.items()}


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
            where, problem, f"take a multiple of {shards}, such as {choices}, or fewer devices (mesh.data, mesh.fsdp)"
        )


def _described(devices: list[Any]) -> str:
    plural = "" if len(devices) == 1 else "s"
    return f"{len(devices)} {devices[0].platform} device{plural}"
