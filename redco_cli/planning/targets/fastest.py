"""The fastest of some ways to run a workload: by their plans, and with `planning: compile` by their compiled programs.

In: a workload and devices whose speeds are known. Out: the best few ways, in the order of the step times that are
printed of them; or the same ways, those that were compiled in front, by the time that a walk over their programs comes
to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from redco_cli.chips.speeds import SPEEDS
from redco_cli.chips.target import Target, chip_of
from redco_cli.console import note
from redco_cli.console.numbers import format_bytes
from redco_cli.console.plan import mesh_text
from redco_cli.console.waiting import waiting
from redco_cli.errors import DeviceError
from redco_cli.planning.compiled import lower_step, way_of
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.planning.search.ways import options
from redco_cli.planning.targets.child import compile_lowered
from redco_cli.planning.targets.compile import as_compiled, compile_for
from redco_cli.planning.targets.deviceless import places_of
from redco_cli.planning.targets.seconds import step_time
from redco_cli.planning.targets.speed import Forward, fastest_first, forward_of
from redco_cli.planning.workload import Workload
from redco_cli.runtime.mesh import make_mesh
from redco_cli.runtime.peers.multihost import process_allgather
from redco_cli.sharding.compiled.events import Event

CANDIDATES, CONSIDERED = 3, 6
"""Of ways that are compiled, and of those whose steps are timed by their plans."""
Outcome = tuple[Compiled, tuple[Event, ...] | None]
"""What the compiler says of a step, and what happens in its program; None where it does not fit."""


@dataclass(frozen=True)
class Tried:
    """A way that was compiled.

    Attributes:
        option: the way; its seconds are those of its program.
        outcome: what the compiler made of it.
    """

    option: Option
    outcome: Outcome


def best_ways(
    workload: Workload, machine: Devices, sizes: Mapping[str, int] | None, target: Target | None
) -> tuple[list[Option], Forward | None]:
    """The best few ways by plan, the fastest first, and what a forward pass takes; None without a target.

    Args:
        workload: what runs.
        machine: on what.
        sizes: of the mesh, where it is decided.
        target: the same devices where their speeds are known: ways that fit are in the order of `planned_speed` then,
            which is finer than the estimate that they are found by.

    Raises:
        DeviceError: no mesh is possible.
    """
    ways, _ = options(workload, machine, sizes, wanted=CONSIDERED)
    if target is None:
        return ways, None
    forward = forward_of(workload)
    return fastest_first(ways, target, forward, machine.memory), forward


def try_out(
    ways: Sequence[Option], compile_one: Callable[[Option], Outcome], target: Target, memory: int | None
) -> list[Tried]:
    """The ways that fit when they are compiled, the fastest first.

    Args:
        ways: the best by plan first; those that fit by plan are compiled, up to `CANDIDATES` of them.
        compile_one: compiles a way for the target.
        target: the devices.
        memory: bytes of one of them; None where that is not known.

    Raises:
        DeviceError: some fit by plan, but none when it is compiled.
    """
    found, chosen = list[Tried](), [way for way in ways if way.fits(memory)][:CANDIDATES]
    for number, way in enumerate(chosen, start=1):
        compiled, events = compile_one(way)
        what = f"compiled {number} of {len(chosen)}, {described(way)}"
        needed = "more memory than there is" if compiled.memory is None else format_bytes(compiled.memory)
        if events is None or (memory is not None and (compiled.memory or 0) > memory):
            note(f"{what}: does not fit, it needs {needed}")
            continue
        seconds = step_time(events, target).typical
        note(f"{what}: {seconds:.4g} s a step by its program, {way.seconds:.4g} s by plan")
        found.append(Tried(replace(way, seconds=seconds), (compiled, events)))
    if chosen and not found:
        problem = f"of the ways that fit by plan {len(chosen)} were compiled, and none fits on {target}"
        remedy = "lower train.micro_batch_size, set train.remat: full, or give a mesh"
        raise DeviceError(ways[0].workload.where("planning"), problem, remedy)
    return sorted(found, key=lambda one: one.option.seconds)


def try_for(target: Target | None, ways: Sequence[Option], asked: Mapping[str, Any], memory: int | None) -> list[Tried]:
    """The same for devices that need not be there.

    Args:
        target: the devices.
        ways: see `try_out`.
        asked: the arguments of `find_workload` that the ways come from.
        memory: see `try_out`.

    Raises:
        DeviceError: there is no target, by whose speeds programs could be compared; JAX cannot compile for it here; or
            see `try_out`.
    """
    if target is None:
        problem = "compile compares step times, and without a --target no devices are named whose speeds are known"
        raise DeviceError(ways[0].workload.where("planning"), problem, "add such as --target h100:8")
    return try_out(ways, lambda way: compile_for(target, way, asked), target, memory)


def in_front(tried: Sequence[Tried], ways: Sequence[Option]) -> list[Option]:
    """All ways: first those that were compiled and fit, then the others by plan.

    Args:
        tried: the fastest first.
        ways: the best by plan first.
    """
    plans = {(id(one.option.plan), one.option.micro_batch_size) for one in tried}
    return [one.option for one in tried] + [way for way in ways if (id(way.plan), way.micro_batch_size) not in plans]


def fastest_here(ways: Sequence[Option], memory: int) -> Option:
    """The fastest way on the devices of all processes, by the programs that their own compiler makes.

    Args:
        ways: the best by plan first.
        memory: bytes of one device.

    Raises:
        DeviceError: none fits, or no speeds of these devices are known.
    """
    target = own_target(ways[0].workload.where)

    def compile_one(option: Option) -> Outcome:
        workload, sizes = option.workload, option.plan.mesh
        mesh = make_mesh(sizes, workload.where)
        with waiting() as tell:
            tell(f"compiling the step for {described(option)}")
            lowered = lower_step(way_of(option), mesh)
            made = compile_lowered(lowered, sizes, workload.xla, places_of(target, mesh), workload.where)
        return as_compiled(made, target)

    tried = try_out(ways, compile_one, target, memory)
    if not tried:
        return ways[0]
    names = process_allgather("the fastest way", [described(one.option) for one in tried])
    return next(one.option for one in tried if described(one.option) == names[0][0])


def own_target(where: Callable[[str], str]) -> Target:
    """The devices of all processes, as one names devices that are not there.

    Args:
        where: dotted recipe key to its place.

    Raises:
        DeviceError: no speeds of them are known, as of CPUs.
    """
    target = target_here()
    if target is None:
        problem = f"compile compares step times, and the speed of {jax.devices()[0].device_kind!r} devices is not known"
        remedy = "take planning: estimate here; for other devices there is redco inspect-sharding --target h100:8"
        raise DeviceError(where("planning"), problem, remedy)
    return target


def target_here() -> Target | None:
    """The devices of all processes; None where no speeds of them are known."""
    found = jax.devices()
    chip = chip_of(found[0].device_kind)
    if chip is None or chip.name not in SPEEDS:
        return None
    slices = {getattr(one, "slice_index", 0) or 0 for one in found}
    groups = len(slices) if chip.torus else jax.process_count()
    return Target(chip, groups, (len(found) // groups // chip.of_a_chip,))


def described(option: Option) -> str:
    """A way in a few words.

    Args:
        option: the way.
    """
    again = ", gathering again" if option.reshard_after_forward else ""
    remat = option.workload.remat
    return f"mesh {mesh_text(option.plan.mesh)}, micro-batch {option.micro_batch_size}, remat {remat}{again}"
