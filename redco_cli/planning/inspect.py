"""`redco inspect-sharding`: how a model would be split over devices that need not be there, and whether it fits."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax

from redco_cli.chips.target import Target, chip_of, parse_target, targeting
from redco_cli.console.numbers import format_bytes
from redco_cli.errors import DeviceError, UsageError
from redco_cli.planning.arguments import check_asked
from redco_cli.planning.choice import memory_of_a_device
from redco_cli.planning.compare import compare
from redco_cli.planning.compiled import compile_step
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option
from redco_cli.planning.picture.svg import write_picture
from redco_cli.planning.report import Choice, Memory, Report, as_json, build_report
from redco_cli.planning.search.remedies import does_fit, remedies_for
from redco_cli.planning.targets.compile import compile_for
from redco_cli.planning.targets.fastest import Outcome, best_ways, in_front, try_for
from redco_cli.planning.targets.speed import speed_of
from redco_cli.planning.workload import Workload, find_workload
from redco_cli.sharding.decide.follow import followers
from redco_cli.sharding.decide.guards import checked_sizes
from redco_cli.sharding.predict.memory import StepMemory

DEVICES_OF_A_HOST = 8
RUNNERS_UP = 3


def inspect(
    model: str,
    *,
    devices: int | None = None,
    hosts: int | None = None,
    mesh: Mapping[str, int] | None = None,
    mesh_given_by: str = "--mesh",
    device_memory: int | None = None,
    batch_size: int | None = None,
    seq_length: int | None = None,
    dtype: str | None = None,
    target: str | None = None,
    compile_it: bool | Literal["cycles"] = False,
    price: float | None = None,
) -> Report:
    """Plans a train step. Nothing is allocated, and no device is needed.

    Args:
        model: a recipe, a run, a directory with a model's config, the config itself, a preset, or a hub id.
        devices: how many; default: those of the mesh, or of this machine.
        hosts: how many; default: one for eight devices.
        mesh: sizes of the axes; default: the recipe's, or the best.
        mesh_given_by: what an error about it names.
        device_memory: bytes of one device; default: what the devices of this machine say.
        batch_size: examples in a step; default: the recipe's, or 64.
        seq_length: tokens in an example of a model.
        dtype: in which a model computes; default: bfloat16, over parameters in float32. A recipe has its own.
        target: devices that need not be there, such as `h100:8`; instead of `devices`, `hosts` and `device_memory`.
        compile_it: also compile the step; without a target, for simulated devices of a CPU. `cycles`: for a TPU to the
            end, and not up to the schedule, for the cycles that its compiler estimates.
        price: of a chip of the target for an hour.

    Raises:
        RedcoError: there is no such model, or the mesh does not fit it or the devices.
    """
    chips = None if target is None else parse_target(target, "--target")
    check_asked(price, chips, cycles=compile_it == "cycles")
    with targeting(chips):
        workload = find_workload(model, batch_size=batch_size, seq_length=seq_length, dtype=dtype)
        sizes = workload.mesh if mesh is None else checked_sizes(mesh, lambda key: key.replace("mesh", mesh_given_by))
        place = mesh_given_by if mesh is not None else workload.where("mesh")
        given = (devices, hosts, device_memory)
        machine = _machine(*given, sizes, place, bool(compile_it)) if chips is None else _targeted(chips, *given)
        _check_count(sizes, machine.count, place)
        ways, forward = best_ways(workload, machine, sizes, chips)
        asked = {"model": model, "batch_size": batch_size, "seq_length": seq_length, "dtype": dtype}
        tried = try_for(chips, ways, asked, machine.memory) if workload.compares and sizes is None else []
        ways = in_front(tried, ways)
        best = ways[0]
    outcome = tried[0].outcome if tried else _compiled(chips, best, asked, compile_it) if compile_it else (None, None)
    fits = does_fit(best.memory.total, outcome[0], machine.memory)
    speed = None if fits is False else speed_of(chips, best, forward, outcome, price)
    return build_report(
        best.plan,
        model=workload.name,
        chosen=_choice(best, _why(best, ways, machine, mesh, workload, len(tried))),
        memory=_memory(best.memory),
        global_batch_size=workload.global_batch_size,
        seq_length=workload.seq_length,
        dtype=workload.dtype,
        target=None if chips is None else str(chips),
        xla=workload.xla,
        device_memory=machine.memory,
        runners_up=[_choice(way, _compared(way, best, machine)) for way in ways[1 : len(tried) or RUNNERS_UP + 1]],
        fits=fits,
        remedies=_remedies(chips, workload, best, machine, sizes) if fits is False else (),
        compiled=outcome[0],
        speed=speed,
        state=followers(best.workload.abstract.state, best.plan, best.workload.abstract.params),
    )


def _compiled(target: Target | None, best: Option, asked: Mapping[str, Any], how: bool | str) -> Outcome:
    """The step as compiled, and what happens in it, which nobody times without a target."""
    return (compile_step(best), None) if target is None else compile_for(target, best, asked, cycles=how == "cycles")


def _remedies(
    target: Target | None, workload: Workload, best: Option, machine: Devices, sizes: Mapping[str, int] | None
) -> list[str]:
    with targeting(target):
        return remedies_for(workload, best, machine, sizes)


def _machine(
    devices: int | None,
    hosts: int | None,
    memory: int | None,
    sizes: Mapping[str, int] | None,
    place: str,
    compile_it: bool,
) -> Devices:
    """Devices of an unknown kind, or those of this machine."""
    wanted = None if sizes is None else math.prod(sizes.values())
    count = devices or wanted or jax.device_count()
    _check_count(sizes, count, place)
    hosts = _hosts(count) if hosts is None else hosts
    if count % hosts:
        problem = f"{count} devices cannot be shared evenly by {hosts} hosts"
        raise DeviceError("--hosts", problem, f"take a divisor of {count}")
    return Devices(count, hosts, memory or memory_of_a_device(), compile_it, chip_of(jax.devices()[0].device_kind))


def _targeted(target: Target, devices: int | None, hosts: int | None, memory: int | None) -> Devices:
    """The devices of a target, which says all of them itself."""
    for option, given in (("--devices", devices), ("--hosts", hosts)):
        if given is not None:
            raise UsageError(option, f"{given} given beside --target {target}, which says it already", "leave it out")
    return Devices(target.devices, target.groups, memory or target.chip.usable, chip=target.chip)


def _check_count(sizes: Mapping[str, int] | None, count: int, place: str) -> None:
    """Refuses a mesh of another number of devices than there are."""
    if sizes is not None and math.prod(sizes.values()) != count:
        asked = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data 1"
        problem = f"{asked} takes {math.prod(sizes.values())} devices, but there are {count}"
        raise DeviceError(place, problem, "change one of them")


def inspect_sharding(
    model: str,
    *,
    devices: int | None = None,
    hosts: int | None = None,
    mesh: Mapping[str, int] | None = None,
    device_memory: int | None = None,
    batch_size: int | None = None,
    seq_length: int | None = None,
    dtype: str | None = None,
    target: str | None = None,
    compile_it: bool | Literal["cycles"] = False,
    price: float | None = None,
    why: Mapping[str, int] | None = None,
    diff: str | None = None,
    svg: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """How a model or a recipe would be split over devices, and whether it fits; see `inspect`.

    Args:
        model: a recipe, a run, a directory with a model's config, the config itself, a preset, or a hub id.
        devices: how many.
        hosts: machines that hold them.
        mesh: sizes of the axes `data`, `fsdp` and `tensor`; default: the best.
        device_memory: bytes of one device.
        batch_size: examples in a step.
        seq_length: tokens in an example of a model.
        dtype: in which a model computes; default: bfloat16, over parameters in float32.
        target: devices that need not be there, such as `h100:8` or `v6e:16x16`.
        compile_it: also compile the step; without a target, JAX must run with that many devices.
        price: of a chip of the target for an hour, in any currency.
        why: another mesh, to be compared with the one that is chosen.
        diff: another model or recipe, to be compared with this one.
        svg: a file for a picture.

    Returns:
        The report as plain data, as `planning.report.report_schema` describes it.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    asked: dict[str, Any] = {
        "devices": devices,
        "hosts": hosts,
        "device_memory": device_memory,
        "batch_size": batch_size,
        "seq_length": seq_length,
        "dtype": dtype,
        "target": target,
        "compile_it": compile_it,
        "price": price,
    }
    if why is not None and diff is not None:
        raise UsageError("--diff", "given beside --why, and only one other plan is compared", "give one of them")
    report = inspect(model, mesh=mesh, **asked)
    if why is not None or diff is not None:
        another = {"mesh": mesh} if why is None else {"mesh": why, "mesh_given_by": "--why"}
        other = inspect(diff or model, **another, **asked)
        report = replace(report, comparison=compare(report, other))
    if svg is not None:
        write_picture(report, Path(svg))
    return as_json(report)


def _hosts(count: int) -> int:
    """As few as hold so many devices, each the same number."""
    return next(hosts for hosts in range(-(-count // DEVICES_OF_A_HOST), count + 1) if count % hosts == 0)


def _memory(found: StepMemory) -> Memory:
    return Memory(
        parameters=found.parameters,
        gradients=found.gradients,
        optimizer=found.optimizer + found.copies,
        activations=found.activations,
        logits=found.logits,
        batch=found.batch,
        gathered=found.gathered,
        plugin_state=found.plugin_state,
    )


def _choice(way: Option, reason: str) -> Choice:
    return Choice(
        mesh=way.plan.mesh,
        remat=way.workload.remat,
        micro_batch_size=way.micro_batch_size,
        memory=way.memory.total,
        traffic=way.slow + way.fast,
        reason=reason,
    )


def _why(
    best: Option,
    ways: Sequence[Option],
    machine: Devices,
    mesh: Mapping[str, int] | None,
    workload: Workload,
    compiled: int,
) -> str:
    slow, fast = format_bytes(best.slow), format_bytes(best.fast)
    moved = f"in a step a device moves {slow} between {machine.groups}, {fast} within its own"
    again = ", gathering parameters again in the backward pass" if best.reshard_after_forward else ""
    if mesh is not None or workload.mesh is not None:
        return f"as given; {moved}{again}"
    if not best.fits(machine.memory):
        return f"no configuration fits; this one needs least memory{again}"
    if compiled:
        return f"the fastest of {compiled} that were compiled and fit, by a walk over their programs; {moved}{again}"
    only, fits = sum(way.fits(machine.memory) for way in ways) == 1, "" if machine.memory is None else " that fits"
    return f"the {'only' if only else 'fastest'} configuration{fits}{'' if only else ', by estimate'}; {moved}{again}"


def _compared(way: Option, best: Option, machine: Devices) -> str:
    if not way.fits(machine.memory):
        return "does not fit"
    moved = f"{format_bytes(way.slow)} between {machine.groups}, {format_bytes(way.fast)} within one"
    return f"estimated {way.seconds / best.seconds:.2f} times the step time: {moved}"
