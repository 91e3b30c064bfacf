"""What a trace of JAX's profiler says of some steps: shares of compute and collectives, and the longest operations.

A trace is planes of lines of events (`jax.profiler.ProfileData`). A TPU has a plane of its own with a line `XLA Ops`,
and one of what runs beside it; a GPU one with a line for each stream; operations of a CPU stand among the threads of
its host. Where an event has them, `hlo_op` is the instruction of the compiled program and `device_ordinal` its device;
what a GPU runs as a part of a CUDA graph has that of the graph, and is told by its kernel's name.

Those of a CPU and of a GPU (H200) have been seen; that of a TPU follows XLA's profiler
(xla/tsl/profiler/utils/xplane_schema.h).
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP, INPUT_WAIT = "train", "input wait"
"""Names under which the training loop marks its steps, and that it waits for a batch."""
_DEVICE = re.compile(r"/device:(?P<device>(?:TPU|GPU):\d+)")
_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|async-collective|nccl",
    re.IGNORECASE,
)
_CONTROL = re.compile(r"(?:while|conditional|call)(?:[._-].*)?")
"""Operations whose time is that of others."""
_GRAPH = "command_buffer"
"""Begins the names of the instructions that launch a CUDA graph."""
_TOP = 10
Interval = tuple[float, float]


@dataclass(frozen=True)
class Ran:
    """An operation that ran.

    Attributes:
        device: which one.
        name: of its instruction, or of its kernel in a CUDA graph.
        is_collective: whether it moves bytes between devices.
        begin: in nanoseconds, on the clock of the trace.
        end: likewise.
    """

    device: str
    name: str
    is_collective: bool
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What was read of a trace.

    Attributes:
        ran: operations that hold no others.
        steps: when the host began and ended each step.
        waits: when it waited for a batch.
    """

    ran: tuple[Ran, ...]
    steps: tuple[Interval, ...]
    waits: tuple[Interval, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of a step.

    Attributes:
        name: of its instruction, or of its kernel in a CUDA graph.
        kind: `compute` or `collective`.
        seconds: in a step, on a device.
        share: of the time of a step.
        times: how often in a step, on a device.
        source: where in the traced function it is from; empty where that is not known.
    """

    name: str
    kind: str
    seconds: float
    share: float
    times: float
    source: str


@dataclass(frozen=True)
class Profile:
    """What some steps spend their time on. Shares are of the time from the first to the last, devices averaged.

    Attributes:
        steps: how many.
        seconds: of a step.
        devices: whose operations were seen.
        compute: share in which a device computes.
        collectives: share in which it moves bytes to or from others, whether or not it computes meanwhile.
        overlapped: share of that in which it computes meanwhile; None without collectives.
        idle: share in which it does neither.
        input_wait: share in which the host waits for a batch, which devices may be busy meanwhile.
        operations: those that last longest.
    """

    steps: int
    seconds: float
    devices: int
    compute: float
    collectives: float
    overlapped: float | None
    idle: float
    input_wait: float
    operations: tuple[Operation, ...]


def summarise(trace: Trace, sources: Mapping[str, str]) -> Profile | None:
    """What a trace comes to; None where it has no step or no operation.

    Args:
        trace: what was read.
        sources: of each instruction, where in the traced function it is from.
    """
    by_device: dict[str, list[Ran]] = defaultdict(list)
    for one in trace.ran:
        by_device[one.device].append(one)
    if not trace.steps or not by_device:
        return None
    begin = min(start for start, _ in trace.steps)
    end = max(*(stop for _, stop in trace.steps), *(one.end for one in trace.ran))
    whole, devices = end - begin, len(by_device)
    compute = collectives = together = 0.0
    for ran in by_device.values():
        computing = joined((one.begin, one.end) for one in ran if not one.is_collective)
        moving = joined((one.begin, one.end) for one in ran if one.is_collective)
        compute += _length(computing) / devices
        collectives += _length(moving) / devices
        together += _length(joined([*computing, *moving])) / devices
    waited = _length(joined((max(start, begin), min(stop, end)) for start, stop in trace.waits))
    return Profile(
        steps=len(trace.steps),
        seconds=whole / len(trace.steps) / 1e9,
        devices=devices,
        compute=compute / whole,
        collectives=collectives / whole,
        overlapped=(compute + collectives - together) / collectives if collectives else None,
        idle=1 - together / whole,
        input_wait=waited / whole,
        operations=tuple(_operations(trace, whole, devices, sources)),
    )


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals without their overlaps, in order.

    >>> joined([(5, 7), (0, 2), (1, 3), (3, 4)])
    [(0, 4), (5, 7)]
    """
    found: list[Interval] = []
    for begin, end in sorted(one for one in intervals if one[0] < one[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _operations(trace: Trace, whole: float, devices: int, sources: Mapping[str, str]) -> Iterator[Operation]:
    steps, spent, times = len(trace.steps), defaultdict[Any, float](float), defaultdict[Any, int](int)
    known = {re.sub(r"\W", "_", name): source for name, source in sources.items()} | dict(sources)  # kernels: no dots
    for one in trace.ran:
        spent[one.name, one.is_collective] += one.end - one.begin
        times[one.name, one.is_collective] += 1
    for key, nanoseconds in sorted(spent.items(), key=lambda item: -item[1])[:_TOP]:
        name, is_collective = key
        yield Operation(
            name=name,
            kind="collective" if is_collective else "compute",
            seconds=nanoseconds / devices / steps / 1e9,
            share=nanoseconds / devices / whole,
            times=times[key] / devices / steps,
            source=known.get(name, ""),
        )


def read_trace(directory: Path) -> Trace:
    """The trace that JAX's profiler wrote last below a directory.

    Raises:
        OSError: there is none.
    """
    from jax.profiler import ProfileData

    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"the profiler wrote nothing below {directory}")
    return of_planes(ProfileData.from_file(str(files[-1])).planes)


def of_planes(planes: Iterable[Any]) -> Trace:
    """What the planes of a trace hold, see the head of this module.

    Args:
        planes: with names and lines, these with names and events, as `jax.profiler.ProfileData` has them.
    """
    ran: list[Ran] = []
    steps: list[Interval] = []
    waits: list[Interval] = []
    for plane in planes:
        match = _DEVICE.match(plane.name)
        for line in _lines(plane, is_device=match is not None):
            operations = []
            for event in line.events:
                end = event.start_ns + event.duration_ns
                if match is None and event.name in (STEP, INPUT_WAIT):
                    (steps if event.name == STEP else waits).append((event.start_ns, end))
                elif event.duration_ns > 0:
                    stats = dict(event.stats)
                    if match is not None or "hlo_op" in stats:
                        operations.append(_ran(event, stats, end, None if match is None else match["device"]))
            ran += _innermost(operations)
    return Trace(tuple(ran), tuple(sorted(steps)), tuple(waits))


def _lines(plane: Any, *, is_device: bool) -> Sequence[Any]:
    """The lines that hold operations: those of a TPU by their names, of a GPU its streams, of a host all."""
    lines = list(plane.lines)
    named = [line for line in lines if line.name in ("XLA Ops", "Async XLA Ops")]
    if not is_device or named:
        return named or lines
    return [line for line in lines if line.name.startswith("Stream")]


def _ran(event: Any, stats: Mapping[str, Any], end: float, device: str | None) -> Ran:
    instruction = str(stats.get("hlo_op") or event.name)
    if instruction.startswith(_GRAPH):  # of a C++ kernel: neither what it returns nor what it takes
        instruction = event.name.removeprefix("void ").partition("(")[0]
    name = instruction.partition(" = ")[0].lstrip("%")
    said = f"{name} {stats.get('hlo_category', '')} {event.name.partition(' = ')[0]}"
    place = f"CPU:{stats.get('device_ordinal', 0)}" if device is None else device
    return Ran(place, name, _COLLECTIVE.search(said) is not None, event.start_ns, end)


def _innermost(operations: Sequence[Ran]) -> Iterator[Ran]:
    """Those of a line that hold no others: of a loop its body's."""
    in_order = sorted(operations, key=lambda one: (one.begin, -one.end))
    for place, one in enumerate(in_order):
        holds = any(inner.begin < one.end and inner.end <= one.end for inner in in_order[place + 1 : place + 2])
        if not holds and not _CONTROL.fullmatch(one.name):
            yield one


def as_json(profile: Profile) -> dict[str, Any]:
    """A profile as plain JSON values."""
    return dataclasses.asdict(profile)
