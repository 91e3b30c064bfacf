"""The ways a workload can run on a mesh: micro-batches and what is gathered again, each with its memory and its time.

Time is a roofline, to rank ways and not to promise anything: on n devices, with the matrix products of the traced loss
and its gradient, recomputed ones among them,

    seconds = max(products / (n · FLOPS), bytes to the host and back / their link)
              + Σ bytes sent in rings / their link  +  transfers between activations · WAIT

Axes are laid out with `tensor` innermost, so that it stays within a host; an axis whose devices stand in several hosts
moves its bytes over the slow link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from redco_cli.placement import read_program
from redco_cli.planning.devices import WAIT, Devices
from redco_cli.planning.workload import Workload
from redco_cli.plugin.state import Variables
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.sharding.decide.follow import bytes_per_device, follow
from redco_cli.sharding.derive import make_plan
from redco_cli.sharding.plan import AXES, BATCH_AXES, DATA, FSDP, Collective, Plan
from redco_cli.sharding.predict.collectives import PER_PASS, in_a_step
from redco_cli.sharding.predict.memory import StepConfig, StepMemory, TracedLoss, estimate
from redco_cli.sharding.program.flops import Products
from redco_cli.sharding.program.reading import Reading
from redco_cli.sharding.rings import sent_bytes
from redco_cli.training.state import merge, partition


@dataclass(frozen=True)
class Option:
    """One way to run a workload.

    Attributes:
        workload: with the loss that recomputes, if this way does.
        plan: where parameters live, and what a step moves.
        micro_batch_size: examples that go through the model at once, on all devices together.
        reshard_after_forward: gathered parameters are gathered again in the backward pass.
        memory: of one device.
        slow: bytes that one device moves between hosts in a step.
        fast: bytes within its host.
        seconds: estimated.
        products: of a step, on all devices together, see `TracedLoss`.
        update_flops: of the optimizer's products on one device, in float32.
    """

    workload: Workload
    plan: Plan
    micro_batch_size: int
    reshard_after_forward: bool
    memory: StepMemory
    slow: int
    fast: int
    seconds: float
    products: Products
    update_flops: int = 0

    def fits(self, memory: int | None) -> bool:
        """Whether one device has room for it; True where its memory is not known."""
        return memory is None or self.memory.total <= memory


@dataclass(frozen=True)
class _Work:
    """What a step computes and moves, whatever memory it takes: see `Option`; times are in seconds."""

    collectives: tuple[Collective, ...]
    slow: int
    fast: int
    products: Products
    update_flops: int
    computing: float
    moving: float


class Planner:
    """Reads a workload once, and estimates it on any mesh."""

    def __init__(self, workload: Workload, devices: Devices, size: int) -> None:
        """Traces the loss, and its gradient.

        Args:
            workload: what runs.
            devices: on what.
            size: examples of the batch that is traced, a multiple of the devices that split it.
        """
        self.workload, self._devices, self._size = workload, devices, size
        batch = self._batch = workload.batch(size)
        key = jax.random.key(0)

        def loss(variables: Variables, arrays: Any) -> Any:
            return workload.loss(variables, arrays, key).sum

        self._loss = loss
        with batch_sharded(size) as shards:
            self.reading: Reading = read_program(loss, workload.abstract, batch)
        read = self.reading
        self._kept = sum(one.bytes for one in read.parameters) / sum(map(read.bytes_where_used, read.parameters))
        self._by_shards = shards.consulted
        self._programs: dict[int, TracedLoss] = {}
        self._trainable, self._frozen = partition(workload.abstract.params, workload.frozen)
        self._opt_state = jax.eval_shape(workload.optimizer.init, self._trainable)
        self._traced: dict[tuple[int, StepConfig], tuple[Plan, StepMemory]] = {}

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """The plan on a mesh.

        Raises:
            DeviceError, RecipeError: it cannot be split so.
        """
        one = self.workload
        return make_plan(self.reading, sizes, override=one.override, where=one.where, frozen=one.frozen)

    def option(self, plan: Plan, micro_batch_size: int, *, reshard_after_forward: bool) -> Option:
        """One way, with its figures."""
        passes, devices = self.workload.passes(micro_batch_size), self._devices
        config = StepConfig(
            micro_batches=min(passes, 2),
            reshard_after_forward=reshard_after_forward,
            cpu_backend=devices.eager,
            copies_state=devices.eager,
            tpu_backend=devices.tpu_backend,
            share=micro_batch_size / self._size,
        )
        memory = self._memory(plan, micro_batch_size, config)
        products = self._products(plan)
        work = self._work(plan, micro_batch_size, products, regathers=reshard_after_forward)
        computing = work.computing
        if memory.on_host and devices.host_link is not None:
            computing = max(computing, 2 * passes * memory.on_host / devices.host_link)
        plan = replace(plan, collectives=work.collectives)
        figures = memory, work.slow, work.fast, computing + work.moving, work.products, work.update_flops
        return Option(self.workload, plan, micro_batch_size, reshard_after_forward, *figures)

    def state(self, plan: Plan) -> int:
        """Bytes of parameters and optimizer state on one device: no way on a mesh needs less."""
        specs, _ = partition(plan.specs, self.workload.frozen)
        return plan.bytes_per_device + bytes_per_device(
            self._opt_state, follow(self._opt_state, self._trainable, specs), plan.mesh
        )

    def least_seconds(self, ways: Sequence[tuple[Plan, int]]) -> list[float]:
        """What a step takes at least on each mesh, with its largest micro-batch, which moves least.

        But for gradients over `data` that passes add up in fewer bytes than one makes: the seconds are of one pass.
        """
        if not ways:
            return []
        moving = [self._work(*way, Products(), regathers=False).moving for way in ways]
        likely, _ = ways[moving.index(min(moving))]
        products = self._products(likely)  # about those of the others, too
        works = [self._work(*way, products, regathers=False) for way in ways]
        return [work.computing + work.moving for work in works]

    def _work(self, plan: Plan, micro_batch_size: int, traced: Products, *, regathers: bool) -> _Work:
        """What a step computes and moves; `traced` are the products of the batch that is traced."""
        devices, passes = self._devices, self.workload.passes(micro_batch_size)
        scale = self.workload.global_batch_size / self._size
        specs, _ = partition(plan.specs, self.workload.frozen)
        update = self.workload.update_work(self._trainable, specs, plan.mesh)
        moved = in_a_step(plan.collectives, passes, scale, regathers=regathers, kept=self._kept) + update.collectives
        per_host = max(1, devices.count // devices.hosts)
        sent = [sent_bytes(one, plan.mesh) for one in moved]
        slow = sum(sent[i] for i, one in enumerate(moved) if _spans_hosts(one.axis, plan.mesh, per_host))
        fast = sum(sent) - slow
        products = replace(traced * scale, summed=passes * traced.summed)
        computing = products.flops / (devices.count * devices.flops(self.workload.dtype))
        computing += update.flops / devices.flops("float32")
        fast_link, slow_link = devices.links
        waits = sum(one.count for one in moved if one.what not in PER_PASS)
        moving = slow / slow_link + fast / fast_link + waits * WAIT
        return _Work(moved, slow, fast, products, update.flops, computing, moving)

    def _memory(self, plan: Plan, micro_batch_size: int, config: StepConfig) -> StepMemory:
        if (id(plan), config) not in self._traced:
            self._traced[id(plan), config] = plan, self._estimate(plan, config)
        traced = self._traced[id(plan), config][1]
        ways = plan.mesh[DATA] * plan.mesh[FSDP]
        batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._batch))
        state = self.workload.abstract.state
        still = plan.bytes_per_device - traced.parameters if self.workload.frozen else 0
        private = self.workload.privacy is not None  # a gradient for each example, over the devices that share a batch
        each = micro_batch_size // plan.mesh[DATA] * traced.gradients if private else 0
        rows = self.workload.passes(micro_batch_size) * micro_batch_size
        return replace(
            traced,
            parameters=traced.parameters + still,
            plugin_state=bytes_per_device(state, follow(state, self.workload.abstract.params, plan.specs), plan.mesh),
            activations=traced.activations + each,
            batch=int(batch * rows / self._size) // ways,
        )

    def _estimate(self, plan: Plan, config: StepConfig) -> StepMemory:
        specs, _ = partition(plan.specs, self.workload.frozen)
        used, rest_used = partition(plan.gathered, self.workload.frozen)
        over_batch = jax.tree.map(lambda _: jax.sharding.PartitionSpec(BATCH_AXES), self._batch)
        program = self._program(plan)
        given = self.workload.abstract
        rest = (over_batch, rest_used, follow((given.state, given.step), given.params, plan.gathered))
        return estimate(program, self._opt_state, plan.mesh, specs, used, config, batch_specs=rest)

    def _groups(self, plan: Plan) -> int:
        """Into how many groups of examples its loss cuts a batch to sum each apart."""
        return plan.mesh[DATA] * plan.mesh[FSDP] if self._by_shards else 1

    def _products(self, plan: Plan) -> Products:
        """Of the batch that is traced."""
        groups, traced = self._groups(plan), self._program(plan).products
        return replace(traced, summed=traced.summed * groups // _fewest(groups))

    def _program(self, plan: Plan) -> TracedLoss:
        """The gradient, but of fewer groups, whose sums are split over devices as those of one for each device are.

        Tracing anew for each number of devices would take most of the time of a search.
        """
        groups = _fewest(self._groups(plan))
        if groups not in self._programs:
            with batch_sharded(groups):
                self._programs[groups] = TracedLoss(
                    lambda some, rest: self._loss(Variables(merge(some, rest[1]), *rest[2]), rest[0]),
                    self._trainable,
                    (self._batch, self._frozen, (self.workload.abstract.state, self.workload.abstract.step)),
                )
        return self._programs[groups]


def _fewest(groups: int) -> int:
    """The smallest number but one that divides it: as many can be split over as many devices.

    Example:
        >>> [_fewest(groups) for groups in (1, 2, 64, 15)]
        [1, 2, 2, 3]
    """
    return next((prime for prime in range(2, math.isqrt(groups) + 1) if groups % prime == 0), groups)


def _spans_hosts(axes: str, mesh: Mapping[str, int], per_host: int) -> bool:
    """Whether devices along one of the axes stand in several hosts."""
    inner = 1
    for axis in reversed(AXES):
        if axis in axes.split("+") and mesh[axis] > 1 and inner * mesh[axis] > per_host:
            return True
        inner *= mesh[axis]
    return False
