"""The best ways to run a workload: what fits, by its estimated time; then the rest, by its memory.

Branch and bound: what a mesh cannot be below is known from its plan, before memory is estimated from the gradient of
the loss. Meshes are taken in the order of these bounds, and left out where as many others as are wanted rank before
theirs. Where the state fits on no mesh, nothing will: only the ways that recompute most are estimated, which need
least.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from redco_cli.errors import DeviceError, ModelError
from redco_cli.models.decoder.block import Remat
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option, Planner
from redco_cli.planning.workload import Workload
from redco_cli.runtime.collector import collected_rarely
from redco_cli.sharding.plan import AXES, DATA, FSDP, TENSOR, Plan

_LESS_AND_LESS: tuple[tuple[Remat, ...], ...] = (("dots",), ("attention",), ("full", "offload"))
"""What may be recomputed where memory is short: the later, the less of it is kept."""


@dataclass(frozen=True)
class _Possible:
    """The meshes that a workload can run on.

    Attributes:
        planner: of the workload.
        plans: of each mesh, with the micro-batches that split it evenly, the largest first.
        states: bytes of parameters and optimizer state on one device of each, below which none is.
    """

    planner: Planner
    plans: list[tuple[Plan, list[int]]]
    states: list[int]

    def with_room(self, devices: Devices) -> list[bool]:
        """Whether the state alone fits, on each."""
        return [devices.memory is None or state <= devices.memory for state in self.states]

    def bounds(self, devices: Devices) -> list[tuple[bool, float]]:
        """What no way on each ranks before."""
        rooms = self.with_room(devices)
        roomy = [(plan, sizes[0]) for (plan, sizes), room in zip(self.plans, rooms, strict=True) if room]
        seconds = iter(self.planner.least_seconds(roomy))
        return [
            (False, next(seconds)) if room else (True, float(state))
            for room, state in zip(rooms, self.states, strict=True)
        ]


@collected_rarely()
def options(
    workload: Workload, devices: Devices, sizes: Mapping[str, int] | None = None, *, wanted: int | None = None
) -> tuple[list[Option], list[str]]:
    """Ways to run a workload, the best first.

    Args:
        workload: what runs; what it leaves open is chosen.
        devices: on what.
        sizes: of the mesh, where it is decided.
        wanted: how many of the best are; default: all ways are estimated.

    Returns:
        The ways, `wanted` of them at least where there are so many, and what keeps other meshes out.

    Raises:
        DeviceError: no mesh is possible.
    """
    given = sizes if sizes is not None else workload.mesh
    candidates = [dict(given)] if given is not None else list(meshes(devices))
    possible, refused = _possible(workload, devices, candidates)
    if not possible.plans:
        problem = f"no mesh of {devices.count} devices is possible: {refused[0]}"
        raise DeviceError(workload.where("mesh"), problem, "take another number of devices, or another batch")
    levels = () if workload.recomputing is None or devices.memory is None else _LESS_AND_LESS
    hopeless = wanted is not None and not any(possible.with_room(devices))
    found = [] if hopeless and levels else _best_of(possible, devices, (), wanted)
    for recomputed in levels[-1:] if hopeless else levels:
        if found and _is_plain(min(found, key=lambda option: _rank(option, devices.memory)), devices):
            break
        for remat in recomputed:
            found += _recomputing(workload, devices, candidates, remat, found, wanted)
    found = found or _best_of(possible, devices, (), wanted)  # this model cannot recompute
    return sorted(found, key=lambda option: _rank(option, devices.memory)), refused


def meshes(devices: Devices) -> Iterator[dict[str, int]]:
    """Every mesh over all devices whose tensor axis stays within a host."""
    per_host = max(1, devices.count // devices.hosts)
    for tensor in _divisors(devices.count):
        if tensor <= per_host and per_host % tensor == 0:
            for fsdp in _divisors(devices.count // tensor):
                yield dict(zip(AXES, (devices.count // tensor // fsdp, fsdp, tensor), strict=True))


def _recomputing(
    workload: Workload,
    devices: Devices,
    candidates: Sequence[Mapping[str, int]],
    remat: Remat,
    others: Sequence[Option],
    wanted: int | None,
) -> list[Option]:
    """The same where some of what a model can recompute is recomputed."""
    assert workload.recomputing is not None
    if remat != "offload" or devices.host_link is not None:
        with contextlib.suppress(ModelError):  # many classes of transformers cannot recompute
            possible, _ = _possible(workload.recomputing(remat), devices, candidates)
            return _best_of(possible, devices, others, wanted)
    return []


def _possible(
    workload: Workload, devices: Devices, candidates: Sequence[Mapping[str, int]]
) -> tuple[_Possible, list[str]]:
    """The meshes that are, and what keeps the others out."""
    planner = Planner(workload, devices, workload.micro_batch_size or workload.global_batch_size)
    plans: list[tuple[Plan, list[int]]] = []
    refused: list[str] = []
    for sizes in candidates:
        try:
            micro_batches = _micro_batches(workload, sizes)
            plans.append((planner.plan(sizes), micro_batches))
        except DeviceError as error:
            if len(candidates) == 1:
                raise
            refused.append(str(error.problems[0].problem))
    return _Possible(planner, plans, [planner.state(plan) for plan, _ in plans]), refused


def _best_of(possible: _Possible, devices: Devices, others: Sequence[Option], wanted: int | None) -> list[Option]:
    """The best way on each mesh that may be among those that are `wanted`, `others` being known already."""
    plans = possible.plans
    bounds = [(False, 0.0)] * len(plans) if wanted is None else possible.bounds(devices)
    found: dict[int, Option] = {}
    for place in sorted(range(len(plans)), key=lambda place: bounds[place]):
        ranks = sorted(_rank(option, devices.memory) for option in (*others, *found.values()))
        if wanted is not None and len(ranks) >= wanted and bounds[place] > ranks[wanted - 1]:
            break
        found[place] = _best(possible.planner, *plans[place], devices.memory)
    return [found[place] for place in sorted(found)]


def _micro_batches(workload: Workload, sizes: Mapping[str, int]) -> list[int]:
    """Sizes that split evenly over a mesh, the largest first."""
    ways = sizes[DATA] * sizes[FSDP]
    micro = [workload.micro_batch_size] if workload.micro_batch_size else _divisors(workload.global_batch_size)
    possible = [size for size in reversed(micro) if size % ways == 0]
    if not possible:
        problem = f"a batch of {max(micro)} examples cannot be split evenly over {ways} devices"
        raise DeviceError(workload.where("train.global_batch_size"), problem, f"take a multiple of {ways}")
    return possible


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


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
