"""The real train step, compiled for devices that need not be there, to stand beside what was predicted."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from redco_cli.errors import DeviceError
from redco_cli.placement import Placement
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.plugin.contract import Batch, Loss
from redco_cli.plugin.state import Variables
from redco_cli.runtime.mesh import batch_sharding, make_mesh, replicated
from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.plan import Collective
from redco_cli.training.state import TrainState, new_state
from redco_cli.training.step import make_train_step


def compile_step(option: Option) -> Compiled:
    """Compiles one train step of a way to run a workload, and reads off its memory and its collectives.

    Raises:
        DeviceError: JAX runs with fewer devices, real or simulated, than the mesh has.
    """
    workload, count = option.workload, option.plan.mesh
    wanted = 1
    for size in count.values():
        wanted *= size
    if jax.device_count() < wanted:
        problem = f"{wanted} devices are wanted, and JAX runs with {jax.device_count()}"
        remedy = f"set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before JAX starts, as the command does"
        raise DeviceError("--compile", problem, remedy)
    placement = Placement(make_mesh(count, workload.where), option.plan, option.reshard_after_forward)

    def begin(given: Variables) -> TrainState:
        return new_state(given.params, workload.frozen, workload.optimizer, lambda _: given.state)

    state = jax.eval_shape(begin, workload.abstract)
    places = placement.following(state, workload.abstract.params)

    def loss(variables: Variables, batch: Batch, key: Any, train: bool) -> Loss:
        result: Loss = placement.gathering(workload.loss)(variables, batch, key)
        return result

    schedule = optax.constant_schedule(0.0)
    step = make_train_step(loss, workload.optimizer, schedule, 0, places.trainable, workload.update_state)
    everywhere = replicated(placement.mesh)
    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere)).lower(
        _placed(state, places), _batch(option, placement)
    )
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    analysis = compiled.memory_analysis()
    memory = None if analysis is None else int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes)
    moved = tuple(
        Collective(one.kind, "+".join(one.axes), one.source or one.shape, one.count, one.count * one.bytes)
        for one in compiled_collectives(compiled, count)
    )
    return Compiled(memory, moved, seconds)


def _placed(state: TrainState, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, places
    )


def _batch(option: Option, placement: Placement) -> Any:
    """A global batch: [micro-batches, examples, ...]."""
    passes = option.workload.global_batch_size // option.micro_batch_size
    sharding = batch_sharding(placement.mesh, dim=1)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((passes, *leaf.shape), jnp.dtype(leaf.dtype), sharding=sharding),
        option.workload.batch(option.micro_batch_size),
    )
