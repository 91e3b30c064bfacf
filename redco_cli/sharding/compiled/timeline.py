"""A compiled program as what happens in it, in its order: work, bytes that set out, waiting for them, loops.

What XLA schedules is known, how fast a chip is is not: no figure here depends on one, so that a timeline can be kept
and read again with other speeds. It is made of

    Work        a kernel runs
    Transfer    bytes set out: of a collective, to or from the host, or into the fast memory of a TPU
    Arrival     the program waits until they are there
    Loop        all that several times

A collective that is not started by an instruction of its own is a `Transfer` and its `Arrival`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redco_cli.sharding.compiled.hlo import Computation, HloModule, Instruction, parse, result_type, size_in_bytes
from redco_cli.sharding.compiled.hlo import trip_count as trips_of
from redco_cli.sharding.compiled.schedule import NO_KERNEL, SCATTERED, is_start, is_step
from redco_cli.sharding.compiled.traffic import KINDS, device_groups, spanned_axes
from redco_cli.sharding.compiled.work import Work, bytes_in_memory, work_of
from redco_cli.sharding.plan import Collective

HOST, PREFETCH = "host copy", "prefetch"
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")
_HOST_MEMORY = "S(5)"

Place = tuple[int, tuple[int, ...]]
"""Where a device is: the number of its host (GPU) or slice (TPU), and its coordinates there."""


@dataclass(frozen=True)
class Span:
    """Which devices a collective joins.

    Attributes:
        devices: how many, in one of its groups.
        groups: hosts or slices in which they are.
        extents: over how many coordinates they are spread, along each dim of a torus.
    """

    devices: int
    groups: int
    extents: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """Bytes set out.

    Attributes:
        name: of the instruction.
        kind: of the collective, `HOST` or `PREFETCH`.
        axes: mesh axes that it runs over.
        bytes: that one device sends, in a ring where it is a collective.
        span: of a collective.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    span: Span


@dataclass(frozen=True)
class Arrival:
    """The program waits for bytes.

    Attributes:
        name: of the instruction that sent them.
    """

    name: str


@dataclass(frozen=True)
class Loop:
    """Events that happen several times.

    Attributes:
        times: how often; 1 where that is not known.
        known: whether it is.
        events: of one turn.
    """

    times: int
    known: bool
    events: tuple[Event, ...]


Event = Work | Transfer | Arrival | Loop


def timeline(
    text: str, mesh: Mapping[str, int] | None = None, places: Sequence[Place] | None = None
) -> tuple[Event, ...]:
    """What happens in a program that is compiled for a GPU or a TPU, on one of its devices.

    Of the branches of a conditional, the one that works and moves most stands for all.

    Args:
        text: of an optimised HLO module, its instructions in the order in which they run.
        mesh: axis to size, which names the axes of collectives.
        places: of each device, in the order of the mesh; default: all within one host.
    """
    module = parse(text)
    places = places or [(0, ())] * module.devices
    return tuple(_events(_Program(module, dict(mesh or {}), tuple(places)), module.entry))


def ring_bytes(kind: str, result: int, devices: int) -> int:
    """What each of some devices sends so that all have the result of a collective, in a ring.

    See "Bandwidth optimal all-reduce algorithms for clusters of workstations" (Patarasuk and Yuan, 2009).

    Args:
        kind: such as `all-gather`.
        result: bytes of it, on one device.
        devices: that take part.

    Example:
        >>> [ring_bytes(kind, 800, 8) for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")]
        [700, 1400, 5600, 800]
    """
    if kind == "reduce-scatter":
        return result * (devices - 1)
    if kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return result * (devices - 1) // devices
    return 2 * result * (devices - 1) // devices if kind == "all-reduce" else result


def sent_bytes(one: Collective, mesh: Mapping[str, int]) -> int:
    """What each device sends in a step for one kind of collective.

    Args:
        one: with the bytes of its results.
        mesh: axis to size.

    Example:
        >>> sent_bytes(Collective("all-reduce", "data+fsdp", "gradients", 3, 800), {"data": 2, "fsdp": 4, "tensor": 1})
        1400
    """
    devices = math.prod(mesh[axis] for axis in one.axis.split("+") if axis) if one.axis else math.prod(mesh.values())
    return ring_bytes(one.kind, one.bytes, devices)


def to_json(events: Sequence[Event]) -> list[Any]:
    """Events as JSON values."""
    return [
        {type(one).__name__: [one.times, one.known, to_json(one.events)] if isinstance(one, Loop) else _fields(one)}
        for one in events
    ]


def from_json(document: Sequence[Any]) -> tuple[Event, ...]:
    """The events of `to_json`."""
    return tuple(_event(*next(iter(one.items()))) for one in document)


def _fields(event: Work | Transfer | Arrival) -> list[Any]:
    return [dataclasses.astuple(one) if isinstance(one, Span) else one for one in vars(event).values()]


def _event(name: str, fields: Sequence[Any]) -> Event:
    if name == "Loop":
        return Loop(fields[0], fields[1], from_json(fields[2]))
    if name == "Transfer":
        sender, kind, axes, size, (devices, groups, extents) = fields
        return Transfer(sender, kind, tuple(axes), size, Span(devices, groups, tuple(extents)))
    return Arrival(fields[0]) if name == "Arrival" else Work(*fields)


@dataclass(frozen=True)
class _Program:
    """A module, its mesh, and where its devices are."""

    module: HloModule
    mesh: dict[str, int]
    places: tuple[Place, ...]


def _events(program: _Program, name: str) -> Iterator[Event]:
    computation = program.module.computations[name]
    for one in computation.values():
        if one.opcode == "while":
            number = trips_of(program.module, one, name)
            inside = tuple(_events(program, one.called("body")[0]))
            yield Loop(1 if number is None else number, number is not None, inside)
        elif one.opcode == "conditional":
            yield from max((tuple(_events(program, each)) for each in one.called()), key=_amount)
        elif one.opcode == "call":
            yield from _events(program, one.called()[0])
        elif one.opcode.endswith(("-done", "-update")) or one.name.startswith("async-collective-done"):
            if not one.opcode.endswith("-update"):
                yield Arrival(_sender(computation, one))
        else:
            yield from _of_instruction(program, computation, one)


def _of_instruction(program: _Program, computation: Computation, one: Instruction) -> Iterator[Event]:
    """What one instruction does that is no loop, and no end of another."""
    moved = _collective(program, one)
    if moved is not None:
        yield from (moved,) if moved.span.devices > 1 else ()
        if moved.span.devices > 1 and not is_start(one):
            yield Arrival(moved.name)
    elif one.opcode in _COPIES:
        yield _copy(one)
    elif one.opcode not in NO_KERNEL:
        yield work_of(program.module, computation, one)


def _collective(program: _Program, one: Instruction) -> Transfer | None:
    """What an instruction sends as a collective; None where it is none."""
    kind, inner, is_scattered = one.opcode.removesuffix("-start"), one, False
    if kind not in KINDS:
        is_scattered = one.opcode == "fusion" and one.called()[0].startswith(SCATTERED)
        if not is_scattered and not one.name.startswith("async-collective-start") and one.opcode != "async-start":
            return None
        found = [each for name in one.called() for each in _collectives_in(program.module, name)]
        if not found:
            return None
        inner = found[0]
        kind = "reduce-scatter" if is_scattered else inner.opcode.removesuffix("-start")
    size = size_in_bytes(one.type if is_scattered else result_type(inner))
    groups = device_groups(inner.attributes, program.module.devices)
    pairs = kind == "collective-permute"
    span = _span(groups[0], program.places)
    if pairs:  # each pair sends; the farthest one is waited for
        span = max((_span(pair, program.places) for pair in groups), key=lambda each: (each.groups, each.extents))
    sent = ring_bytes(kind, size, span.devices)
    return Transfer(one.name, kind, spanned_axes(groups, program.mesh), sent, span)


def _collectives_in(module: HloModule, name: str) -> Iterator[Instruction]:
    for one in module.computations.get(name, {}).values():
        if one.opcode.removesuffix("-start") in KINDS:
            yield one
        for called in one.called() if one.opcode in ("fusion", "call", "async-start") else ():
            yield from _collectives_in(module, called)


def _span(group: Sequence[int], places: Sequence[Place]) -> Span:
    found = [places[number] for number in group]
    extents = tuple(len(set(along)) for along in zip(*(coordinates for _, coordinates in found), strict=True))
    return Span(len(group), len({place for place, _ in found}), extents)


def _copy(one: Instruction) -> Transfer:
    """A copy that runs beside the program: to or from the host, or into fast memory."""
    parts = [
        each for each in re.findall(r"[a-z]\w*\[[\d,]*\](?:\{[^{}]*\})?", re.sub(r"/\*.*?\*/", "", one.type)) if each
    ]
    arrays = [each for each in parts if "[]" not in each]
    kind = HOST if any(_HOST_MEMORY in each for each in arrays) else PREFETCH
    smallest = min((size_in_bytes(each) for each in arrays), default=0)
    size = smallest if kind == HOST or len(arrays) < 2 else min(smallest, bytes_in_memory(" ".join(arrays)))
    return Transfer(one.name, kind, (), size, Span(1, 1, ()))


def _sender(computation: Computation, one: Instruction) -> str:
    """The name of the instruction that began what another ends; empty where it is not in this computation."""
    for name in one.operands:
        before = computation.get(name)
        if before is None:
            continue
        if is_start(before):
            return before.name
        if _hands_on(before) and (found := _sender(computation, before)):
            return found
    return ""


def _hands_on(one: Instruction) -> bool:
    """Whether what is under way before an instruction still is behind it. A TPU multiplies meanwhile, in fusions."""
    return is_step(one) or one.opcode in ("get-tuple-element", "bitcast") or one.opcode.endswith("-update")


def _amount(events: Sequence[Event]) -> int:
    """Operations and bytes together, to tell the larger of two branches."""
    total = 0
    for one in events:
        if isinstance(one, Loop):
            total += one.times * _amount(one.events)
        elif isinstance(one, Work):
            total += one.flops + one.bytes
        elif isinstance(one, Transfer):
            total += one.bytes
    return total
