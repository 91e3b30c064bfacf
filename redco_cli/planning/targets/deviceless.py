"""Devices that are not there, for JAX to compile for. In a process that has not used JAX for anything else."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from redco_cli.chips.kernels import CUDNN
from redco_cli.chips.table import Chip
from redco_cli.chips.target import Target
from redco_cli.errors import DeviceError
from redco_cli.sharding.compiled.timeline import Place
from redco_cli.sharding.plan import AXES, DATA


def devices_of(target: Target) -> Sequence[Any]:
    """The devices of a target, as JAX describes them to its compiler.

    Raises:
        DeviceError: JAX has no plugin for them here, or there is no such slice.
    """
    chip = target.chip
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu looks for the metadata server of a TPU
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # or the plugin looks for a driver
    sizes = "x".join(map(str, target.sizes))
    try:
        if chip.platform == "tpu":
            slices = {"num_slices": target.groups} if target.groups > 1 else {}
            name = f"{chip.name}:{sizes}"
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **slices).devices
        described = {"target_config": _described(chip), "topology": f"{target.groups}x1x{sizes}"}
        return topologies.get_topology_desc(platform="cuda", **described).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        problem = f"JAX cannot compile for {target} here: {str(error).splitlines()[0]}"
        raise DeviceError("--target", problem, _remedy(chip, str(error))) from error


def _remedy(chip: Chip, said: str) -> str:
    if "lockfile" in said:
        return "one process at a time loads libtpu: end the other, or start it with JAX_PLATFORMS=cpu if it only plans"
    if chip.platform == "tpu":
        return "slices are such as v5e:4x4, v6e:16x16, v5p:4x4x4; the compiler is installed by pip install 'redco[tpu]'"
    return "the compiler is installed by pip install 'redco[cuda]'"


def target_mesh(target: Target, sizes: Mapping[str, int]) -> Mesh:
    """A mesh over the devices of a target, its inner axes along the fastest links.

    Args:
        target: the devices.
        sizes: of the mesh axes; their product is the number of devices.

    Raises:
        DeviceError: see `devices_of`; or the mesh does not divide into the groups.
    """
    devices, shape = devices_of(target), [sizes[axis] for axis in AXES]
    if target.chip.platform == "gpu":
        return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    how = {"allow_split_physical_axes": True}
    if target.groups == 1:
        placed = mesh_utils.create_device_mesh(shape, devices, **how)
    else:
        outer = _over_groups(target, sizes)
        inner = [size // part for size, part in zip(shape, outer, strict=True)]
        placed = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, **how)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def places_of(target: Target, mesh: Mesh) -> list[Place]:
    """Where each device of a mesh is, in the order of the mesh: its host or slice, and its coordinates there."""
    if target.chip.platform == "gpu":
        return [(number // target.of_a_group, ()) for number in range(mesh.size)]
    return [(getattr(one, "slice_index", 0) or 0, tuple(getattr(one, "coords", ()))) for one in mesh.devices.flat]


def _over_groups(target: Target, sizes: Mapping[str, int]) -> list[int]:
    """How many parts of each axis lie in different slices: of the outermost axes first."""
    left, found = target.groups, []
    for axis in AXES:
        part = math.gcd(left, sizes[axis])
        found.append(part)
        left //= part
    if left > 1:
        problem = f"{target} has {target.groups} slices, among which no axis of the mesh can be divided"
        raise DeviceError("--mesh", problem, f"take such as {DATA}={target.groups}")
    return found


def _described(chip: Chip) -> str:
    """A GPU as `GpuTargetConfigProto` in text, which XLA reads instead of asking a driver."""
    cores = chip.multiprocessors
    assert cores is not None
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": cores.shared,
        "threads_per_core_limit": 2048,
        "core_count": cores.cores,
        "fpus_per_core": cores.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(chip.bandwidth),
        "l2_cache_size": cores.cache,
        "clock_rate_ghz": cores.clock,
        "device_memory_size": chip.memory,
        "shared_memory_per_block_optin": cores.shared_of_a_block,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    lines = [f"  {key}: {value}" for key, value in info.items()]
    major, minor = cores.capability
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    dnn = f"dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}"
    runtime = "runtime_version { major: 12 minor: 8 patch: 0 }"
    kind = f'device_description_str: "{chip.kinds[0]}"'
    return "\n".join(["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"', dnn, runtime, kind])
