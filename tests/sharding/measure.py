"""Compiles a training step for eight fake devices and counts what it moves; runs it and compares with one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.compiled.traffic import CompiledCollective, compiled_collectives, total_bytes

MESHES: dict[str, dict[str, int]] = {
    "data2xtensor4": {"data": 2, "fsdp": 1, "tensor": 4},
    "fsdp4xtensor2": {"data": 1, "fsdp": 4, "tensor": 2},
}
QUICKLY = {"xla_backend_optimization_level": 0}
"""Leaves machine code as it comes: three times as fast to compile; what is moved is decided long before."""

Loss = Callable[[Any, Any], Any]


def moved_bytes(loss_fn: Loss, params: Any, batch: Any, specs: Any, gathered: Any, mesh: Mapping[str, int]) -> int:
    """Bytes that one device receives by collectives in one forward and backward pass.

    Args:
        loss_fn: parameters and batch to a scalar.
        params: abstract or not.
        batch: arrays, their leading dim split over `data` and `fsdp`.
        specs: like the parameters, a `PartitionSpec` each: where it lives, and where its gradient goes.
        gathered: the same: where it is used.
        mesh: axis to size, eight devices in all.
    """
    return total_bytes(moved(loss_fn, params, batch, specs, gathered, mesh))


def moved(
    loss_fn: Loss, params: Any, batch: Any, specs: Any, gathered: Any, mesh: Mapping[str, int]
) -> tuple[CompiledCollective, ...]:
    """The collectives of one forward and backward pass; arguments as for `moved_bytes`."""
    return compiled_collectives(
        lower(loss_fn, params, batch, specs, gathered, mesh).compile(compiler_options=QUICKLY), mesh
    )


def lower(loss_fn: Loss, params: Any, batch: Any, specs: Any, gathered: Any, mesh: Mapping[str, int]) -> Any:
    """The step, lowered and not yet compiled; arguments as for `moved_bytes`."""
    step, _ = _step(loss_fn, params, batch, specs, gathered, mesh)
    return step.lower(params, batch)


def equal_to_one_device(
    loss_fn: Loss, params: Any, batch: Any, specs: Any, gathered: Any, mesh: Mapping[str, int]
) -> tuple[float, float]:
    """How far loss and gradients on the mesh are from those on one device.

    Args as for `moved_bytes`; `params` are real.

    Returns:
        The relative error of the loss, and the largest of the gradients: largest difference over largest value.
    """
    expected_loss, expected = jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).compile(QUICKLY)(params, batch)
    step, shardings = _step(loss_fn, params, batch, specs, gathered, mesh)
    placed = jax.device_put((params, batch), shardings)
    loss, gradients = step.lower(*placed).compile(QUICKLY)(*placed)
    errors = jax.tree.map(
        lambda one, other: float(np.abs(np.asarray(one) - np.asarray(other)).max()), expected, gradients
    )
    largest = np.max([np.abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(expected)])
    return float(abs(loss - expected_loss) / abs(expected_loss)), float(np.max(jax.tree.leaves(errors)) / largest)


def device_mesh(mesh: Mapping[str, int]) -> Mesh:
    """A mesh of these sizes over the first fake devices."""
    devices = np.array(jax.devices()[: math.prod(mesh.values())]).reshape(*mesh.values())
    return Mesh(devices, tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def _step(
    loss_fn: Loss, params: Any, batch: Any, specs: Any, gathered: Any, mesh: Mapping[str, int]
) -> tuple[Any, tuple[Any, Any]]:
    devices = device_mesh(mesh)
    place = lambda spec: NamedSharding(devices, spec)  # noqa: E731
    stored, used = jax.tree.map(place, specs), jax.tree.map(place, gathered)
    split = jax.tree.map(lambda _: place(PartitionSpec(("data", "fsdp"))), batch)

    def at_use(params: Any, batch: Any) -> Any:
        return loss_fn(jax.tree.map(jax.lax.with_sharding_constraint, params, used), batch)

    step = jax.jit(
        jax.value_and_grad(at_use),
        in_shardings=(stored, split),
        out_shardings=(place(PartitionSpec()), stored),
    )
    return step, (stored, split)
