"""Bytes on one device in a train step, predicted from the traced program. Nothing is compiled.

A step holds parameters, optimizer state and the batch for its whole length: its arguments. The new parameters and state
take the place of the old ones (donation). All else is temporary: gradients, parameters gathered or cast for use, copies
of state, and activations. At the worst moment

    total = parameters + optimizer + plugin_state + batch + temporary
    temporary = gradients + gathered + copies + activations + logits

Gradients count whole, though at the worst moment some may not be there yet: `activations` is what is left for the rest.
`compiled_memory` cuts the figures of a compiled step in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from redco_cli.sharding.decide.follow import bytes_per_device, follow
from redco_cli.sharding.plan import BATCH_AXES, DATA, FSDP, as_dims
from redco_cli.sharding.predict.flat import flatten
from redco_cli.sharding.predict.liveness import timeline
from redco_cli.sharding.predict.operations import FlatProgram
from redco_cli.sharding.predict.peak import (
    Bytes,
    add_casts,
    add_gathered,
    add_gradients,
    bytes_over_time,
    layer_bytes,
    live_arrays,
    worst,
)
from redco_cli.sharding.predict.propagate import propagate
from redco_cli.sharding.predict.scattered import as_scattered
from redco_cli.sharding.predict.splits import host_bytes, of_examples, shard_bytes
from redco_cli.sharding.predict.timelines import Integers, Timeline
from redco_cli.sharding.program.flops import products_of

_LARGEST = 12


@dataclass(frozen=True)
class Array:
    """An array in memory.

    Attributes:
        bytes: on one device.
        shape: of the whole array.
        dtype: such as `float32`.
        made_by: the primitive that wrote it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device at the worst moment of a train step.

    Attributes:
        parameters: where they live.
        gradients: of all of them, where they live.
        optimizer: its state.
        activations: kept for the backward pass or on the way, apart from logits.
        logits: the last product of the forward pass and what the loss computes from it.
        batch: all micro-batches.
        gathered: parameters put together, or cast, where they are used.
        copies: of the optimizer state, where the backend makes them before it writes the new one.
        saved: activations and logits when the last product of the forward pass is done.
        largest: the largest arrays at the worst moment, largest first; without those inside a loop.
        plugin_state: arrays that are neither parameters nor the optimizer's.
        on_host: what waits in the host's memory for the backward pass; no part of the total.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    batch: int
    gathered: int
    copies: int
    saved: int
    largest: tuple[Array, ...]
    plugin_state: int = 0
    on_host: int = 0

    @property
    def temporary(self) -> int:
        """What a compiler calls so: everything but the arguments."""
        return self.gradients + self.gathered + self.copies + self.activations + self.logits

    @property
    def total(self) -> int:
        """Everything."""
        return self.parameters + self.optimizer + self.plugin_state + self.batch + self.temporary


@dataclass(frozen=True)
class StepConfig:
    """How a step runs.

    Attributes:
        micro_batches: into how many a batch is cut; their gradients are added up.
        reshard_after_forward: parameters that were gathered for the forward pass are gathered again for the backward.
        cpu_backend: as XLA compiles for a CPU: everything is computed as soon as it can be, products in float32, and
            sums over devices are taken together. Otherwise in the order of the program, each sum on its own.
        copies_state: the update reads old state after the new one was begun, so that XLA copies it for a CPU.
        tpu_backend: as XLA compiles for a TPU: products compute elementwise operands, and memory is in tiles.
        share: of the examples that were traced, those that go through at once.
    """

    micro_batches: int = 1
    reshard_after_forward: bool = False
    cpu_backend: bool = True
    copies_state: bool = True
    tpu_backend: bool = False
    share: float = 1.0


class TracedLoss:
    """A loss and its gradient, traced once, to be estimated on many meshes.

    Attributes:
        params: abstract.
        order: places of the parameters' leaves in the order in which the traced program takes them: trained ones first.
        leaves: the parameters in that order.
        trained: how many of them are trained.
        products: of both, over the whole batch, with what is recomputed; of fused attention the forward part alone.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any, frozen: Any = None) -> None:
        """Traces.

        Args:
            loss_fn: `loss_fn(params, batch)`, a scalar.
            params: abstract or arrays.
            batch: abstract or arrays, one micro-batch over all devices.
            frozen: like the parameters, whether each is left as it is; default: none is.
        """
        self.params = params
        leaves, tree = jax.tree.flatten(params)
        kept = [False] * len(leaves) if frozen is None else jax.tree.leaves(frozen)
        self.order = sorted(range(len(leaves)), key=lambda place: kept[place])
        self.trained = kept.count(False)

        def loss(trained: list[Any], others: list[Any], batch: Any) -> Any:
            given = dict(zip(self.order, [*trained, *others], strict=True))
            return loss_fn(jax.tree.unflatten(tree, [given[place] for place in range(len(leaves))]), batch)

        self.leaves = [leaves[place] for place in self.order]
        arguments = self.leaves[: self.trained], self.leaves[self.trained :], batch
        self._jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(*arguments)
        self.products = products_of(self._jaxpr)
        self._timelines: dict[tuple[bool, ...], tuple[FlatProgram, Timeline]] = {}

    def flat_and_timeline(self, partitioned: bool, scatters: bool, config: StepConfig) -> tuple[FlatProgram, Timeline]:
        """Its operations, and when its arrays exist; see `flatten` and `timeline`."""
        how = {"cpu_backend": config.cpu_backend, "tpu_backend": config.tpu_backend}
        key = partitioned, scatters, *how.values()
        if key not in self._timelines:
            flat = flatten(self._jaxpr, partitioned=partitioned, upcast=config.cpu_backend, scatters=scatters)
            self._timelines[key] = flat, timeline(flat, flat.inputs[: len(self.order)], **how)
        return self._timelines[key]


def estimate(
    traced: TracedLoss,
    opt_state: Any,
    mesh: Mapping[str, int],
    specs: Any,
    gathered: Any,
    config: StepConfig,
    *,
    batch_specs: Any = None,
) -> StepMemory:
    """Predicts the memory of a train step on one device.

    Args:
        traced: the loss over a micro-batch, or more of them.
        opt_state: of any optax transformation over the trained parameters, abstract.
        mesh: sizes of the axes `data`, `fsdp` and `tensor`.
        specs: like the parameters, a `PartitionSpec` each: where it lives.
        gathered: the same: where it is used.
        config: how the step runs.
        batch_specs: like the batch; default: the leading dim of every array over `data` and `fsdp`.
    """
    repeated, on_tpu = config.micro_batches > 1, config.tpu_backend
    partitioned, scatters = repeated or math.prod(mesh.values()) > 1, on_tpu and mesh[FSDP] > 1
    flat, line = traced.flat_and_timeline(partitioned, scatters, config)
    lives, used = ([_specs(tree)[place] for place in traced.order] for tree in (specs, gathered))
    given = flat.inputs[len(used) :]
    over_batch = [PartitionSpec(BATCH_AXES)] * len(given) if batch_specs is None else _specs(batch_specs)
    splits = propagate(flat, [*used, *over_batch])
    local = _bytes_each(traced.leaves, lives, mesh)
    sizes = as_scattered(flat, shard_bytes(flat, splits, mesh, tiled=on_tpu), local)
    sizes[of_examples(flat, splits)] *= config.share
    trained, own = local[: traced.trained], sizes[line.arrays]
    _keep_in_shards(flat, line, own, used, local, config)
    before, summed = own.copy(), config.cpu_backend and mesh[DATA] * mesh[FSDP] > 1
    at_once = repeated or mesh[FSDP] == 1
    gradients = add_gradients(line, own, trained, added=repeated, summed=summed, at_once=at_once, late=on_tpu)
    layered = [places[0] for places in line.outputs[1:] if places and line.made_by[places[0]] == "scan"]
    moved = {x: float(sizes[x]) for x, a, b in zip(flat.inputs, lives, used, strict=False) if a != b}
    layers = layer_bytes(line, sizes, flat.arrays.itemsizes, moved) if on_tpu else {}
    found = bytes_over_time(line, sizes, own, layered if summed else (), layers)
    _add_weights(found.weights, flat, line, moved, local, config)
    state = _bytes_each(jax.tree.leaves(opt_state), _specs(follow(opt_state, traced.params, specs)), mesh)
    copies = sorted(state, reverse=True) if config.copies_state and config.cpu_backend else []
    waiting = gradients.waiting if at_once else ()
    time, temporary = worst(line, found.total + gradients.bytes, own, before, waiting, copies)
    rest, now = max(temporary - sum(trained), 0.0), live_arrays(line, time)
    weights = min(float(found.weights[time]), rest)
    logits = min(float(own[now][_is_of_loss(line)[now]].sum()), rest - weights)
    return StepMemory(
        parameters=sum(local),
        gradients=sum(trained),
        optimizer=sum(state),
        activations=round(rest - weights - logits),
        logits=round(logits),
        batch=config.micro_batches * int(sizes[list(given)].sum()),
        gathered=round(weights),
        copies=sum(copies),
        saved=int(found.activations[line.loss[0]]),
        largest=_largest(flat, line, own, now),
        on_host=int(config.share * host_bytes(flat, splits, mesh)),
    )


def _keep_in_shards(
    flat: FlatProgram,
    line: Timeline,
    own: Bytes,
    used: Sequence[PartitionSpec],
    local: Sequence[int],
    config: StepConfig,
) -> None:
    """Corrects the bytes of what is never whole on a device, or only while it is used.

    The first are gradients of tables whose rows move, the second casts of parameters that are gathered once more where
    they are read.
    """
    for places, spec, size in zip(line.outputs[1:], used, local, strict=False):
        if places and any(FSDP in axes for axes in as_dims(spec)):
            own[places[0]] = min(own[places[0]], size)
    shards, sizes = dict(zip(flat.inputs, local, strict=False)), flat.arrays.itemsizes
    for place, (parameter, rematerialized) in line.casts.items():
        if rematerialized or config.reshard_after_forward:
            cast = shards[parameter] // sizes[parameter] * sizes[int(line.arrays[place])]
            own[place] = min(own[place], cast)


def _add_weights(
    weights: Bytes,
    flat: FlatProgram,
    line: Timeline,
    moved: Mapping[int, float],
    local: Sequence[int],
    config: StepConfig,
) -> None:
    """Adds what is made of parameters for their use; `moved` are the bytes of those that are gathered, by input."""
    repeated = config.micro_batches > 1
    add_gathered(weights, line, moved, config.cpu_backend, config.reshard_after_forward, repeated)
    if config.tpu_backend:
        add_casts(weights, line, dict(zip(flat.inputs, local, strict=False)), flat.arrays.itemsizes, repeated=repeated)


def _bytes_each(leaves: Sequence[Any], specs: Sequence[PartitionSpec], mesh: Mapping[str, int]) -> list[int]:
    """What one device holds of each of some arrays."""
    return [bytes_per_device(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]


def _is_of_loss(line: Timeline) -> NDArray[np.bool_]:
    """Which arrays the loss itself is computed from, and its first gradients."""
    first, last = line.loss
    inside: NDArray[np.bool_] = (line.births >= first) & (line.births <= last) & (first >= 0)
    return inside


def _largest(flat: FlatProgram, line: Timeline, own: Bytes, now: Integers) -> tuple[Array, ...]:
    arrays = flat.arrays
    chosen = [(int(own[index]), int(line.arrays[index]), line.made_by[index]) for index in now[np.argsort(-own[now])]]
    return tuple(
        Array(size, arrays.shapes[array], arrays.dtypes[array], made_by) for size, array, made_by in chosen[:_LARGEST]
    )


def _specs(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
