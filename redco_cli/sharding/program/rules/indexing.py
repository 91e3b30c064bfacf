"""How logical axes pass through primitives that cut, join, read or write parts of arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from redco_cli.sharding.axes import Dim, factors, fresh, mark_layer, split, unify
from redco_cli.sharding.program.events import GRADIENT, LOOKED_UP, NEIGHBOURS, RowLookup, Value, itemsize
from redco_cli.sharding.program.rows.lookups import neighbours
from redco_cli.sharding.program.walk import Walk, combined, rule, viewed


@rule("concatenate")
def _concatenate(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    place, aval = equation.params["dimension"], equation.outvars[0].aval
    dims = list(operands[0].dims)
    dims[place] = fresh(aval.shape[place])
    result = combined(operands, dims)
    walk.joined[factors(dims[place])] = _ends(walk, operands, equation.invars, place)
    for x, atom in zip(operands, equation.invars, strict=True):
        for i, dim in enumerate(x.dims):
            if i != place:
                unify(dims[i], dim)
        walk.needs_whole([x.dims[place]], x, atom.aval, "concatenated array")
    walk.needs_whole([dims[place]], result, aval, "concatenated array")
    return [result]


def _ends(walk: Walk, operands: Sequence[Value], atoms: Sequence[Any], place: int) -> tuple[int, ...]:
    """Where the pieces of what is joined end, those of what was joined before among them."""
    start, found = 0, list[int]()
    for x, atom in zip(operands, atoms, strict=True):
        found += [start + end for end in walk.joined.get(factors(x.dims[place]), ())]
        start += atom.aval.shape[place]
        found.append(start)
    return tuple(dict.fromkeys(found))


@rule("split")
def _split(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    place, sizes = equation.params["axis"], equation.params["sizes"]
    return _slices(walk, x, equation.invars[0].aval, place, [int(size) for size in sizes])


def _slices(walk: Walk, x: Value, aval: Any, place: int, sizes: Sequence[int]) -> list[Value]:
    """Contiguous slices of one dim. Equal ones are an index of a factor: [3·h·d] is [3, h, d] indexed by its first."""
    parts = None
    if len(set(sizes)) == 1:
        parts = split(x.dims[place], [len(sizes), sizes[0]])
    if parts is None:
        walk.cuts.append((x.dims[place], tuple(itertools.accumulate(sizes))))
    walk.needs_whole([x.dims[place] if parts is None else parts[0]], x, aval, "array that is cut into parts")
    dims = [fresh(size) if parts is None else parts[1] for size in sizes]
    return [Value((*x.dims[:place], dim, *x.dims[place + 1 :]), x.requires_grad, x.from_batch) for dim in dims]


@rule("slice", "dynamic_slice", "pad")
def _slice(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, aval, shape = operands[0], equation.invars[0].aval, equation.outvars[0].aval.shape
    padding = equation.params.get("padding_config", ((0, 0, 0),) * len(shape))
    starts, strides = equation.params.get("start_indices"), equation.params.get("strides")
    aligned = starts is not None and strides is None
    dims = list(x.dims)
    for i, (old, new) in enumerate(zip(aval.shape, shape, strict=True)):
        if old == new and not any(padding[i]):
            continue
        if new == 1 and len(shape) > 2 and not x.from_batch:  # a matrix of a stack, and not a row of one
            mark_layer(x.dims[i])
        parts, cut = None, 0
        if aligned and 0 < new < old and old % new == 0 and starts[i] % new == 0:
            parts = split(x.dims[i], [old // new, new])
        elif strides is not None and new * strides[i] == old and starts[i] < strides[i]:
            parts, cut = split(x.dims[i], [new, strides[i]]), 1  # every second one of [d·2] is [d, 2] at an index
        if aligned:
            walk.cuts.append((x.dims[i], (starts[i], starts[i] + new)))
        walk.needs_whole([x.dims[i] if parts is None else parts[cut]], x, aval, "array that is cut into parts")
        dims[i] = fresh(new) if parts is None else parts[1 - cut]
    chosen = any(index.from_batch for index in operands[1:])
    return [viewed(x, dims)._replace(from_batch=x.from_batch or chosen)]


@rule("dynamic_update_slice")
def _update_slice(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, update = operands[:2]
    shapes = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    for i, (old, new) in enumerate(zip(*shapes, strict=True)):
        if old == new:
            unify(x.dims[i], update.dims[i])
        else:
            walk.needs_whole([x.dims[i]], x, equation.invars[0].aval, "array that is written in parts")
    return [combined(operands[:2], x.dims)]


@rule("gather")
def _gather(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    table, indices = operands[:2]
    params, aval, shape = equation.params, equation.invars[0].aval, equation.outvars[0].aval.shape
    numbers, slices = params["dimension_numbers"], params["slice_sizes"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    dropped = {*numbers.collapsed_slice_dims, *batching}
    kept = [i for i in range(len(table.dims)) if i not in dropped]
    dims: list[Dim | None] = [None] * len(shape)
    for place, i in zip(numbers.offset_dims, kept, strict=True):
        whole = slices[i] == aval.shape[i]
        dims[place] = table.dims[i] if whole else fresh(slices[i])
        if not whole:
            walk.needs_whole([table.dims[i]], table, aval, "array that is read in parts")
    for i, j in batching.items():
        unify(table.dims[i], indices.dims[j])
    rest = iter(indices.dims[:-1])
    result = combined(operands[:1], [next(rest) if dim is None else dim for dim in dims])
    indexed = [table.dims[i] for i in numbers.collapsed_slice_dims]
    walk.may_need("all-reduce", indexed, result, equation.outvars[0].aval, LOOKED_UP)
    if table.from_batch and neighbours(equation):
        walk.may_need("all-gather", table.dims[:1], table, aval, NEIGHBOURS)
        if table.requires_grad:
            walk.may_need("reduce-scatter", table.dims[:1], table, aval, f"{GRADIENT} {NEIGHBOURS}")
    if not table.from_batch:
        walk.lookups.extend(indexed)
        if indices.from_batch and all(slices[i] == aval.shape[i] for i in kept):
            features = tuple(table.dims[i] for i in kept)
            rows, used = equation.outvars[0], walk.casts.get(equation.outvars[0], aval.dtype)
            count = math.prod(equation.invars[1].aval.shape[:-1])
            walk.rows.append(RowLookup(table.path, features, count, min(itemsize(rows.aval), used.itemsize)))
    return [Value(result.dims, table.requires_grad, table.from_batch or indices.from_batch)]


@rule(
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
)
def _scatter(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, indices, update = operands[:3]
    numbers, aval = equation.params["dimension_numbers"], equation.invars[0].aval
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    inserted = {*numbers.inserted_window_dims, *batching}
    windows = [i for i in range(len(x.dims)) if i not in inserted]
    update_shape = equation.invars[2].aval.shape
    for place, i in zip(numbers.update_window_dims, windows, strict=True):
        if update_shape[place] == aval.shape[i]:
            unify(x.dims[i], update.dims[place])
        else:
            walk.needs_whole([x.dims[i]], x, aval, "array that is written in parts")
    for i, j in batching.items():
        unify(x.dims[i], indices.dims[j])
    scattered = [d for i, d in enumerate(update.dims) if i not in numbers.update_window_dims]
    result = combined((x, update), x.dims)
    walk.may_need("all-reduce", scattered, result, aval, "rows added up")
    if update.requires_grad:
        written = [x.dims[i] for i in numbers.inserted_window_dims]
        walk.may_need("all-reduce", written, update, equation.invars[2].aval, "gradient of rows added up")
    if update.from_batch and neighbours(equation):
        walk.may_need("reduce-scatter", x.dims[:1], result, aval, NEIGHBOURS)
        if update.requires_grad:
            walk.may_need("all-gather", x.dims[:1], result, aval, f"{GRADIENT} {NEIGHBOURS}")
    return [result]
