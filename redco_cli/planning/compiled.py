"""The real train step, compiled for devices that need not be there, to stand beside what was predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from redco_cli.chips.compiler import compile_fitting, compile_with
from redco_cli.data.batch import PADDING
from redco_cli.errors import DeviceError
from redco_cli.placement import Placement
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.planning.workload import Workload
from redco_cli.plugin.contract import Batch, Loss
from redco_cli.plugin.state import Variables
from redco_cli.privacy.gradient import private_gradient
from redco_cli.runtime.mesh import batch_sharding, make_mesh, replicated
from redco_cli.sharding.compiled.schedule import compiled_kernels
from redco_cli.sharding.compiled.traffic import CompiledCollective, compiled_collectives
from redco_cli.sharding.plan import Collective, Plan
from redco_cli.training.state import TrainState, new_state
from redco_cli.training.step import make_train_step


@dataclass(frozen=True)
class Way:
    """A step that can be compiled.

    Attributes:
        workload: what runs.
        plan: where parameters live.
        micro_batch_size: examples that go through the model at once, on all devices together.
        reshard_after_forward: gathered parameters are gathered again in the backward pass.
    """

    workload: Workload
    plan: Plan
    micro_batch_size: int
    reshard_after_forward: bool


@dataclass(frozen=True)
class Program:
    """A step as a compiler has it.

    Attributes:
        text: of the optimised HLO module.
        memory: bytes on one device; None when the compiler does not say.
        host: bytes on the host that belong to one device.
        is_ordered: whether its instructions run in the order of the text; a CPU's overlap nothing.
    """

    text: str
    memory: int | None
    host: int
    is_ordered: bool


def way_of(option: Option) -> Way:
    """One of the ways that were estimated."""
    return Way(option.workload, option.plan, option.micro_batch_size, option.reshard_after_forward)


def compile_step(option: Option) -> Compiled:
    """Compiles one train step of a way to run a workload for the devices of JAX, and reads off what it became.

    Raises:
        DeviceError: JAX runs with fewer devices, real or simulated, than the mesh has.
        RecipeError: their compiler does not know an option of `train.xla`.
    """
    workload, count = option.workload, option.plan.mesh
    wanted = math.prod(count.values())
    if jax.device_count() < wanted:
        problem = f"{wanted} devices are wanted, and JAX runs with {jax.device_count()}"
        remedy = f"set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before JAX starts, as the command does"
        raise DeviceError("--compile", problem, remedy)
    began = time.perf_counter()
    lowered = lower_step(way_of(option), make_mesh(count, workload.where))
    compiled, _, changed = compile_fitting(lambda tried: compile_with(lowered, tried, workload.where), workload.xla)
    return replace(read_step(program_of(compiled), count, time.perf_counter() - began), changed=changed)


def lower_step(way: Way, mesh: Mesh) -> jax.stages.Lowered:
    """The train step as a program for the devices of a mesh, which need not be there."""
    lowered: jax.stages.Lowered = trace_step(way, mesh).lower()
    return lowered


def trace_step(way: Way, mesh: Mesh) -> jax.stages.Traced:
    """The same, before it is one of XLA's."""
    workload = way.workload
    placement = Placement(mesh, way.plan, way.reshard_after_forward)

    def begin(given: Variables) -> TrainState:
        return new_state(given.params, workload.frozen, workload.optimizer, lambda _: given.state)

    state = jax.eval_shape(begin, workload.abstract)
    places = placement.following(state, workload.abstract.params)

    def loss(variables: Variables, batch: Batch, key: Any, train: bool) -> Loss:
        result: Loss = placement.gathering(workload.loss)(variables, batch, key)
        return result

    schedule = optax.constant_schedule(0.0)
    private = private_gradient(loss, workload.privacy, places.trainable)
    step = make_train_step(loss, workload.optimizer, schedule, 0, places.trainable, workload.update_state, private)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(mesh)))
    return compiled.trace(_placed(state, places), _batch(way, mesh))


def program_of(compiled: jax.stages.Compiled) -> Program:
    """A step that was compiled to its end."""
    analysis, text, platform = compiled.memory_analysis(), compiled.as_text() or "", _platform(compiled)
    return Program(
        text,
        memory=None if analysis is None else _bytes_at_worst(analysis, platform),
        host=0 if analysis is None else int(analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes),
        is_ordered="is_scheduled=true" in text.partition("\n")[0] and platform != "cpu",
    )


def read_step(
    program: Program, mesh: Mapping[str, int], seconds: float, shares: Mapping[int, Sequence[float]] | None = None
) -> Compiled:
    """What a compiled step says of its memory and its collectives.

    Args:
        program: the step.
        mesh: axis to size.
        seconds: how long it took to compile.
        shares: how often branches are taken, see `compiled_collectives`.
    """
    found = compiled_collectives(program.text, mesh, shares)
    moved = tuple(
        Collective(one.kind, "+".join(one.axes), one.source or one.shape, one.count, one.count * one.bytes, one.devices)
        for one in found
    )
    kernels = compiled_kernels(program.text)
    return Compiled(
        memory=program.memory,
        collectives=moved,
        seconds=seconds,
        overlapped=_overlapped(found) if program.is_ordered else None,
        host=program.host,
        attention=kernels.attention,
        launches=kernels.launches,
        largest=kernels.largest,
        target=None,
        too_large=None,
    )


def _platform(compiled: jax.stages.Compiled) -> str:
    devices = jax.tree.leaves(compiled.output_shardings)[0].device_set
    return str(next(iter(devices)).platform)


def _bytes_at_worst(analysis: Any, platform: str) -> int:
    """Of a device's memory. A TPU's compiler has two figures that are both too large, and the smaller one counts.

    Temporaries are a sum of arrays of which some take the place of others: Llama-3.1-8B, 24 rows of 8,192 tokens over
    8 v6e, has 38.4 GiB with its arguments in a program that the compiler accepts for 31.25 GiB. The peak counts the
    memory inside of the cores too, 128 MiB: it is the larger one of small programs.
    """
    together = int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes)
    if platform == "tpu" and analysis.peak_memory_in_bytes:
        return min(int(analysis.peak_memory_in_bytes), together)
    return together


def _overlapped(found: Sequence[CompiledCollective]) -> float | None:
    """The share of bytes that are sent while something is computed; None where none move."""
    every = sum(one.sent for one in found)
    return sum(one.sent for one in found if one.overlapped) / every if every else None


def _placed(state: TrainState, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, places
    )


def _batch(way: Way, mesh: Mesh) -> Any:
    """A global batch: [micro-batches, examples, ...]."""
    passes = way.workload.passes(way.micro_batch_size)
    sharding, batch = batch_sharding(mesh, dim=1), way.workload.batch(way.micro_batch_size)
    if way.workload.privacy is not None:
        batch = {**batch, PADDING: jax.ShapeDtypeStruct((way.micro_batch_size,), jnp.bool)}
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((passes, *leaf.shape), jnp.dtype(leaf.dtype), sharding=sharding), batch
    )
