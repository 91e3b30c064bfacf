"""From devices to a `Mesh`, and from numpy batches to arrays on it. One device is a mesh of one.

Mesh axes: `data` splits the examples of every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redco_cli.errors import DeviceError
from redco_cli.recipe.schema import MeshSection

DATA_AXIS = "data"


def make_mesh(section: MeshSection | Literal["auto"], where: Callable[[str], str]) -> Mesh:
    """The mesh of a recipe over the devices of all processes.

    Raises:
        DeviceError: the recipe asks for more devices than there are, or for fewer on several processes.
    """
    devices = jax.devices()
    wanted = len(devices) if section == "auto" else section.data
    if wanted > len(devices):
        problem = f"{wanted} devices wanted, but {_described(devices)} found"
        raise DeviceError(where("mesh.data"), problem, f"take mesh: auto or data: {len(devices)}")
    if wanted < len(devices) and jax.process_count() > 1:
        problem = f"{wanted} devices wanted, but {_described(devices)} found over {jax.process_count()} processes"
        raise DeviceError(where("mesh.data"), problem, "use all devices of a multi-process run: mesh: auto")
    return Mesh(np.asarray(devices[:wanted]), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def data_shards(mesh: Mesh) -> int:
    """Into how many shards the leading dim of a batch is cut."""
    return int(mesh.shape[DATA_AXIS])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def over_data(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """The sharding of an array whose `dim` is split over the data axis."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * dim, DATA_AXIS))


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
        DeviceError: `size` is no multiple of the data axis.
    """
    shards = data_shards(mesh)
    if size % shards:
        below, above = size // shards * shards, (size // shards + 1) * shards
        choices = f"{below} or {above}" if below else str(above)
        problem = f"{what} of {size} examples cannot be split evenly over {shards} devices"
        raise DeviceError(
            where, problem, f"take a multiple of {shards}, such as {choices}, or fewer devices (mesh.data)"
        )


def _described(devices: list[Any]) -> str:
    plural = "" if len(devices) == 1 else "s"
    return f"{len(devices)} {devices[0].platform} device{plural}"
