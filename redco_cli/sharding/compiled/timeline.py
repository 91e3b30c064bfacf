"""A compiled program as what happens in it, in its order: work, bytes that set out, waiting for them, loops.

What XLA schedules is known, how fast a chip is is not: no figure here depends on one, so that a timeline can be kept
and read again with other speeds. It is made of `events`.

A collective that is not started by an instruction of its own is a `Transfer` and its `Arrival`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from redco_cli.sharding.compiled.events import HOST, PREFETCH, Arrival, Event, Loop, Span, Transfer
from redco_cli.sharding.compiled.hlo import Computation, HloModule, Instruction, parse, result_type, size_in_bytes
from redco_cli.sharding.compiled.hlo import trip_count as trips_of
from redco_cli.sharding.compiled.schedule import NO_KERNEL, SCATTERED, is_start, is_step
from redco_cli.sharding.compiled.slices import arrives_of, sent_between
from redco_cli.sharding.compiled.traffic import KINDS, device_groups, spanned_axes
from redco_cli.sharding.compiled.work import Work, bytes_in_memory, work_of
from redco_cli.sharding.rings import ring_bytes

_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")
_HOST_MEMORY = "S(5)"

Place = tuple[int, tuple[int, ...]]
"""Where a device is: the number of its host (GPU) or slice (TPU), and its coordinates there."""


def timeline(
    text: str,
    mesh: Mapping[str, int] | None = None,
    places: Sequence[Place] | None = None,
    shares: Mapping[int, Sequence[float]] | None = None,
) -> tuple[Event, ...]:
    """What happens in a program that is compiled for a GPU or a TPU, on one of its devices.

    Of the branches of a conditional, the one that works and moves most stands for all where it is not known how often
    each of them is taken.

    Args:
        text: of an optimised HLO module, its instructions in the order in which they run.
        mesh: axis to size, which names the axes of collectives.
        places: of each device, in the order of the mesh; default: all within one host.
        shares: how often each branch is taken, by the number of branches; see `program.branches`.
    """
    module = parse(text)
    places = places or [(0, ())] * module.devices
    return tuple(_events(_Program(module, dict(mesh or {}), tuple(places), dict(shares or {})), module.entry))


@dataclass(frozen=True)
class _Program:
    """A module, its mesh, where its devices are, and how often its branches are taken."""

    module: HloModule
    mesh: dict[str, int]
    places: tuple[Place, ...]
    shares: dict[int, Sequence[float]]


def _events(program: _Program, name: str) -> Iterator[Event]:
    computation = program.module.computations[name]
    for one in computation.values():
        if one.opcode == "while":
            number = trips_of(program.module, one, name)
            inside = tuple(_events(program, one.called("body")[0]))
            yield Loop(1 if number is None else number, number is not None, inside)
        elif one.opcode == "conditional":
            yield from _branches(program, one)
        elif one.opcode == "call":
            yield from _events(program, one.called()[0])
        elif one.attributes and (rendezvous := arrives_of(computation, one)) is not None:
            yield from (Arrival(rendezvous),) if rendezvous else ()
        elif one.opcode.endswith(("-done", "-update")) or one.name.startswith("async-collective-done"):
            if not one.opcode.endswith("-update"):
                yield Arrival(_sender(computation, one))
        else:
            yield from _of_instruction(program, computation, one)


def _branches(program: _Program, one: Instruction) -> Iterator[Event]:
    names = one.branches()
    found = [tuple(_events(program, each)) for each in names]
    if len(names) in program.shares:
        shares = program.shares[len(names)]
        yield from (Loop(share, True, branch) for share, branch in zip(shares, found, strict=True) if share)
    else:
        yield from max(found, key=_amount)


def _of_instruction(program: _Program, computation: Computation, one: Instruction) -> Iterator[Event]:
    """What one instruction does that is no loop, and no end of another."""
    beyond = sent_between(one)
    if beyond is not None:
        groups = _across(program.places)
        yield Transfer(beyond.name, beyond.kind, spanned_axes(groups, program.mesh), beyond.bytes, beyond.span)
        return
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


def _across(places: Sequence[Place]) -> list[list[int]]:
    """Devices of the same place in each slice, by their numbers."""
    slices: dict[int, list[int]] = {}
    for number, (which, _) in enumerate(places):
        slices.setdefault(which, []).append(number)
    return [list(group) for group in zip(*slices.values(), strict=True)]


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
            total += int(one.times * _amount(one.events))
        elif isinstance(one, Work):
            total += one.flops + one.bytes
        elif isinstance(one, Transfer):
            total += one.bytes
    return total
