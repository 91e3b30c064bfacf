"""How long a step takes on a target: a walk over its timeline with the speeds of the chip.

Kernels run one after the other, each as long as its operations or its bytes need, whichever is longer:

    max(flops / (peak x share), bytes / (bandwidth x share)) + cost of a kernel

Bytes of a transfer move beside that, one transfer after the other on the same links. Where the program waits for them
and they are not there yet, the rest of their time is added. Loops turn as often as they do, each turn like the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redco_cli.chips.speeds import MATRIX_UNITS, SPEEDS, Range, Speeds, peak
from redco_cli.chips.table import Chip
from redco_cli.chips.target import Target
from redco_cli.sharding.compiled.events import HOST, PREFETCH, Arrival, Event, Loop, Span, Transfer
from redco_cli.sharding.compiled.work import Work

KERNELS = "cost of each kernel and collective"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        low: all goes well.
        typical: what is believed.
        high: all goes slowly.
        terms: what `typical` is made of, by name, the longest first.
        hidden: seconds in which bytes moved beside work, and that nothing waited for.
    """

    low: float
    typical: float
    high: float
    terms: Mapping[str, float]
    hidden: float


def step_time(events: Sequence[Event], target: Target, speeds: Speeds | None = None) -> StepTime:
    """The time of a compiled step.

    The range is made by each constant's own: it alone is set to its slow or fast value, and what that changes is added
    up as independent errors are, by squares.

    Args:
        events: its timeline.
        target: on which devices.
        speeds: what is reached on them; default: what is known of the chip.
    """
    speeds = speeds or SPEEDS[target.chip.name]
    found = _spent(events, _rates(target.chip, speeds, {}))
    slower = faster = 0.0
    for name in speeds.constants:
        slower += max(0.0, _total(events, target.chip, speeds, {name: "slow"}) - found.now) ** 2
        faster += max(0.0, found.now - _total(events, target.chip, speeds, {name: "fast"})) ** 2
    terms = dict(sorted(found.terms.items(), key=lambda item: -item[1]))
    return StepTime(found.now - math.sqrt(faster), found.now, found.now + math.sqrt(slower), terms, found.hidden)


@dataclass(frozen=True)
class _Rates:
    """A chip with a value for each constant."""

    chip: Chip
    value: Mapping[str, float]

    def work(self, work: Work) -> float:
        """Seconds of a kernel beside its own cost."""
        name = {"attention": "attention", "attention backward": "attention_backward"}.get(work.kind, "matmul")
        moving = work.bytes / (self.chip.bandwidth * self.value["memory"])
        if not work.flops:
            return moving * self.value["time"]
        unit = MATRIX_UNITS.get(self.chip.name, 0)
        filled = min(1.0, work.width / unit) if work.width and unit else 1.0
        return self.value["time"] * max(work.flops / (peak(self.chip, work.dtype) * filled * self.value[name]), moving)

    def transfer(self, moved: Transfer) -> float:
        """Seconds in which the bytes of a transfer move."""
        if moved.kind == PREFETCH:
            return self.value["time"] * moved.bytes / (self.chip.bandwidth * self.value["memory"])
        if moved.kind == HOST:
            return self.value["time"] * moved.bytes / self.value["host"]
        return self.value["time"] * moved.bytes / self.bandwidth(moved.span)

    def bandwidth(self, span: Span) -> float:
        """Bytes a second that each device of a group sends around it."""
        inside = self.value["link"] * self.chip.link * _ways(self.chip, span)
        if span.groups == 1:
            return inside
        beyond = self.value["network"] * self.chip.network * max(1, span.devices // span.groups)
        return min(inside, beyond) if span.devices > span.groups else beyond


def _ways(chip: Chip, span: Span) -> int:
    """How many links of a device a ring uses at once.

    On a torus a ring along each dim over which a group is spread, both ways round where the dim closes: on a v5e or
    v6e where it is the whole 16, on a v5p or TPU7x where it is a multiple of 4.
    """
    closing = 16 if chip.torus == 2 else 4
    return max(1, sum(2 if size % closing == 0 else 1 for size in span.extents if size > 1)) if chip.torus else 1


def _rates(chip: Chip, speeds: Speeds, changed: Mapping[str, str]) -> _Rates:
    return _Rates(chip, {name: _value(one, changed.get(name)) for name, one in speeds.constants.items()})


def _value(constant: Range, which: str | None) -> float:
    return {"slow": constant.slow, "fast": constant.fast}.get(which or "", constant.typical)


def _total(events: Sequence[Event], chip: Chip, speeds: Speeds, changed: Mapping[str, str]) -> float:
    return _spent(events, _rates(chip, speeds, changed)).now


@dataclass
class _Spent:
    """How far the walk is.

    Attributes:
        now: seconds since the step began.
        terms: what they were spent on.
        hidden: seconds of transfers that were not waited for.
        free: when the links of a kind will have sent what they were given.
        under_way: by the name of a transfer when it arrives, how long it moves, and what waiting for it is called.
    """

    now: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    under_way: dict[str, tuple[float, float, str]] = field(default_factory=dict)

    def spend(self, term: str, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.terms[term] = self.terms.get(term, 0.0) + seconds


def _spent(events: Sequence[Event], rates: _Rates) -> _Spent:
    spent = _Spent()
    _walk(events, rates, spent)
    return spent


def _walk(events: Sequence[Event], rates: _Rates, spent: _Spent) -> None:
    for one in events:
        if isinstance(one, Work):
            spent.spend(_term(one, rates), rates.work(one))
            spent.spend(KERNELS, rates.value["time"] * rates.value["kernel"])
        elif isinstance(one, Transfer):
            _send(one, rates, spent)
        elif isinstance(one, Arrival):
            _wait(one.name, spent)
        else:
            _turn(one, rates, spent)


def _term(work: Work, rates: _Rates) -> str:
    if not work.flops:
        return "reading and writing"
    return "attention" if work.kind.startswith("attention") else f"matrix products in {work.dtype}"


def _send(moved: Transfer, rates: _Rates, spent: _Spent) -> None:
    is_copy = moved.kind in (HOST, PREFETCH)
    links = moved.kind if is_copy else "links"
    if not is_copy:
        spent.spend(KERNELS, rates.value["time"] * rates.value["collective"])
    lasting = rates.transfer(moved)
    arrives = max(spent.now, spent.free.get(links, 0.0)) + lasting
    spent.free[links] = arrives
    over = f" over {'+'.join(moved.axes)}" if moved.axes else ""
    spent.under_way[moved.name] = arrives, lasting, f"waiting for {moved.kind}{over}"


def _wait(name: str, spent: _Spent) -> None:
    arrives, lasting, term = spent.under_way.pop(name, (0.0, 0.0, ""))
    if arrives > spent.now:
        spent.hidden += max(0.0, lasting - (arrives - spent.now))
        spent.spend(term, arrives - spent.now)
    else:
        spent.hidden += lasting


def _turn(loop: Loop, rates: _Rates, spent: _Spent) -> None:
    """A loop: its first turn walked, the others like it. What it has sent has arrived at the end of each.

    Of a branch that is taken now and then, only that share of the turn passes.
    """
    if not loop.times:
        return
    began, before, hidden = spent.now, dict(spent.terms), spent.hidden
    inherited = set(spent.under_way)
    _walk(loop.events, rates, spent)
    for name in [name for name in spent.under_way if name not in inherited]:
        _wait(name, spent)
    more = loop.times - 1
    for term, seconds in spent.terms.items():
        spent.terms[term] = seconds + more * (seconds - before.get(term, 0.0))
    spent.hidden += more * (spent.hidden - hidden)
    spent.now += more * (spent.now - began)
    if more < 0:
        there = max([spent.now, *(arrives for arrives, _, _ in spent.under_way.values())])
        spent.free = {links: min(until, there) for links, until in spent.free.items()}
