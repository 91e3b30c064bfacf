"""What a step moves over the mesh, predicted from the plan alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redco_cli.sharding.axes import Axis, factors
from redco_cli.sharding.decide.choose import Candidate, Costs
from redco_cli.sharding.decide.placed import Layout
from redco_cli.sharding.decide.projections import exchange
from redco_cli.sharding.decide.tables import dims_of_moving_rows
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, Collective
from redco_cli.sharding.program.events import COMPARED, GRADIENT, LOOKED_UP, NEIGHBOURS, PossibleCollective
from redco_cli.sharding.program.reading import Reading

PARAMETERS, GRADIENTS = "parameters, where they are used", "gradients"
AGAIN = "parameters, where layers are recomputed"
ROWS = "rows that are looked up"
PER_PASS = (PARAMETERS, AGAIN, GRADIENTS)
"""What is moved in every pass, whatever the size of its batch."""
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL = "all-to-all"


def predict_collectives(
    reading: Reading,
    chosen: Sequence[Candidate],
    layouts: Sequence[Layout],
    sizes: Mapping[str, int],
    frozen: Collection[str] = (),
) -> tuple[Collective, ...]:
    """Collectives of one forward and backward pass over one micro-batch, and of its gradients.

    Bytes are those of the results on one device, as they stand in compiled HLO.

    Args:
        reading: the program.
        chosen: the axes to split over `tensor`.
        layouts: of each parameter.
        sizes: of the mesh axes.
        frozen: paths of parameters that have no gradient.
    """
    moved: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    costs = Costs(reading.collectives, reading.split_batch(sizes[DATA] * sizes[FSDP]))
    split = [candidate.ways for candidate in chosen]
    split += [{axis: sizes[TENSOR]} for axis in _uneven(reading.parameters, layouts, sizes)]
    split_features = _uneven_tables(reading, layouts, sizes)
    for collective, ways in _between_activations(split, costs):
        if not collective.count or (collective.what == LOOKED_UP and not split_features.isdisjoint(ways)):
            continue  # a loop of no turns, or rows that are not whole
        each = costs.bytes(collective, ways) // collective.count
        moved[collective.kind, TENSOR, collective.what] += [each] * collective.count
    for collective in costs.collectives(_cut_axes(reading, chosen, layouts, sizes)):
        moved[collective.kind, TENSOR, collective.what] += [costs.bytes(collective, {}) // sizes[TENSOR]]
    for one, size in _among_examples(reading, split, costs, sizes):
        moved[one.kind, "+".join(axis for axis in (DATA, FSDP) if sizes[axis] > 1), one.what] += [size] * one.count
    beside = _beside_split(reading, layouts)
    for parameter, layout in zip(reading.parameters, layouts, strict=True):
        whole = reading.bytes_where_used(parameter)
        # A table whose rows move is gathered all the same where it is a head, too.
        used = _axes(layout.gathered) - ({FSDP} if parameter.path in reading.uses else set())
        found = _where_used(whole, layout, used, sizes, is_recomputed=reading.is_recomputed(parameter))
        found += _rows(parameter, layout, reading, sizes, is_frozen=parameter.path in frozen)
        if parameter.path not in frozen:
            is_summed = bool(parameter.axes & beside) and TENSOR not in _axes(layout.gathered)
            found += _gradient(whole, layout, used, sizes, is_summed=is_summed)
        if _is_exchanged(layout):
            shard = whole // (sizes[FSDP] * sizes[TENSOR])
            exchanged = (PARAMETERS,) if parameter.path in frozen else (PARAMETERS, GRADIENTS)
            again = (AGAIN,) if reading.is_recomputed(parameter) else ()
            found += [((ALL_TO_ALL, TENSOR, what), shard) for what in (*exchanged, *again)]
        found += _exchanged(whole, parameter, layout, sizes, is_frozen=parameter.path in frozen)
        if layout.by_rows is not None:
            found += [((ALL_REDUCE, TENSOR, "partial sums of a matmul"), layout.by_rows.summed)]
            found += [((ALL_GATHER, TENSOR, "gradient of a matmul's input"), layout.by_rows.gathered)]
        for key, size in found:
            moved[key].append(size)
    return tuple(
        Collective(kind, axis, what, len(each), sum(each)) for (kind, axis, what), each in moved.items() if sum(each)
    )


def _between_activations(
    split: Sequence[Mapping[Axis, int]], costs: Costs
) -> list[tuple[PossibleCollective, Mapping[Axis, int]]]:
    """What moves because axes are split, with their ways; of what is added up before it is moved the largest."""
    found: list[tuple[PossibleCollective, Mapping[Axis, int]]] = []
    largest: dict[tuple[int, bool], tuple[PossibleCollective, Mapping[Axis, int]]] = {}
    for ways in split:
        for one in costs.collectives(axis for axis, parts in ways.items() if parts > 1):
            key = id(one.of), one.what.startswith(GRADIENT)
            known = largest.get(key)
            if one.of is None:
                found.append((one, ways))
            elif known is None or costs.bytes(*known) < costs.bytes(one, ways):
                largest[key] = one, ways
    return found + list(largest.values())


def _among_examples(
    reading: Reading, split: Sequence[Mapping[Axis, int]], costs: Costs, sizes: Mapping[str, int]
) -> list[tuple[PossibleCollective, int]]:
    """What moves because examples are split, with its bytes each time.

    Rows that they take of one another, see `gather.neighbours`, those that all are compared with, and sums over all of
    them that the loss goes on with, as statistics of a batch or the gradient of a step within it. Of what is added up
    before it is moved the largest.
    """
    ways = sizes[DATA] * sizes[FSDP]
    over_tensor = {axis: parts for each in split for axis, parts in each.items()}
    found = dict[Any, tuple[PossibleCollective, int]]()
    for one in costs.collectives(reading.batch_axes if ways > 1 else ()):
        moved = {axis for dim in one.moved for axis in factors(dim)}
        are_sums = one.kind == ALL_REDUCE and bool(moved) and moved.isdisjoint(reading.batch_axes)
        are_taken = any(what in one.what for what in (NEIGHBOURS, COMPARED))
        if are_sums or (are_taken and reading.batch_axes.issuperset(*map(factors, one.if_split))):
            whole = costs.bytes(one, {**over_tensor, **dict.fromkeys(reading.batch_axes, 1)}) // max(1, one.count)
            size = whole // ways if one.kind == REDUCE_SCATTER else whole
            key = id(one) if one.of is None else (id(one.of), one.what.startswith(GRADIENT))
            found[key] = max(found.get(key, (one, 0)), (one, size), key=lambda pair: pair[1] * pair[0].count)
    return list(found.values())


def _rows(
    parameter: Parameter, layout: Layout, reading: Reading, sizes: Mapping[str, int], *, is_frozen: bool
) -> Moved:
    """Rows that are looked up in a table that `fsdp` splits, and their gradients."""
    features, indexed = (
        any(FSDP in layout.stored[dim] for dim in dims) for dims in dims_of_moving_rows(parameter, reading, sizes)
    )
    if sizes[FSDP] == 1 or not (features or indexed):
        return []
    lookups = reading.rows[parameter.path]
    of_one = math.prod(axis.size for dim in lookups[0].features for axis in factors(dim))
    size = sum(lookup.rows * lookup.itemsize for lookup in lookups) // (sizes[DATA] * sizes[FSDP]) * of_one
    there, back = (ALL_TO_ALL, size), (ALL_TO_ALL, size)
    if indexed:
        there, back = (REDUCE_SCATTER, size), (ALL_GATHER, size * sizes[FSDP])
    found = [((kind, FSDP, ROWS), size) for kind, size in ((there,) if is_frozen else (there, back))]
    is_uneven = _place_of_uneven(parameter, layout, sizes) is not None
    return [*found, ((ALL_GATHER, TENSOR, ROWS), size)] if is_uneven else found


Moved = list[tuple[tuple[str, str, str], int]]


def _exchanged(size: int, parameter: Parameter, layout: Layout, sizes: Mapping[str, int], *, is_frozen: bool) -> Moved:
    """Exchanging projections that are several in one parameter of so many bytes, over `tensor` there and back."""
    if layout.parts == 1 or _is_exchanged(layout):
        return []
    shard, what = size // layout.ways(sizes), (PARAMETERS,) if is_frozen else (PARAMETERS, GRADIENTS)
    place = next(place for place, used in enumerate(layout.gathered) if TENSOR in used)
    first = "+".join(axis for axis in (FSDP, TENSOR) if axis in layout.stored[place])
    if exchange(parameter, layout.stored, layout.gathered, sizes) is None:
        ways = math.prod(sizes[axis] for axis in layout.stored[place])
        return [((ALL_GATHER, first, one), shard * ways) for one in what]
    return [((ALL_TO_ALL, over, one), shard) for one in what for over in (first, TENSOR)]


def _where_used(
    size: int, layout: Layout, used: Collection[str], sizes: Mapping[str, int], *, is_recomputed: bool
) -> Moved:
    """Gathering one parameter of so many bytes to where it is used."""
    stored = _axes(layout.stored)
    whole = size // math.prod(sizes[axis] for axis in used)
    gathered = "+".join(axis for axis in (FSDP, TENSOR) if axis in stored and axis not in used)
    uses = (PARAMETERS, AGAIN) if is_recomputed else (PARAMETERS,)
    return [((ALL_GATHER, gathered, use), whole) for use in uses] if size // layout.ways(sizes) < whole else []


def _gradient(size: int, layout: Layout, used: Collection[str], sizes: Mapping[str, int], *, is_summed: bool) -> Moved:
    """Adding up the gradient of one parameter; over `tensor` too where each device of it has a part of the sum."""
    found, stored = [], _axes(layout.stored)
    shard = size // layout.ways(sizes)
    if is_summed:
        over = [axis for axis in (DATA, FSDP, TENSOR) if sizes[axis] > 1]
        return [((ALL_REDUCE, "+".join(over), GRADIENTS), size)]
    if FSDP in stored and FSDP not in used and sizes[FSDP] > 1:
        found.append(((REDUCE_SCATTER, FSDP, GRADIENTS), shard))
    batch = [axis for axis in (DATA, FSDP) if sizes[axis] > 1 and axis not in stored]
    if batch:
        found.append(((ALL_REDUCE, "+".join(batch), GRADIENTS), shard))
    return found


def in_a_step(
    moved: Sequence[Collective], passes: int, scale: float, *, regathers: bool, kept: float
) -> tuple[Collective, ...]:
    """What a step of several passes moves: parameters and gradients in each, activations in proportion to the batch.

    Args:
        moved: in one forward and backward pass.
        passes: how many.
        scale: examples of a step to those of that pass.
        regathers: whether all parameters are gathered once more in the backward pass.
        kept: bytes of a gradient as passes add it up, to those that one of them makes.
    """
    found = []
    for one in moved:
        if one.what == GRADIENTS and one.axis == DATA:  # once, behind the last pass
            found.append(one if passes == 1 else replace(one, bytes=int(kept * one.bytes)))
        elif one.what == AGAIN and regathers:
            continue  # they are among all
        elif one.what in PER_PASS:
            twice = 2 if regathers and one.what == PARAMETERS else 1
            found.append(replace(one, count=one.count * passes * twice, bytes=one.bytes * passes * twice))
        elif one.kind == ALL_REDUCE and one.axis != TENSOR:  # sums over examples, however many they are
            found.append(replace(one, count=one.count * passes, bytes=one.bytes * passes))
        else:
            found.append(replace(one, count=one.count * passes, bytes=int(one.bytes * scale)))
    return tuple(found)


def _beside_split(reading: Reading, layouts: Sequence[Layout]) -> set[Axis]:
    """Dims that are never split, of parameters that are split over `tensor` elsewhere: ranks of low-rank paths."""
    return {
        axis
        for parameter, layout in zip(reading.parameters, layouts, strict=True)
        if TENSOR in _axes(layout.gathered)
        for axis in parameter.axes
        if axis.whole
    }


def _axes(dims: Sequence[Sequence[str]]) -> set[str]:
    return {axis for dim in dims for axis in dim}


def _uneven(parameters: Sequence[Parameter], layouts: Sequence[Layout], sizes: Mapping[str, int]) -> dict[Axis, None]:
    """Axes of which `tensor` takes uneven parts, such as a vocabulary that does not divide."""
    pairs = zip(parameters, layouts, strict=True)
    places = [(parameter, _place_of_uneven(parameter, layout, sizes)) for parameter, layout in pairs]
    return {parameter.dims[place][0]: None for parameter, place in places if place is not None}


def _uneven_tables(reading: Reading, layouts: Sequence[Layout], sizes: Mapping[str, int]) -> set[Axis]:
    """Those of tables whose rows move: every device of `tensor` has some features of all rows."""
    tables = [
        (parameter, layout)
        for parameter, layout in zip(reading.parameters, layouts, strict=True)
        if parameter.path in reading.rows and any(dims_of_moving_rows(parameter, reading, sizes))
    ]
    return set(_uneven([parameter for parameter, _ in tables], [layout for _, layout in tables], sizes))


def _is_exchanged(layout: Layout) -> bool:
    """Whether a parameter is used in parts of another dim than it lives in."""
    pairs = [(TENSOR in lives, TENSOR in used) for lives, used in zip(layout.stored, layout.gathered, strict=True)]
    return (True, False) in pairs and (False, True) in pairs


def _place_of_uneven(parameter: Parameter, layout: Layout, sizes: Mapping[str, int]) -> int | None:
    """The dim of a parameter that is used in uneven parts."""
    dims = enumerate(zip(parameter.shape, layout.gathered, strict=True))
    return next((place for place, (size, used) in dims if TENSOR in used and size % sizes[TENSOR]), None)


def _cut_axes(
    reading: Reading, chosen: Sequence[Candidate], layouts: Sequence[Layout], sizes: Mapping[str, int]
) -> set[Axis]:
    """Leading factors of fused projections: blocks of them are moved where the program takes them apart."""
    taken = {axis for candidate in chosen for axis in candidate.chain}
    taken |= set(_uneven(reading.parameters, layouts, sizes))
    return {
        dim[0]
        for parameter, layout in zip(reading.parameters, layouts, strict=True)
        for dim, used in zip(parameter.dims, layout.gathered, strict=True)
        if TENSOR in used and dim and dim[0] not in taken and layout.by_rows is None and layout.parts == 1
    }
