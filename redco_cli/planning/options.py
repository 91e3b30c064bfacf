"""The ways a workload can run on some devices: meshes, remat and micro-batches, each with its memory and its time.

Time is a roofline, to rank ways and not to promise anything: on n devices, with the matrix products of the traced loss
and its gradient, recomputed ones among them,

    seconds = max(products / (n · FLOPS), bytes to the host and back / their link)
              + Σ bytes sent in rings / their link  +  transfers between activations · WAIT

Axes are laid out with `tensor` innermost, so that it stays within a host; an axis whose devices stand in several hosts
moves its bytes over the slow link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from redco_cli.errors import DeviceError, ModelError
from redco_cli.models.decoder.block import Remat
from redco_cli.placement import read_program
from redco_cli.planning.devices import WAIT, Devices
from redco_cli.planning.workload import Workload
from redco_cli.plugin.state import Variables
from redco_cli.runtime.collector import collected_rarely
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.sharding.decide.follow import bytes_per_device, follow
from redco_cli.sharding.derive import make_plan
from redco_cli.sharding.plan import AXES, BATCH_AXES, DATA, FSDP, TENSOR, Plan
from redco_cli.sharding.predict.collectives import PER_PASS, in_a_step
from redco_cli.sharding.predict.memory import StepConfig, StepMemory, TracedLoss, estimate
from redco_cli.sharding.program.flops import Products
from redco_cli.sharding.program.reading import Reading
from redco_cli.sharding.rings import sent_bytes
from redco_cli.training.state import merge, partition

_LESS_AND_LESS: tuple[tuple[Remat, ...], ...] = (("dots",), ("attention",), ("full", "offload"))
"""What may be recomputed where memory is short: the later, the less of it is kept."""


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
        passes = self.workload.passes(micro_batch_size)
        eager, tpu = self._devices.eager, self._devices.tpu_backend
        how = {"reshard_after_forward": reshard_after_forward, "copies_state": eager, "tpu_backend": tpu}
        config = StepConfig(min(passes, 2), cpu_backend=eager, **how)
        memory = self._memory(plan, micro_batch_size, config)
        scale = self.workload.global_batch_size / self._size
        specs, _ = partition(plan.specs, self.workload.frozen)
        update = self.workload.update_work(self._trainable, specs, plan.mesh)
        moved = in_a_step(plan.collectives, passes, scale, regathers=reshard_after_forward, kept=self._kept)
        moved += update.collectives
        per_host = max(1, self._devices.count // self._devices.hosts)
        sent = [sent_bytes(one, plan.mesh) for one in moved]
        slow = sum(sent[i] for i, one in enumerate(moved) if _spans_hosts(one.axis, plan.mesh, per_host))
        fast = sum(sent) - slow
        traced = self._program(plan.mesh[DATA] * plan.mesh[FSDP]).products
        products = replace(traced * scale, summed=passes * traced.summed)
        seconds = products.flops / (self._devices.count * self._devices.flops(self.workload.dtype))
        seconds += update.flops / self._devices.flops("float32")
        if memory.on_host and self._devices.host_link is not None:
            seconds = max(seconds, 2 * passes * memory.on_host / self._devices.host_link)
        fast_link, slow_link = self._devices.links
        waits = sum(one.count for one in moved if one.what not in PER_PASS)
        seconds += slow / slow_link + fast / fast_link + waits * WAIT
        plan = replace(plan, collectives=moved)
        figures = memory, slow, fast, seconds, products, update.flops
        return Option(self.workload, plan, micro_batch_size, reshard_after_forward, *figures)

    def _memory(self, plan: Plan, micro_batch_size: int, config: StepConfig) -> StepMemory:
        if (id(plan), config) not in self._traced:
            self._traced[id(plan), config] = plan, self._estimate(plan, config)
        traced = self._traced[id(plan), config][1]
        scale = micro_batch_size / self._size
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
            activations=int(traced.activations * scale) + each,
            logits=int(traced.logits * scale),
            on_host=int(traced.on_host * scale),
            batch=int(batch * rows / self._size) // ways,
        )

    def _estimate(self, plan: Plan, config: StepConfig) -> StepMemory:
        """Of the batch that is traced; the same for every size of a micro-batch."""
        specs, _ = partition(plan.specs, self.workload.frozen)
        used, rest_used = partition(plan.gathered, self.workload.frozen)
        over_batch = jax.tree.map(lambda _: jax.sharding.PartitionSpec(BATCH_AXES), self._batch)
        program = self._program(plan.mesh[DATA] * plan.mesh[FSDP])
        given = self.workload.abstract
        rest = (over_batch, rest_used, follow((given.state, given.step), given.params, plan.gathered))
        return estimate(program, self._opt_state, plan.mesh, specs, used, config, batch_specs=rest)

    def _program(self, ways: int) -> TracedLoss:
        """The gradient of a batch that is split over so many devices."""
        key = ways if self._by_shards else 1
        if key not in self._programs:
            with batch_sharded(key):
                self._programs[key] = TracedLoss(
                    lambda some, rest: self._loss(Variables(merge(some, rest[1]), *rest[2]), rest[0]),
                    self._trainable,
                    (self._batch, self._frozen, (self.workload.abstract.state, self.workload.abstract.step)),
                )
        return self._programs[key]


def meshes(devices: Devices) -> Iterator[dict[str, int]]:
    """Every mesh over all devices whose tensor axis stays within a host."""
    per_host = max(1, devices.count // devices.hosts)
    for tensor in _divisors(devices.count):
        if tensor <= per_host and per_host % tensor == 0:
            for fsdp in _divisors(devices.count // tensor):
                yield dict(zip(AXES, (devices.count // tensor // fsdp, fsdp, tensor), strict=True))


@collected_rarely()
def options(
    workload: Workload, devices: Devices, sizes: Mapping[str, int] | None = None
) -> tuple[list[Option], list[str]]:
    """Ways to run a workload, the best first: what fits, by its estimated time; then the rest, by its memory.

    Args:
        workload: what runs; what it leaves open is chosen.
        devices: on what.
        sizes: of the mesh, where it is decided.

    Returns:
        The ways, and what keeps other meshes out.

    Raises:
        DeviceError: no mesh is possible.
    """
    given = sizes if sizes is not None else workload.mesh
    candidates = [dict(given)] if given is not None else list(meshes(devices))
    found, refused = _all(workload, devices, candidates)
    if not found:
        problem = f"no mesh of {devices.count} devices is possible: {refused[0]}"
        raise DeviceError(workload.where("mesh"), problem, "take another number of devices, or another batch")
    for recomputed in () if workload.recomputing is None or devices.memory is None else _LESS_AND_LESS:
        if _is_plain(min(found, key=lambda option: _rank(option, devices.memory)), devices):
            break
        found += _recomputing(workload, devices, candidates, recomputed)
    return sorted(found, key=lambda option: _rank(option, devices.memory)), refused


def _recomputing(
    workload: Workload, devices: Devices, candidates: Sequence[Mapping[str, int]], recomputed: Sequence[Remat]
) -> list[Option]:
    """The same where some of what a model can recompute is recomputed."""
    found: list[Option] = []
    assert workload.recomputing is not None
    for remat in recomputed:
        if remat != "offload" or devices.host_link is not None:
            with contextlib.suppress(ModelError):  # many classes of transformers cannot recompute
                found += _all(workload.recomputing(remat), devices, candidates)[0]
    return found


def _all(
    workload: Workload, devices: Devices, candidates: Sequence[Mapping[str, int]]
) -> tuple[list[Option], list[str]]:
    planner = Planner(workload, devices, workload.micro_batch_size or workload.global_batch_size)
    found: list[Option] = []
    refused: list[str] = []
    for sizes in candidates:
        ways = sizes[DATA] * sizes[FSDP]
        micro = [workload.micro_batch_size] if workload.micro_batch_size else _divisors(workload.global_batch_size)
        possible = [size for size in reversed(micro) if size % ways == 0]
        try:
            if not possible:
                problem = f"a batch of {max(micro)} examples cannot be split evenly over {ways} devices"
                raise DeviceError(workload.where("train.global_batch_size"), problem, f"take a multiple of {ways}")
            plan = planner.plan(sizes)
        except DeviceError as error:
            if len(candidates) == 1:
                raise
            refused.append(str(error.problems[0].problem))
            continue
        found.append(_best(planner, plan, possible, devices.memory))
    return found, refused


def _best(planner: Planner, plan: Plan, possible: Sequence[int], memory: int | None) -> Option:
    """The largest micro-batch that fits, gathering parameters again only where that is needed; else the smallest."""
    option = planner.option(plan, possible[0], reshard_after_forward=False)
    for size in possible:
        for reshard in (False, True) if plan.mesh[FSDP] > 1 else (False,):
            option = planner.option(plan, size, reshard_after_forward=reshard)
            if option.fits(memory):
                return option
    return option


def _rank(option: Option, memory: int | None) -> tuple[bool, float]:
    fits = option.fits(memory)
    return not fits, option.seconds if fits else float(option.memory.total)


def _is_plain(option: Option, devices: Devices) -> bool:
    """Nothing that recomputing could make better: it fits in one pass without splitting layers."""
    whole = option.micro_batch_size == option.workload.global_batch_size
    return option.fits(devices.memory) and whole and option.plan.mesh[TENSOR] == 1 and not option.reshard_after_forward


def _spans_hosts(axes: str, mesh: Mapping[str, int], per_host: int) -> bool:
    """Whether devices along one of the axes stand in several hosts."""
    inner = 1
    for axis in reversed(AXES):
        if axis in axes.split("+") and mesh[axis] > 1 and inner * mesh[axis] > per_host:
            return True
        inner *= mesh[axis]
    return False


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
