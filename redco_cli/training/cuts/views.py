"""How the rows of a batch pass through operations that move elements: reshapes, slices, gathers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_cli.sharding.axes import Dim, fresh, reshape, split
from redco_cli.training.cuts.values import UNKNOWN, Kind, Value, rows
from redco_cli.training.cuts.walk import Walk, rule

_ROWS_OR_CONSTANT = (Kind.CONSTANT, Kind.ROWS)


@rule("transpose")
def _transpose(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    return [rows([x.dims[i] for i in equation.params["permutation"]]) if x.kind is Kind.ROWS else x]


@rule("reshape")
def _reshape(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, new = operands[0], equation.params["new_sizes"]
    if x.kind is not Kind.ROWS:
        return [x]
    dims, lost = reshape(x.dims, equation.invars[0].aval.shape, new)
    if any(walk.batch.of(x.dims[i]) for i in lost):
        return [UNKNOWN]
    return [rows([fresh(size) if dim is None else dim for dim, size in zip(dims, new, strict=True)])]


@rule("broadcast_in_dim")
def _broadcast(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x = operands[0]
    if x.kind is not Kind.ROWS:
        return [x]
    dims = [fresh(size) for size in equation.params["shape"]]
    for i, place in enumerate(equation.params["broadcast_dimensions"]):
        dims[place] = x.dims[i] or dims[place]
    return [rows(dims)]


@rule("squeeze")
def _squeeze(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    if x.kind is not Kind.ROWS:
        return [x]
    return [rows([dim for i, dim in enumerate(x.dims) if i not in equation.params["dimensions"]])]


@rule("expand_dims")
def _expand_dims(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    if x.kind is not Kind.ROWS:
        return [x]
    old, new = iter(x.dims), equation.params["dimensions"]
    return [rows([() if i in new else next(old) for i in range(len(equation.outvars[0].aval.shape))])]


@rule("concatenate")
def _concatenate(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Along the batch, parts of one size are a factor before it: chosen and rejected answers as one batch."""
    place, shape, batch = equation.params["dimension"], equation.outvars[0].aval.shape, walk.batch
    given = [x for x in operands if x.kind is not Kind.CONSTANT]
    if {x.kind for x in given} != {Kind.ROWS}:
        return [given[0] if all(x.kind is given[0].kind for x in given) else UNKNOWN]
    if any(batch.layout(x.dims[i]) != batch.layout(given[0].dims[i]) for x in given for i in _others(x, place)):
        return [UNKNOWN]
    dims = list(given[0].dims)
    if not batch.of(dims[place]):
        dims[place] = fresh(shape[place])
        return [rows(dims)] if not any(batch.of(x.dims[place]) for x in given) else [UNKNOWN]
    if len(given) < len(operands) or any(batch.layout(x.dims[place]) != batch.layout(dims[place]) for x in given):
        return [UNKNOWN]
    dims[place] = (*fresh(len(given)), *dims[place])
    return [rows(dims)]


def _others(x: Value, place: int) -> list[int]:
    return [i for i in range(len(x.dims)) if i != place]


@rule("stack")
def _stack(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    place, batch = equation.params["axis"], walk.batch
    given = [x for x in operands if x.kind is not Kind.CONSTANT]
    if {x.kind for x in given} != {Kind.ROWS} or any(batch.layouts(x) != batch.layouts(given[0]) for x in given):
        return [UNKNOWN]
    dims = given[0].dims
    return [rows([*dims[:place], fresh(len(operands)), *dims[place:]])]


@rule("unstack")
def _unstack(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,), place = operands, equation.params["axis"]
    if x.kind is Kind.ROWS:
        x = UNKNOWN if walk.batch.of(x.dims[place]) else rows([*x.dims[:place], *x.dims[place + 1 :]])
    return [x] * len(equation.outvars)


@rule("slice", "dynamic_slice", "pad")
def _slice(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, old, new = operands[0], equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if any(other.kind is not Kind.CONSTANT for other in operands[1:]):
        return [UNKNOWN]
    if x.kind is not Kind.ROWS:
        return [x]
    padding = equation.params.get("padding_config", ((0, 0, 0),) * len(new))
    starts = equation.params.get("start_indices")
    is_plain = starts is not None and equation.params["strides"] is None
    dims: list[Dim] = []
    for i, dim in enumerate(x.dims):
        if old[i] == new[i] and not any(padding[i]):
            dims.append(dim)
        elif not walk.batch.of(dim):
            dims.append(fresh(new[i]))
        else:
            part = _part(walk, dim, old[i], new[i], starts[i]) if is_plain else None
            if part is None:
                return [UNKNOWN]
            dims.append(part)
    return [rows(dims)]


def _part(walk: Walk, dim: Dim, old: int, new: int, start: int) -> Dim | None:
    """One of several equal parts of a dim, if the whole batch is in each."""
    parts = split(dim, [old // new, new]) if 0 < new < old and old % new == 0 and start % new == 0 else None
    return None if parts is None or walk.batch.of(parts[0]) else parts[1]


@rule("split")
def _split(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,), place, sizes = operands, equation.params["axis"], [int(size) for size in equation.params["sizes"]]
    if x.kind is not Kind.ROWS:
        return [x] * len(sizes)
    if walk.batch.of(x.dims[place]):
        same = len(set(sizes)) == 1
        part = _part(walk, x.dims[place], sum(sizes), sizes[0], 0) if same else None
        parts = None if part is None else [part] * len(sizes)
    else:
        parts = [fresh(size) for size in sizes]
    if parts is None:
        return [UNKNOWN] * len(sizes)
    return [rows([*x.dims[:place], part, *x.dims[place + 1 :]]) for part in parts]


@rule("dynamic_update_slice")
def _update_slice(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    written, starts = operands[:2], operands[2:]
    shapes = [atom.aval.shape for atom in equation.invars[:2]]
    if any(x.kind not in _ROWS_OR_CONSTANT for x in written) or any(x.kind is not Kind.CONSTANT for x in starts):
        return [UNKNOWN]
    return [_written(walk, written, [i for i, (a, b) in enumerate(zip(*shapes, strict=True)) if a == b], shapes[0])]


def _written(walk: Walk, written: Sequence[Value], whole: Sequence[int], shape: Sequence[int]) -> Value:
    """An array with another written into it, both with as many dims, of which those that are `whole` are equal."""
    batch, given = walk.batch, [x for x in written if x.kind is Kind.ROWS]
    places = batch.places(given[0])
    if not set(places) <= set(whole):
        return UNKNOWN
    if any(batch.layout(x.dims[i]) != batch.layout(given[0].dims[i]) for x in given for i in places):
        return UNKNOWN
    return rows([given[0].dims[i] if i in places else fresh(size) for i, size in enumerate(shape)])


@rule("gather")
def _gather(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    table, indices = operands[:2]
    if table.kind not in _ROWS_OR_CONSTANT or indices.kind not in _ROWS_OR_CONSTANT:
        return [UNKNOWN]
    numbers, slices = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    old, shape, batch = equation.invars[0].aval.shape, equation.outvars[0].aval.shape, walk.batch
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    kept = [i for i in range(len(old)) if i not in {*numbers.collapsed_slice_dims, *paired}]
    # The dims of the result that are no offsets are those of the indices, in order, without the last.
    looked_up = [place for place in range(len(shape)) if place not in numbers.offset_dims]
    dims = [fresh(size) for size in shape]
    if indices.kind is Kind.ROWS:
        for j, target in enumerate(looked_up):
            dims[target] = indices.dims[j] if batch.of(indices.dims[j]) else dims[target]
    place: int | None
    for i in batch.places(table):
        if i in kept and slices[i] == old[i] and indices.kind is Kind.CONSTANT:
            place = numbers.offset_dims[kept.index(i)]
        elif i in paired:
            place = looked_up[paired[i]]
        else:
            place = _own_row(walk, indices, [dims[place] for place in looked_up], [shape[place] for place in looked_up])
            place = None if place is None else looked_up[place]
        if place is None or (batch.of(dims[place]) and batch.layout(dims[place]) != batch.layout(table.dims[i])):
            return [UNKNOWN]
        dims[place] = table.dims[i]
    found = [factor for dim in dims for factor in batch.of(dim)]
    return [rows(dims) if len(found) == len(set(found)) else UNKNOWN]


def _own_row(walk: Walk, indices: Value, dims: Sequence[Dim], shape: Sequence[int]) -> int | None:
    """Along which dim indices count the rows of a batch, so that each row looks up in itself; None if they may not."""
    if not indices.counts or indices.from_key:
        return None
    if indices.kind is Kind.ROWS:
        places = [place for place, dim in enumerate(dims) if walk.batch.of(dim)]
    else:
        places = [place for place, size in enumerate(shape) if size == walk.batch.axis.size]
    return places[0] if len(places) == 1 else None


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, indices, update = operands[:3]
    numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    whole = list(numbers.update_window_dims) == list(range(len(shape))) and not numbers.operand_batching_dims
    is_told = all(one.kind in _ROWS_OR_CONSTANT for one in (x, update)) and indices.kind is Kind.CONSTANT
    if not whole or not is_told:
        return [UNKNOWN]
    new = equation.invars[2].aval.shape
    return [_written(walk, [x, update], [i for i, size in enumerate(shape) if new[i] == size], shape)]
