"""What can happen in a program: work, bytes that set out, waiting for them, loops. As data, and as JSON.

Work        a kernel runs
Transfer    bytes set out: of a collective, to or from the host, or into the fast memory of a TPU
Arrival     the program waits until they are there
Loop        all that several times
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redco_cli.sharding.compiled.work import Work

HOST, PREFETCH = "host copy", "prefetch"


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
    """Events that happen several times, or in some turns of a loop around them only.

    Attributes:
        times: how often; 1 where that is not known. Of a branch the share in which it is taken.
        known: whether it is.
        events: of one turn.
    """

    times: float
    known: bool
    events: tuple[Event, ...]


Event = Work | Transfer | Arrival | Loop


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
