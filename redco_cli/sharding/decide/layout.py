"""From chosen axes to where each parameter lives and where it is used, with the reason.

Every parameter gets the first of these that applies:

1. `override`: what the user says.
2. A chosen axis leads one of its dims: split over `tensor` there. Fused projections, whose chosen axis is behind a
   factor such as the three of query, key and value, are split into contiguous blocks, and what is cut is moved; where
   that is more bytes than the weights, these are.
3. Keys and values with fewer heads than shards: whole, or split along with the head, whichever moves fewer bytes.
4. What is left and large, such as tables of positions or a vocabulary that does not divide: a shard of it lives on each
   device, and the whole is gathered where it is used. Where that costs more than summing what it is multiplied with, a
   weight is used by rows.

Then the first dim that divides goes over `fsdp`, with or without `tensor`: a parameter is gathered over it where it is
used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from redco_cli.sharding.axes import Dim, factors
from redco_cli.sharding.decide.choose import Candidate, Chain, by_rows, leading
from redco_cli.sharding.decide.placed import Layout
from redco_cli.sharding.decide.projections import APART, BLOCKS, Projections, exchange, projections, told_apart
from redco_cli.sharding.decide.reasons import called, reason_without_tensor, split_reason, whole_reason
from redco_cli.sharding.decide.tables import dims_of_moving_rows
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, DimShardings
from redco_cli.sharding.program.reading import Reading

SMALL = 2**20
"""Bytes below which gathering a parameter costs more in latency than its copies cost in memory."""
REPLICATED_SHARE = 0.09
"""Share of all parameter bytes up to which small parameters are whole on every device of the tensor axis."""
_UNEVEN = 1.1
"""How much more room uneven parts of a dim may take than even ones would."""


def lay_out(
    reading: Reading, chosen: Sequence[Candidate], sizes: Mapping[str, int], given: Mapping[str, Layout]
) -> list[Layout]:
    """A layout for every parameter of a program.

    Args:
        reading: the program.
        chosen: the axes to split over `tensor`.
        sizes: of all three mesh axes.
        given: path to layout, for parameters that the user has decided on.
    """
    parameters = reading.parameters
    apart = told_apart(reading, chosen, sizes)
    layouts = [given.get(p.path) or _over_tensor(p, reading, chosen, apart, sizes) for p in parameters]
    decided = [parameter.path in given for parameter in parameters]
    whole = [any(_routes(parameter, dim, reading) for dim in parameter.dims) for parameter in parameters]
    layouts = _left_over(reading, layouts, list(map(any, zip(decided, whole, strict=True))), chosen, sizes)
    return [
        layout if done else _over_fsdp(parameter, layout, reading, sizes)
        for parameter, layout, done in zip(parameters, layouts, decided, strict=True)
    ]


def _over_tensor(
    parameter: Parameter,
    reading: Reading,
    chosen: Sequence[Candidate],
    apart: Collection[Chain],
    sizes: Mapping[str, int],
) -> Layout:
    whole: DimShardings = ((),) * len(parameter.shape)
    if sizes[TENSOR] == 1:
        return Layout(whole, whole, reason_without_tensor(parameter, sizes))
    by_chain = {candidate.chain: candidate for candidate in chosen}
    several = projections(parameter, {axis for chain in by_chain for axis in chain}, sizes[TENSOR])
    made = [m.produced for m in reading.matmuls.get(parameter.path, ())]
    for place, dim in enumerate(parameter.dims):
        if _routes(parameter, dim, reading):
            return Layout(whole, whole, f"router: whole, as scores of {parameter.shape[place]} experts are few bytes")
        ways = leading(dim, sizes[TENSOR], reading.within_heads | reading.input_axes)
        # What is made of an array is in shards as the array is: to gather that moves less than to sum all it makes.
        feeds_itself = several is not None and several.axis in dim
        feeds_itself |= bool(made) and dim in parameter.dims[place + 1 :] and all(_made_by(one, dim) for one in made)
        if ways is not None and tuple(ways) in by_chain and not feeds_itself:
            split = _with(whole, place, TENSOR)
            return Layout(split, split, split_reason(parameter, place, tuple(ways), reading, sizes[TENSOR]))
    if several is not None:
        return _fused(parameter, several, reading, sizes, is_cheaper_apart=several.leading in apart)
    return _few_heads(parameter, chosen, reading, sizes) or Layout(
        whole, whole, whole_reason(parameter, reading, sizes[TENSOR])
    )


def _routes(parameter: Parameter, dim: Dim, reading: Reading) -> bool:
    """Whether a dim of a weight says which expert: split, it would add up gradients of its input for very little."""
    matmuls = reading.matmuls.get(parameter.path, ())
    if not dim or not any(len(m.produced) == 1 and factors(m.produced[0]) == dim for m in matmuls):
        return False
    return reading.routes.issuperset(dim) or (len(dim) == 1 and dim[0] in reading.experts)


def _fused(
    parameter: Parameter,
    several: Projections,
    reading: Reading,
    sizes: Mapping[str, int],
    *,
    is_cheaper_apart: bool,
) -> Layout:
    """Several projections in one dim: each split by itself, or contiguous blocks of all of them together.

    Blocks, too, where a weight lives so that it cannot be told apart in shards, and is too large to gather.
    """
    whole: DimShardings = ((),) * len(parameter.shape)
    split = _with(whole, several.place, TENSOR)
    reason = f"{several.count} projections of {several.axis.size} {called(several.axis, reading)} in one"
    if parameter.is_vector:
        return Layout(whole, whole, f"{reason}: whole, each cut where it is used")
    if is_cheaper_apart:
        apart = Layout(split, split, f"{reason}: {APART}", parts=several.count)
        lives = _over_fsdp(parameter, apart, reading, sizes)
        if parameter.bytes < SMALL or exchange(parameter, lives.stored, lives.gathered, sizes) is not None:
            return apart
    return Layout(split, split, f"{reason}: {BLOCKS}")


def _few_heads(
    parameter: Parameter, chosen: Sequence[Candidate], reading: Reading, sizes: Mapping[str, int]
) -> Layout | None:
    """Keys or values with fewer heads than shards, whose queries are split: whole, or split along with the head.

    For n tokens on a device, k heads of size d, an input of size r, w = r·k·d and t shards, they move beside each other

        along with the head    n·d to gather it among those that share the head, n·r to add up the input's gradient
        whole                  n·k·d and w to gather gradients that follow the queries, (1 - 1/t)·w more of gradients

    A single head follows nothing, so that whole it gathers nothing; in a loop over stacked layers the compiler splits
    whole ones by their heads, so that n·r is moved either way and n·k·d is not.
    """
    tensor = sizes[TENSOR]
    whole: DimShardings = ((),) * len(parameter.shape)
    heads = math.prod(axis.size for axis in parameter.axes & reading.heads)
    for place, dim in enumerate(parameter.dims):
        matmuls = [m for m in reading.matmuls.get(parameter.path, ()) if _made_by(m.produced, dim)]
        attends = any(axis in reading.within_heads for axis in dim)
        mine = parameter.axes & reading.heads or reading.heads  # a single head has no axis of its own to tell it by
        queries = any(candidate.chain[0] in mine for candidate in chosen)
        if (
            not (attends and matmuls and queries)
            or heads >= tensor
            or tensor % heads
            or parameter.shape[place] % tensor
        ):
            continue
        tokens = _tokens(matmuls[0].activation, matmuls[0].contracted, reading, sizes)
        features = parameter.shape[place]
        inputs = math.prod(axis.size for summed in matmuls[0].contracted for axis in factors(summed))
        stacked = any(parameter.layers())
        along = tokens * features // heads + (0 if stacked and heads > 1 else tokens * inputs)
        apart = inputs * features * (tensor - 1) // tensor
        if heads > 1:
            apart += inputs * features + (0 if stacked else tokens * features)
        along, apart = along * parameter.dtype.itemsize, apart * parameter.dtype.itemsize
        few = f"{heads} KV head{'s' * (heads > 1)} for {tensor} shards"
        if heads > 1 and not set(dim) & reading.heads:
            return Layout(whole, whole, f"{few}: whole, as heads have a dim of their own")
        if along < apart:
            split = _with(whole, place, TENSOR)
            return Layout(
                split, split, f"{few}: split along with the head, {along} bytes moved against {apart} if whole"
            )
        return Layout(whole, whole, f"{few}: whole, {apart} bytes moved against {along} if split along with the head")
    return None


def _made_by(made: Sequence[Dim], dim: Dim) -> bool:
    return any(set(factors(other)) & set(dim) for other in made)


def _tokens(taken: Sequence[Dim], summed: Sequence[Dim], reading: Reading, sizes: Mapping[str, int]) -> int:
    inner = {axis for dim in summed for axis in factors(dim)}
    axes = [axis for dim in taken for axis in factors(dim) if axis not in inner]
    split = sizes[DATA] * sizes[FSDP] if any(axis in reading.batch_axes for axis in axes) else 1
    return max(1, math.prod(axis.size for axis in axes) // split)


def _left_over(
    reading: Reading,
    layouts: Sequence[Layout],
    decided: Sequence[bool],
    chosen: Sequence[Candidate],
    sizes: Mapping[str, int],
) -> list[Layout]:
    """Stores shards of what would be whole on every device, largest first, until little enough is."""
    result, parameters, tensor = list(layouts), reading.parameters, sizes[TENSOR]
    if tensor == 1:
        return result
    whole = [i for i, layout in enumerate(layouts) if not any(layout.stored)]
    left = sum(parameters[i].bytes for i in whole)
    total = sum(parameter.bytes for parameter in parameters)
    by_size: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i in whole:
        by_size.setdefault((parameters[i].bytes, parameters[i].shape), []).append(i)
    for (size, _), alike in sorted(by_size.items(), reverse=True):  # equal ones are treated alike
        enough = left <= REPLICATED_SHARE * total
        for i in alike:
            parameter, layers = parameters[i], parameters[i].layers()
            per_layer = size // math.prod(s for s, layer in zip(parameter.shape, layers, strict=True) if layer)
            bound = parameter.indivisible()
            places = [p for p, s in enumerate(parameter.shape) if s % tensor == 0 and not bound[p]]
            if decided[i] or not places or parameter.is_vector or (per_layer < SMALL and enough):
                continue
            left -= size
            result[i] = _stored(parameter, layouts[i], max(places, key=lambda p: parameter.shape[p]), reading, tensor)
            rows = by_rows(parameter, chosen, reading, sizes)
            if rows is not None and not any(TENSOR in dim for dim in result[i].gathered):
                split = _with(layouts[i].stored, rows.place, TENSOR)
                result[i] = Layout(split, split, f"{layouts[i].reason}; by rows alone, its results are summed", rows)
    return result


def _stored(parameter: Parameter, layout: Layout, place: int, reading: Reading, tensor: int) -> Layout:
    """In shards of `place`; used whole, or in uneven parts of a vocabulary that does not divide.

    The largest part is what each device has room for: of few entries, such as 6 for 4 devices, that is too many.
    """
    stored = _with(layout.stored, place, TENSOR)
    for row, dim in enumerate(parameter.dims):
        if row == place or len(dim) != 1 or dim[0] not in reading.output_axes - reading.within_heads:
            continue
        size = dim[0].size
        if size % tensor and -(-size // tensor) * tensor <= _UNEVEN * size:
            reason = f"{size} do not divide: stored in shards of the other dim, used in uneven parts"
            return Layout(stored, _with(layout.gathered, row, TENSOR), reason)
    return replace(layout, stored=stored, reason=f"{layout.reason}; stored in shards, gathered where used")


def _over_fsdp(parameter: Parameter, layout: Layout, reading: Reading, sizes: Mapping[str, int]) -> Layout:
    """The features of a table whose rows move; else the first dim that divides, be it in shards over `tensor` already.

    Shards of the first dim lie one after the other in memory: what is gathered of them needs no copy in another order.
    Vectors stay whole.
    """
    bound, moving = parameter.indivisible(), dims_of_moving_rows(parameter, reading, sizes)
    if sizes[FSDP] == 1 or parameter.is_vector:
        return layout
    ways = [sizes[FSDP] * (sizes[TENSOR] if taken else 1) for taken in layout.stored]
    # Projections that are told apart are exchanged among the devices of `tensor` alone where another dim is split.
    every = sorted(range(len(parameter.shape)), key=lambda place: layout.parts > 1 and bool(layout.stored[place]))
    for among in (*moving, every):
        places = [place for place in among if parameter.shape[place] % ways[place] == 0 and not bound[place]]
        if places:
            place = places[0]
            gathered_last = bool(layout.stored[place]) and TENSOR not in layout.gathered[place]
            stored = replace(layout, stored=_with(layout.stored, place, FSDP, in_front=gathered_last))
            is_only_looked_up = any(place in dims for dims in moving) and parameter.path not in reading.matmuls
            return _looked_up(stored, layout, place, sizes) if is_only_looked_up else stored
    indivisible = f"no dim divides over fsdp {sizes[FSDP]}"
    return replace(layout, reason=indivisible if sizes[TENSOR] == 1 else f"{layout.reason}; {indivisible}")


def _looked_up(stored: Layout, layout: Layout, place: int, sizes: Mapping[str, int]) -> Layout:
    """A table that is never gathered."""
    moved = f"rows that are looked up move over fsdp {sizes[FSDP]}, the table does not"
    reason = f"table: {moved}" if sizes[TENSOR] == 1 else f"{layout.reason}; {moved}"
    return replace(stored, gathered=_with(layout.gathered, place, FSDP), reason=reason)


def _with(dims: DimShardings, place: int, axis: str, *, in_front: bool = False) -> DimShardings:
    axes = (axis, *dims[place]) if in_front else (*dims[place], axis)
    return (*dims[:place], axes, *dims[place + 1 :])
