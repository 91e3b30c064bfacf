"""Rules one and two: which axes to split over `tensor`.

A weight is *private* to an axis that few arrays have: the width of an MLP, made by one matmul and summed over by the
next; the heads of an attention, made by its projections and summed over by its output; the vocabulary. Splitting such
an axis splits the weights on both ends, the first by columns, the second by rows, and costs one all-reduce forward and
one backward. Both rules are one choice: with

    cost(c)  = bytes moved in a step, forward and backward, if candidate c is split
    value(c) = bytes of the parameters that it divides

candidates are taken in order of cost / value, skipping one that meets a taken one in any array: an array is split over
`tensor` once. A candidate is a run of leading factors, (heads) or (kv, group) together, and never reaches into a head.

A weight that no chosen axis splits, such as what follows columns that are cut unevenly, may be split by rows alone: its
input, whole on every device, is cut there, and its result summed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from redco_cli.sharding.axes import Axis, Dim, factors
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import DATA, FSDP, TENSOR
from redco_cli.sharding.program.events import PossibleCollective, bytes_moved
from redco_cli.sharding.program.reading import Reading

Chain = tuple[Axis, ...]
"""Leading factors of a dim that are split together, major first."""

_LITTLE = 0.1
"""Bytes moved for each byte of parameters that is divided: what splitting such an axis costs is not worth a thought."""
OPERATIONS_PER_BYTE = 500
"""Operations that take as long as moving one byte between neighbours, at least: an A100's 312 TFLOP/s, half of them
reached, beside 300 GB/s of NVLink. Of an H100 they are twice as many, of a v6e six times."""


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


@dataclass(frozen=True)
class ByRows:
    """A weight that is split over `tensor` where it is summed over, and nothing else along with it.

    Attributes:
        place: the dim.
        summed: bytes of its results on one device, in a step.
        gathered: bytes of its inputs, whose gradients come out in parts.
    """

    place: int
    summed: int
    gathered: int


def by_rows(
    parameter: Parameter, chosen: Iterable[Candidate], reading: Reading, sizes: Mapping[str, int]
) -> ByRows | None:
    """How to split a weight that is not split otherwise, where that is cheaper than what every device has to do then:
    gather it, and multiply all of it with the same activations.

    Args:
        parameter: the weight.
        chosen: axes that are split.
        reading: the program.
        sizes: of the mesh axes.
    """
    matmuls, uses = reading.matmuls.get(parameter.path, ()), reading.uses.get(parameter.path, ())
    places = {_place(parameter, matmul.contracted) for matmul in matmuls}
    place = places.pop() if len(places) == 1 and len(matmuls) == len(uses) else None
    tensor, taken = sizes[TENSOR], {axis for one in chosen for axis, ways in one.ways.items() if ways > 1}
    near = {axis for one in matmuls for dim in (*one.activation, *one.result) for axis in factors(dim)}
    is_kernel = 1 in parameter.shape  # of a convolution, whose input a compiler would split as far back as it reaches
    if place is None or is_kernel or parameter.shape[place] % tensor or parameter.indivisible()[place] or near & taken:
        return None
    ways = reading.split_batch(sizes[DATA] * sizes[FSDP])

    def elements(dims: Iterable[Dim]) -> int:
        return math.prod(-(-axis.size // ways.get(axis, 1)) for dim in dims for axis in factors(dim))

    itemsize = max(use.itemsize for use in uses)
    summed = itemsize * sum(one.times * elements(one.result) for one in matmuls)
    gathered = itemsize * sum(one.times * elements(one.activation) for one in matmuls)
    operations = sum(6 * one.times * elements(one.result) * parameter.shape[place] for one in matmuls)
    # Compilers gather it for the forward pass, and once more for the backward pass.
    whole = reading.bytes_where_used(parameter) * (2 + reading.is_recomputed(parameter))
    spared = operations * (tensor - 1) // tensor // OPERATIONS_PER_BYTE
    return ByRows(place, summed, gathered) if 2 * summed + gathered < whole + spared else None


def _place(parameter: Parameter, contracted: Iterable[Dim]) -> int | None:
    """The dim of a weight that is summed over, where it is one."""
    summed = tuple(axis for dim in contracted for axis in factors(dim))
    return next((place for place, dim in enumerate(parameter.dims) if dim and dim == summed), None)


def _improved(chosen: list[Candidate], every: Sequence[Candidate], conflicts: _Conflicts) -> list[Candidate]:
    """Replaces a choice by what it keeps out, where that divides more: two or more at a similar price, or at next to
    none.

    In a chain of matmuls a·b·c·d, taking the axis in the middle first would leave both ends whole. What modulates all
    layers by a vector of each example is next to free to split, and has most of a model's parameters perhaps: the layer
    that makes the vector's input must not stand in its way.
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
        alike = len(instead) > 1 and cost / value <= 1.1 * taken.ratio
        if value > 1.2 * taken.value and (alike or cost / value <= _LITTLE):
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
