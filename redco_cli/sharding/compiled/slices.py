"""What slices of TPUs send each other: in a program no collectives, but sends and receives of its host.

send(..), recv(..), each with the name of their rendezvous, how many slices meet there, and what they make of it
recv-done: the result is there
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redco_cli.sharding.compiled.events import Span
from redco_cli.sharding.compiled.hlo import Computation, Instruction, size_in_bytes
from redco_cli.sharding.rings import ring_bytes

_SENT = ("send", "recv", "send-done", "recv-done")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([^}]*)\}')


@dataclass(frozen=True)
class Sent:
    """What one device of a slice sends to those of other slices.

    Attributes:
        name: of the rendezvous.
        kind: of collective.
        bytes: sent, in a ring.
        span: one device of each slice.
    """

    name: str
    kind: str
    bytes: int
    span: Span


def sent_between(one: Instruction) -> Sent | None:
    """What an instruction sends to other slices; None where it is no such."""
    kind, slices = _TYPE.search(one.attributes), _SLICES.search(one.attributes)
    if one.opcode != "send" or kind is None or slices is None:
        return None
    name, count = kind[1].lower().replace("_", "-"), _count(slices[1])
    size = size_in_bytes(one.type.partition("]")[0] + "]")
    result = {"all-gather": size * count, "reduce-scatter": size // count}.get(name, size)
    return Sent(_rendezvous(one), name, ring_bytes(name, result, count), Span(count, count, ()))


def arrives_of(computation: Computation, one: Instruction) -> str | None:
    """The rendezvous whose result an instruction waits for; empty where it waits for none, None where it is no part."""
    if one.opcode not in _SENT or "megascale" not in one.attributes or one.opcode == "send":
        return None
    begun = computation.get(one.operands[0]) if one.opcode == "recv-done" else None
    return "" if begun is None else _rendezvous(begun)


def _rendezvous(one: Instruction) -> str:
    found = _RENDEZVOUS.search(one.attributes)
    return one.name if found is None else found[1]


def _count(text: str) -> int:
    """Numbers in a set.

    >>> _count("1,2"), _count("1:4")
    (2, 4)
    """
    total = 0
    for part in text.split(","):
        first, _, last = part.partition(":")
        total += int(last or first) - int(first) + 1
    return total
