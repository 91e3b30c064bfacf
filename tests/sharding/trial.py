"""Runs a step on parameters that live in shards, gathered where they are used, and compares it with one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.sharding import Plan
from redco_cli.sharding.compiled.traffic import CompiledCollective, compiled_collectives
from redco_cli.sharding.gather.gathering import gathering
from redco_cli.sharding.plan import BATCH_AXES
from redco_cli.sharding.program.branches import by_number
from tests.sharding.measure import QUICKLY, device_mesh
from tests.sharding.programs.catalogue import program

FLOOR = 1e-2
"""A gradient this small beside the largest one is compared with that share of the largest: the rest is rounding."""
_DRAWS = 8

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Trial:
    """A step on a mesh.

    Attributes:
        loss: its relative error.
        gradients: relative error of each, by path: largest difference over largest value.
        moved: the collectives.
        temporary: bytes that one device needs beside arguments and results.
    """

    loss: float
    gradients: Mapping[str, float]
    moved: tuple[CompiledCollective, ...]
    temporary: int

    @property
    def worst(self) -> float:
        """The largest error of all."""
        return max(self.loss, *self.gradients.values())


def compiled(loss_fn: Loss, params: Any, batch: Any, plan: Plan, *, reshard_after_forward: bool = False) -> Any:
    """The step, and where it takes its arguments.

    Args:
        loss_fn: parameters and batch to a scalar.
        params: abstract or not.
        batch: arrays, their leading dim split over `data` and `fsdp`.
        plan: of the parameters.
        reshard_after_forward: gather once more in the backward pass.
    """
    mesh = device_mesh(plan.mesh)
    stored = jax.tree.map(lambda spec: NamedSharding(mesh, spec), plan.specs)
    split = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(BATCH_AXES)), batch)
    again = reshard_after_forward
    gathers = gathering(loss_fn, plan.specs, plan.gathered, mesh, usage=plan.usage, reshard_after_forward=again)
    step = jax.jit(
        jax.value_and_grad(gathers),
        in_shardings=(stored, split),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), stored),
    )
    return step.lower(params, batch).compile(QUICKLY), (stored, split)


def attempt(
    loss_fn: Loss,
    params: Any,
    batch: Any,
    plan: Plan,
    *,
    reshard_after_forward: bool = False,
    expected: tuple[Any, ...] | None = None,
) -> Trial:
    """One step on the mesh of a plan beside one on one device; arguments as for `compiled`, parameters real.

    Args:
        expected: loss and gradients of one device, where they are known.
    """
    loss, gradients = one_device(loss_fn, params, batch) if expected is None else expected[:2]
    step, where = compiled(loss_fn, params, batch, plan, reshard_after_forward=reshard_after_forward)
    found_loss, found = step(*jax.device_put((params, batch), where))
    temporary = step.memory_analysis().temp_size_in_bytes
    return Trial(
        float(abs(found_loss - loss) / abs(loss)),
        errors(gradients, found),
        compiled_collectives(step, plan.mesh, by_number(jax.make_jaxpr(loss_fn)(params, batch))),
        temporary,
    )


def errors(gradients: Any, found: Any) -> dict[str, float]:
    """By path: the largest difference over the largest value."""
    largest = max(np.abs(leaf).max(initial=0.0) for leaf in jax.tree.leaves(gradients))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _error(leaf, np.asarray(other), largest)
        for (path, leaf), other in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(found), strict=True)
    }


def one_device(loss_fn: Loss, params: Any, batch: Any) -> tuple[Any, Any]:
    """Loss and gradients."""
    return jax.device_get(_step(loss_fn, params, batch)(params, batch))


def due_to_rounding(loss_fn: Loss, params: Any, batch: Any) -> float:
    """The largest error of the gradients, on one device, in a few draws of the last bit of each parameter.

    Where a gate closes at the last bit one draw tells little: of a steep program they range over a factor of a hundred.
    """
    step, rng = _step(loss_fn, params, batch), np.random.default_rng(0)
    gradients, worst = jax.device_get(step(params, batch)[1]), 0.0
    for _ in range(_DRAWS):
        nudged = jax.tree.map(
            lambda leaf: np.nextafter(leaf, rng.choice([-np.inf, np.inf], leaf.shape), dtype=leaf.dtype), params
        )
        worst = max(worst, *errors(gradients, step(nudged, batch)[1]).values())
    return worst


def _step(loss_fn: Loss, params: Any, batch: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).compile(QUICKLY)


@functools.cache
def expected(name: str) -> tuple[Any, Any, float]:
    """Loss and gradients of a program on one device, and how far they are from themselves.

    The last is the largest error of the gradients of the same examples in the opposite order: what is due to rounding.
    """
    one = program(name)
    values, step = one.values(), _step(one.loss_fn, one.values(), one.batch)
    loss, gradients = jax.device_get(step(values, one.batch))
    _, again = step(values, jax.tree.map(lambda array: np.ascontiguousarray(array[::-1]), one.batch))
    return loss, gradients, max(errors(gradients, again).values())


def _error(leaf: Any, other: Any, largest: float) -> float:
    if not leaf.size:
        return 0.0
    return float(np.abs(leaf - other).max() / max(np.abs(leaf).max(), FLOOR * largest, 1e-30))
