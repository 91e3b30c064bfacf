"""A parameter put together over `fsdp`, so that its layers stay as they lie in memory.

GPUs gather along the dim that changes slowest. What is gathered along another one XLA has in that order from the
beginning, and where it is a layer of a stack, copies the whole stack into it before the step: of the experts of
Qwen3-30B-A3B, 128 x 2048 x 768 split in their second dim, 13.5 GiB on each of 8 H100s (JAX 0.10.2). Here a shard is
put into that order where it sets out, and what arrives is used in it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.plan import FSDP, as_dims


def all_gather(x: Any, mesh: Mesh, lives: PartitionSpec, used: PartitionSpec) -> Any:
    """The same array where it is used.

    Args:
        x: the array, at `lives`.
        mesh: the devices.
        lives: the mesh axes of its dims.
        used: the same of the result.
    """
    place = _place(x.ndim, lives, used)
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in as_dims(lives, x.ndim)]
    divides = not any(size % parts for size, parts in zip(x.shape, ways, strict=True))
    is_on_tpu = mesh.devices.flat[0].platform == "tpu"  # which gathers along any dim; a CPU does what a GPU does
    if not place or mesh.shape[FSDP] == 1 or not divides or is_on_tpu:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, used))

    def whole(shard: Any) -> Any:
        dims = range(shard.ndim)
        shard = with_layout_constraint(shard, Layout(major_to_minor=tuple(dims)))
        found = jax.lax.all_gather(shard, FSDP, axis=place, tiled=True)
        return with_layout_constraint(found, Layout(major_to_minor=(place, *(dim for dim in dims if dim != place))))

    return jax.shard_map(whole, mesh=mesh, in_specs=lives, out_specs=used, check_vma=False)(x)


def _place(ndim: int, lives: PartitionSpec, used: PartitionSpec) -> int | None:
    """The dim that is put together over `fsdp`, where that is all that happens."""
    dims = zip(as_dims(lives, ndim), as_dims(used, ndim), strict=True)
    changed = {dim: there == (*then, FSDP) for dim, (there, then) in enumerate(dims) if there != then}
    return next(iter(changed)) if list(changed.values()) == [True] else None
