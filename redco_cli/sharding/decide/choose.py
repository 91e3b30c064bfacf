"""Rules one and two: which axes to split over `tensor`.

A weight is *private* to an axis that few arrays have: the width of an MLP, made by one matmul and summed over by the
next; the heads of an attention, made by its projections and summed over by its output; the vocabulary. Splitting such
an axis splits the weights on both ends, the first by columns, the second by rows, and costs one all-reduce forward and
one backward. Both rules are one choice: with

    cost(c)  = bytes moved in a step, forward and backward, if candidate c is split
    value(c) = bytes of the parameters that it divides

candidates are taken in order of cost / value, skipping one that meets a taken one in any array: an array is split over
`tensor` once. A candidate is a run of leading factors, (heads) or (kv, group) together, and never reaches into a head.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from redco_cli.sharding.axes import Axis, Dim, factors
from redco_cli.sharding.program.events import PossibleCollective, bytes_moved
from redco_cli.sharding.program.reading import Reading

Chain = tuple[Axis, ...]
"""Leading factors of a dim that are split together, major first."""


@dataclass(frozen=True)
class Candidate:
    """Axes that can be split over `tensor`.

    Attributes:
        chain: the axes.
        ways: into how many parts each of them is cut.
        cost: bytes moved on one device in a step.
        value: bytes of the parameters that have it, in front or behind other projections in one dim.
    """

    chain: Chain
    ways: Mapping[Axis, int]
    cost: float
    value: int

    @property
    def ratio(self) -> float:
        """What to be paid for each byte divided."""
        return self.cost / self.value


def leading(dim: Dim, ways: int, forbidden: frozenset[Axis]) -> dict[Axis, int] | None:
    """The leading factors that cut a dim into equal parts, each part a block.

    Args:
        dim: factors, major first.
        ways: number of parts.
        forbidden: axes that must stay whole.

    Returns:
        Into how many parts each of those factors is cut; None where that is impossible.
    """
    taken: dict[Axis, int] = {}
    left = ways
    for axis in dim:
        if axis in forbidden or axis.layer or axis.whole:
            return None
        share = math.gcd(axis.size, left)
        if share < left and share < axis.size:  # a part would hold an uneven share of the next factor
            return None
        taken[axis] = share
        left //= share
        if left == 1:
            return taken
    return None


def candidates(reading: Reading, tensor: int, batch_ways: int) -> list[Candidate]:
    """All axes that could be split over `tensor`, cheapest for what they divide first; equal ones as the program meets
    them, so that names of parameters decide nothing.

    An axis has to be made by a weight: where it is only summed over, as in a classifier of concatenated features,
    splitting it would split the residual stream before it. A table that is only looked up, such as positions, takes
    part while adding up its rows moves less than the table.
    """
    forbidden = reading.within_heads | reading.input_axes
    found: dict[Chain, dict[Axis, int]] = {}
    value: dict[Chain, int] = defaultdict(int)
    behind: dict[Axis, int] = defaultdict(int)
    for parameter in reading.parameters:
        chains = set()
        for dim in parameter.dims:
            ways = leading(dim, tensor, forbidden)
            if ways is not None and all(axis in reading.heads for axis in list(ways)[:-1]):
                chains.add(tuple(ways))
                found[tuple(ways)] = ways
        for chain in chains:
            value[chain] += parameter.bytes
        for axis in {axis for dim in parameter.dims for axis in dim[1:]} - {chain[0] for chain in chains}:
            behind[axis] += parameter.bytes
    costs = Costs(reading.collectives, reading.split_batch(batch_ways))
    every = [Candidate(chain, ways, costs.of(ways), value[chain] + behind[chain[0]]) for chain, ways in found.items()]
    worth = [one for one in every if _pairs(one, reading)]
    return sorted(worth, key=lambda candidate: (candidate.ratio, costs.first(candidate.chain)))


def _pairs(candidate: Candidate, reading: Reading) -> bool:
    axes = set(candidate.chain)
    if axes <= reading.routes - reading.experts:
        return False
    if axes & (reading.lookup_axes - reading.weight_axes):
        return candidate.ratio <= 1
    return bool(axes & (reading.produced | reading.lookup_axes | reading.experts))


def choose(reading: Reading, tensor: int, batch_ways: int) -> list[Candidate]:
    """What to split over `tensor`.

    Args:
        reading: the program.
        tensor: size of the mesh axis; with 1 there is nothing to choose.
        batch_ways: into how many parts the batch is split.
    """
    if tensor == 1:
        return []
    every = candidates(reading, tensor, batch_ways)
    conflicts = _Conflicts(reading.arrays, every)
    chosen: list[Candidate] = []
    for candidate in every:
        if not conflicts.of(candidate) & set(map(id, chosen)):
            chosen.append(candidate)
    return _improved(chosen, every, conflicts)


def _improved(chosen: list[Candidate], every: Sequence[Candidate], conflicts: _Conflicts) -> list[Candidate]:
    """Replaces a choice by two or more that it keeps out, where together they divide more at a similar price.

    In a chain of matmuls a·b·c·d, taking the axis in the middle first would leave both ends whole.
    """
    for taken in list(chosen):
        rest = [candidate for candidate in chosen if candidate is not taken]
        occupied = set(map(id, rest))
        instead: list[Candidate] = []
        for candidate in every:
            if candidate is not taken and not conflicts.of(candidate) & (occupied | set(map(id, instead))):
                instead.append(candidate)
        instead = [candidate for candidate in instead if id(candidate) not in occupied]
        value, cost = sum(c.value for c in instead), sum(c.cost for c in instead)
        if len(instead) > 1 and value > 1.2 * taken.value and cost / value <= 1.1 * taken.ratio:
            chosen = rest + instead
    return chosen


class Costs:
    """What splitting an axis costs, summed over the possible collectives of a program."""

    def __init__(self, collectives: Iterable[PossibleCollective], ways: Mapping[Axis, int]) -> None:
        """Indexes collectives by the axes whose split needs them.

        Args:
            collectives: of a program.
            ways: how many parts the axes of the batch are split into.
        """
        self._ways = ways
        self._by_axis: dict[Axis, list[PossibleCollective]] = defaultdict(list)
        self._first: dict[Axis, int] = {}
        for place, collective in enumerate(collectives):
            for axis in {axis for dim in collective.if_split for axis in factors(dim)}:
                self._by_axis[axis].append(collective)
                self._first.setdefault(axis, place)

    def collectives(self, axes: Iterable[Axis]) -> list[PossibleCollective]:
        """What moves if these axes are split."""
        return list({id(one): one for axis in axes for one in self._by_axis.get(axis, ())}.values())

    def bytes(self, collective: PossibleCollective, ways: Mapping[Axis, int]) -> int:
        """What a collective moves on one device in a step, where axes are split into `ways`."""
        return collective.count * bytes_moved(collective, {**self._ways, **ways})

    def first(self, axes: Iterable[Axis]) -> float:
        """Which of the collectives, in the program's order, is the first that needs one of these axes."""
        return min((self._first[axis] for axis in axes if axis in self._first), default=math.inf)

    def of(self, ways: Mapping[Axis, int]) -> float:
        """Bytes moved on one device in a step."""
        split = (axis for axis, n in ways.items() if n > 1)
        return float(sum(self.bytes(one, ways) for one in self.collectives(split)))


class _Conflicts:
    """Which candidates occur in one array, so that only one of them can be split."""

    def __init__(self, arrays: Iterable[frozenset[Axis]], every: Sequence[Candidate]) -> None:
        by_axis: dict[Axis, list[Candidate]] = defaultdict(list)
        for candidate in every:
            for axis, ways in candidate.ways.items():
                if ways > 1:
                    by_axis[axis].append(candidate)
        self._in_conflict: dict[int, set[int]] = defaultdict(set)
        for array in arrays:
            together = {id(candidate) for axis in array for candidate in by_axis.get(axis, ())}
            for one in together:
                self._in_conflict[one] |= together

    def of(self, candidate: Candidate) -> set[int]:
        """Identities of the others."""
        return self._in_conflict[id(candidate)] - {id(candidate)}
