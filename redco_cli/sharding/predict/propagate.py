"""How every array of a program is split over a mesh, given how its inputs are.

One pass from the inputs to the outputs, as a compiler's partitioner does it: elementwise operations keep a split,
products keep the splits of dims that they do not sum over, a reshape keeps the split of a leading factor, a loop
carries what its body returns. Arrays that depend on no input (masks, zeros) are split as what they meet. Where no rule
knows better an array is whole on every device: what is predicted from it is then rather too much than too little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redco_cli.sharding.plan import DimShardings, as_dims
from redco_cli.sharding.predict.flat import flatten
from redco_cli.sharding.predict.kinds import ELEMENTWISE, REDUCTIONS, SCATTERED
from redco_cli.sharding.predict.operations import LITERAL, FlatProgram, Op
from redco_cli.sharding.predict.splits import Splits, distinct, join, rule, shard_bytes, whole
from redco_cli.sharding.program.matrices import OF_LAST_DIMS, leading


def local_bytes(closed_jaxpr: Any, in_specs: Sequence[Any], mesh: Mapping[str, int]) -> list[int]:
    """Bytes on one device of every array of a traced program.

    Args:
        closed_jaxpr: as `jax.make_jaxpr` returns it, with whole (global) shapes.
        in_specs: a `PartitionSpec` for each of its arguments.
        mesh: axis to size.

    Returns:
        By the id of the array in `flatten(closed_jaxpr)`.
    """
    flat = flatten(closed_jaxpr)
    return shard_bytes(flat, propagate(flat, in_specs), mesh)


def propagate(flat: FlatProgram, in_specs: Sequence[Any]) -> list[DimShardings]:
    """How each array of a program is split; the sizes of the mesh play no part in it.

    Args:
        flat: a program.
        in_specs: a `PartitionSpec` (or the same as a tuple) for each of its inputs.

    Returns:
        By id of the array.
    """
    shapes = flat.arrays.shapes
    given = tuple(as_dims(spec, len(shapes[x])) for spec, x in zip(in_specs, flat.inputs, strict=True))
    if given not in flat.propagated:
        splits = Splits(flat)
        splits.run(flat, list(given))
        known = zip(splits.known, shapes, strict=True)
        flat.propagated[given] = [whole(shape) if dims is None else dims for dims, shape in known]
    return flat.propagated[given]


def _elementwise(splits: Splits, op: Op) -> list[DimShardings | None]:
    shape = splits.shapes[op.results[0]]
    dims = join(splits.of(x) for x in op.operands if x != LITERAL and splits.shapes[x] == shape)
    if dims is None and any(splits.of(x) is not None for x in op.operands):
        dims = whole(shape)
    if dims is not None:
        for operand in op.operands:
            splits.settle(operand, dims)
    return [dims]


rule(*ELEMENTWISE)(_elementwise)


@rule("copy", "stop_gradient", "name", "pvary", "copy_p", "rev")
@rule("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod")
def _same(splits: Splits, op: Op) -> list[DimShardings | None]:
    return [splits.of(op.operands[0])]


@rule("optimization_barrier", "device_put", SCATTERED)
def _each(splits: Splits, op: Op) -> list[DimShardings | None]:
    return [splits.of(operand) for operand in op.operands]


@rule("sharding_constraint")
def _constraint(splits: Splits, op: Op) -> list[DimShardings | None]:
    spec = getattr(op.params["sharding"], "spec", None)
    return [splits.of(op.operands[0]) if spec is None else as_dims(spec, len(splits.shapes[op.results[0]]))]


@rule("iota", "random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split", "empty")
def _nothing(splits: Splits, op: Op) -> list[DimShardings | None]:
    return [None] * len(op.results)


@rule("transpose")
def _transpose(splits: Splits, op: Op) -> list[DimShardings | None]:
    dims = splits.of(op.operands[0])
    return [None if dims is None else tuple(dims[place] for place in op.params["permutation"])]


@rule("broadcast_in_dim")
def _broadcast(splits: Splits, op: Op) -> list[DimShardings | None]:
    dims, shape = splits.of(op.operands[0]), splits.shapes[op.results[0]]
    if dims is None:
        return [None]
    result: list[tuple[str, ...]] = [()] * len(shape)
    for mine, place in zip(dims, op.params["broadcast_dimensions"], strict=True):
        result[place] = mine
    return [tuple(result)]


@rule("squeeze", "expand_dims", "reshape")
def _reshape(splits: Splits, op: Op) -> list[DimShardings | None]:
    dims, old, new = splits.of(op.operands[0]), splits.shapes[op.operands[0]], splits.shapes[op.results[0]]
    if dims is None:
        return [None]
    result: list[tuple[str, ...]] = [()] * len(new)
    here = there = 0
    while here < len(old) and there < len(new):
        first, place, left, right = dims[here], there, old[here], new[there]
        while left != right:  # dims that are merged or cut: together they hold the same elements
            if left < right:
                here += 1
                left *= old[here]
                first = first or (dims[here] if left == old[here] else ())
            else:
                there += 1
                right *= new[there]
                place = there if right == new[there] else place
        if first:
            result[place] = first
        here, there = here + 1, there + 1
    return [tuple(result)]


@rule("dot_general")
def _dot(splits: Splits, op: Op) -> list[DimShardings | None]:
    (left_sum, right_sum), (left_batch, right_batch) = op.params["dimension_numbers"]
    left, right = (splits.of(operand) for operand in op.operands)
    if left is None and right is None:
        return [None]
    left = left or whole(splits.shapes[op.operands[0]])
    right = right or whole(splits.shapes[op.operands[1]])
    batch = [left[a] or right[b] for a, b in zip(left_batch, right_batch, strict=True)]
    left_free = [axes for dim, axes in enumerate(left) if dim not in (*left_sum, *left_batch)]
    right_free = [axes for dim, axes in enumerate(right) if dim not in (*right_sum, *right_batch)]
    return [distinct([*batch, *left_free, *right_free])]


@rule("conv_general_dilated")
def _convolution(splits: Splits, op: Op) -> list[DimShardings | None]:
    numbers, result = op.params["dimension_numbers"], [()] * len(splits.shapes[op.results[0]])
    for operand, source, target in ((0, numbers.lhs_spec[0], 0), (1, numbers.rhs_spec[0], 1)):
        dims = splits.of(op.operands[operand])
        result[numbers.out_spec[target]] = dims[source] if dims else ()
    return [distinct(result)]


@rule(*REDUCTIONS)
def _reduce(splits: Splits, op: Op) -> list[DimShardings | None]:
    dims, gone = splits.of(op.operands[0]), op.params.get("axes", op.params.get("dimensions"))
    kept = None if dims is None else tuple(axes for dim, axes in enumerate(dims) if dim not in gone)
    return [kept] * len(op.results)


@rule("gather")
def _gather(splits: Splits, op: Op) -> list[DimShardings | None]:
    table, indices = (splits.of(operand) for operand in op.operands)
    if table is None and indices is None:
        return [None]
    numbers, shape = op.params["dimension_numbers"], splits.shapes[op.results[0]]
    sizes = splits.shapes[op.operands[0]]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [dim for dim in range(len(sizes)) if dim not in gone]
    result: list[tuple[str, ...]] = [()] * len(shape)
    for dim, place in zip(window, numbers.offset_dims, strict=True):
        result[place] = table[dim] if table and shape[place] == sizes[dim] else ()
    rest = [place for place in range(len(shape)) if place not in numbers.offset_dims]
    for dim, place in enumerate(rest):
        result[place] = indices[dim] if indices else ()
    for source, dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        result[rest[dim]] = result[rest[dim]] or (table[source] if table else ())
    return [distinct(result)]


@rule("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max", "scatter_min")
def _scatter(splits: Splits, op: Op) -> list[DimShardings | None]:
    target, indices, updates = (splits.of(operand) for operand in op.operands)
    numbers, shape = op.params["dimension_numbers"], splits.shapes[op.results[0]]
    if target is None and updates is None:
        return [None]
    result: list[tuple[str, ...]] = [()] * len(shape)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [dim for dim in range(len(shape)) if dim not in gone]
    if updates:
        for dim, place in zip(window, numbers.update_window_dims, strict=True):
            result[dim] = updates[place]
    for dim, source in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        result[dim] = indices[source] if indices else ()
    dims = join([target, distinct(result)])
    assert dims is not None
    splits.settle(op.operands[0], dims)
    return [dims]


@rule("concatenate", "pad", "dynamic_slice", "dynamic_update_slice", "slice", "sort", "reduce_precision")
def _keep(splits: Splits, op: Op) -> list[DimShardings | None]:
    """Dims at the same place are the same, whatever their sizes."""
    rank = len(splits.shapes[op.results[0]])
    arrays = [x for x in op.operands if x != LITERAL and len(splits.shapes[x]) == rank > 0]
    dims = join(splits.of(x) for x in arrays)
    if dims is not None:
        for operand in arrays:
            splits.settle(operand, dims)
    return [dims] * len(op.results)


@rule(*OF_LAST_DIMS)
def _of_last_dims(splits: Splits, op: Op) -> list[DimShardings | None]:
    dims = splits.of(op.operands[0])
    if dims is None:
        return [None] * len(op.results)
    lead = leading(op.name, op.params, len(dims))
    return [(*dims[:lead], *whole(splits.shapes[array][lead:])) for array in op.results]


@rule("custom_linear_solve")
def _solve(splits: Splits, op: Op) -> list[DimShardings | None]:
    """Solutions lie as the right-hand sides do."""
    return [splits.of(operand) for operand in op.operands[-len(op.results) :]]


@rule("stack")
def _stack(splits: Splits, op: Op) -> list[DimShardings | None]:
    """Arrays after one another along a dim of its own."""
    dims, axis = join(splits.of(x) for x in op.operands), op.params["axis"]
    if dims is None:
        return [None]
    for operand in op.operands:
        splits.settle(operand, dims)
    return [(*dims[:axis], (), *dims[axis:])]


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
def _attention(splits: Splits, op: Op) -> list[DimShardings | None]:
    """Queries [B, Q, H, D] to what is attended, alike, and for the backward pass a number for each [B, H, Q]."""
    dims = splits.of(op.operands[0])
    if dims is None:
        return [None] * len(op.results)
    batch, queries, heads, _ = dims
    return [dims if len(splits.shapes[array]) == len(dims) else (batch, heads, queries) for array in op.results]


@rule("scan")
def _scan(splits: Splits, op: Op) -> list[DimShardings | None]:
    constants, carried = op.params["num_consts"], op.params["num_carry"]
    given = [splits.of(operand) for operand in op.operands]
    slices = [None if dims is None else dims[1:] for dims in given[constants + carried :]]
    carry = given[constants : constants + carried]
    body = op.bodies[0]
    results = splits.run(body, [*given[:constants], *carry, *slices])
    settled = [join(pair) for pair in zip(carry, results[:carried], strict=True)]
    if settled != carry:
        results = splits.run(body, [*given[:constants], *settled, *slices])
    for operand, array in zip(op.operands[: constants + carried], body.inputs, strict=False):
        met = splits.of(array)
        if met is not None:
            splits.settle(operand, met)
    return [*settled, *(None if dims is None else ((), *dims) for dims in results[carried:])]


@rule("while")
def _while(splits: Splits, op: Op) -> list[DimShardings | None]:
    first = op.params["cond_nconsts"]
    given = [splits.of(operand) for operand in op.operands[first:]]
    return splits.run(op.bodies[0], given)


@rule("cond")
def _cond(splits: Splits, op: Op) -> list[DimShardings | None]:
    given = [splits.of(operand) for operand in op.operands[1:]]
    branches = [splits.run(body, given) for body in op.bodies]
    joined = [join(results) for results in zip(*branches, strict=True)]
    for body in op.bodies:
        for array, dims in zip(body.outputs, joined, strict=True):
            if array != LITERAL and dims is not None:
                splits.settle(array, dims)
    return joined
