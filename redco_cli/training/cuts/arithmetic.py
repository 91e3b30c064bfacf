"""How the rows of a batch pass through arithmetic: elementwise operations, products, sums over dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redco_cli.sharding.axes import Axis, Dim, fresh, fresh_dims
from redco_cli.sharding.program.matrices import OF_LAST_DIMS, leading
from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.training.cuts.values import CONSTANT, SUM, UNKNOWN, Kind, Value, rows
from redco_cli.training.cuts.walk import Walk, rule

_ADDITIONS = frozenset({"add", "sub", "add_any"})
_CASTS = ("convert_element_type", "copy", "copy_p", "reduce_precision", "sharding_constraint", "pvary")
_LINEAR = frozenset({"neg", "imag", "real", "stop_gradient", *_CASTS})
_GUARDS = frozenset({"abs", "max", "min", "clamp"})
"""What keeps a sum from being zero or overflowing; else it changes nothing."""
_STEPS = frozenset({"ceil", "floor", "is_finite", "round", "sign"})


@rule(*ELEMENTWISE.split())
def _elementwise(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    name, aval = equation.primitive.name, equation.outvars[0].aval
    if name == "select_n":
        if operands[0].kind not in (Kind.CONSTANT, Kind.ROWS):  # a guard such as `where(count > 0, mean, 0)`
            operands = operands[1:]
        found = _selected(walk, operands, aval.shape)
    elif all(x.kind in (Kind.CONSTANT, Kind.ROWS) for x in operands):
        found = _aligned(walk, operands, aval.shape)
    elif any(x.kind is Kind.UNKNOWN for x in operands):
        mixed = [x for x in operands if x.kind is Kind.MIXED]
        found = mixed[0] if mixed and name in _ADDITIONS else UNKNOWN
    elif aval.dtype == bool or name in _STEPS:
        found = UNKNOWN
    elif any(x.kind is Kind.MIXED for x in operands):
        found = next(x for x in operands if x.kind is Kind.MIXED)
    else:
        found = _with_sums(walk, equation, operands)
    return [found] * len(equation.outvars)


def _selected(walk: Walk, operands: Sequence[Value], shape: Sequence[int]) -> Value:
    kinds = {x.kind for x in operands} - {Kind.CONSTANT}
    if kinds <= {Kind.ROWS}:
        return _aligned(walk, operands, shape) if kinds else UNKNOWN
    if Kind.UNKNOWN in kinds or kinds in ({Kind.ROWS, Kind.SUM}, {Kind.ROWS, Kind.QUOTIENT}):
        return UNKNOWN
    return max(operands, key=lambda x: x.kind.value)


def _with_sums(walk: Walk, equation: Any, operands: Sequence[Value]) -> Value:
    """At least one operand is a SUM or a QUOTIENT, the others these or ROWS or CONSTANT."""
    name, moving = equation.primitive.name, [x for x in operands if x.kind is not Kind.CONSTANT]
    strongest = max(moving, key=lambda x: x.kind.value)
    among_rows = any(x.kind is Kind.ROWS for x in moving)
    if name in _GUARDS:
        return UNKNOWN if among_rows else strongest
    if name in _LINEAR or (name == "integer_pow" and equation.params["y"] == 1):
        return strongest
    if name in _ADDITIONS:
        if among_rows:
            return walk.met(Kind.MIXED, "a sum over the batch is added to its rows, or taken from them")
        return strongest
    if name == "mul" or (name == "div" and len(moving) == 1 and operands[0] is moving[0]):
        return strongest if len(moving) == 1 else product_of_sums(walk, moving)
    if name == "div" or (name == "integer_pow" and equation.params["y"] == -1):
        return product_of_sums(walk, moving)
    return walk.met(Kind.MIXED, f"a sum over the batch goes through {name}")


def product_of_sums(walk: Walk, moving: Sequence[Value]) -> Value:
    """A product, or a quotient, of sums with each other or with rows; a further one may undo the first."""
    quotients = sum(x.kind is Kind.QUOTIENT for x in moving)
    if quotients and (quotients > 1 or any(x.kind is Kind.SUM for x in moving)):
        return UNKNOWN
    if quotients:
        return next(x for x in moving if x.kind is Kind.QUOTIENT)
    return walk.met(Kind.QUOTIENT, "a sum over the batch is divided by another, or multiplied with one")


def _aligned(walk: Walk, operands: Sequence[Value], shape: Sequence[int]) -> Value:
    """Rows combined at the same place: row with row, or where the batch lies in other dims, each with each."""
    batch, given = walk.batch, [x for x in operands if x.kind is Kind.ROWS]
    dims: list[Dim] = [fresh(size) for size in shape]
    for x in given:
        for place in batch.places(x):
            if batch.of(dims[place]) and batch.layout(dims[place]) != batch.layout(x.dims[place]):
                return UNKNOWN
            dims[place] = x.dims[place]
    return _unless_met(walk, dims)


@rule("optimization_barrier", "device_put")
def _barrier(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return operands


@rule("random_seed", "random_split", "random_fold_in", "random_wrap", "random_unwrap", "random_bits", "random_gamma")
def _random(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """One result for each key, or for each number folded in; the dims of what is drawn come behind."""
    (variable,) = equation.outvars
    given = [x for x in operands if x.kind is not Kind.CONSTANT]
    rank = len(variable.aval.shape)
    if len(given) > 1 or given[0].kind is not Kind.ROWS or len(given[0].dims) > rank:
        return [UNKNOWN]
    dims = given[0].dims
    return [rows([*dims, *fresh_dims(variable.aval.shape[len(dims) :])])]


@rule("dot_general")
def _dot(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    moving = [x for x in operands if x.kind is not Kind.CONSTANT]
    kinds = {x.kind for x in moving}
    if Kind.UNKNOWN in kinds:
        return [UNKNOWN]
    if Kind.MIXED in kinds:
        return [next(x for x in moving if x.kind is Kind.MIXED)]
    if kinds != {Kind.ROWS}:
        return [moving[0] if len(moving) == 1 else product_of_sums(walk, moving)]
    left, right = (
        x.dims if x.kind is Kind.ROWS else fresh_dims(atom.aval.shape)
        for x, atom in zip(operands, equation.invars, strict=True)
    )
    summed, paired = (list(zip(*places, strict=True)) for places in equation.params["dimension_numbers"])
    batch, taken = walk.batch, [*summed, *paired]
    with_batch = [(left[a], right[b]) for a, b in taken if batch.of(left[a]) or batch.of(right[b])]
    if len(moving) == 2 and any(batch.layout(a) != batch.layout(b) for a, b in with_batch):
        return [UNKNOWN]
    kept = [left[a] if batch.of(left[a]) else right[b] for a, b in paired]
    free = [dim for i, dim in enumerate(left) if i not in [a for a, _ in taken]]
    free += [dim for i, dim in enumerate(right) if i not in [b for _, b in taken]]
    over = frozenset[Axis]().union(*(batch.of(left[a]) | batch.of(right[b]) for a, b in summed))
    if over:  # a constant may tell the rows apart: it may move them, or leave some out
        return [SUM if over == batch.all and len(moving) == 2 else UNKNOWN]
    return [_unless_met(walk, [*kept, *free])]


def _unless_met(walk: Walk, dims: Sequence[Dim]) -> Value:
    """Rows of these dims, unless the batch is in two of them: each row with each."""
    found = [factor for dim in dims for factor in walk.batch.of(dim)]
    return rows(dims) if len(found) == len(set(found)) else walk.met(Kind.MIXED, "rows of the batch meet each other")


@rule("reduce_sum")
def _sum(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    if x.kind is not Kind.ROWS:
        return [x]
    over, dims = _reduced(walk, x, equation)
    if not over:
        return [rows(dims)]
    return [SUM if over == walk.batch.all else UNKNOWN]


@rule("reduce_max", "reduce_min", "reduce_and", "reduce_or")
def _extreme(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Of a whole batch it serves to scale, and is scaled out again: the largest logit before an exponential."""
    (x,) = operands
    if x.kind is Kind.MIXED:
        return [x]
    if x.kind is not Kind.ROWS:
        return [UNKNOWN]
    over, dims = _reduced(walk, x, equation)
    return [CONSTANT if over else rows(dims)]


@rule("reduce_prod", "reduce_xor", "argmax", "argmin")
def _other_reduction(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    if x.kind is not Kind.ROWS:
        return [UNKNOWN]
    over, dims = _reduced(walk, x, equation)
    return [UNKNOWN if over else rows(dims)]


def _reduced(walk: Walk, x: Value, equation: Any) -> tuple[frozenset[Axis], list[Dim]]:
    """The factors of the batch that a reduction sums over, and the dims that stay."""
    axes = {int(i) for i in equation.params["axes"]}
    over = frozenset[Axis]().union(*(walk.batch.of(x.dims[i]) for i in axes))
    return over, [dim for i, dim in enumerate(x.dims) if i not in axes]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "sort", "top_k")
def _along(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Needs some dims whole: rows stay rows where the batch is not in one of them."""
    params = equation.params
    along = params.get("dimensions", (params.get("axis", params.get("dimension")),))
    along = (-1,) if along == (None,) else along
    if any(x.kind not in (Kind.CONSTANT, Kind.ROWS) for x in operands):
        return [UNKNOWN] * len(equation.outvars)
    found = _aligned(walk, operands, equation.invars[0].aval.shape)
    if found.kind is not Kind.ROWS or any(walk.batch.of(found.dims[i]) for i in along):
        return [UNKNOWN] * len(equation.outvars)
    shape = equation.outvars[0].aval.shape
    dims = [dim if walk.batch.of(dim) else fresh(size) for dim, size in zip(found.dims, shape, strict=True)]
    return [replace(found, dims=tuple(dims)) for _ in equation.outvars]


@rule(*OF_LAST_DIMS)
def _of_last_dims(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Rows stay rows where the batch is not in a dim that is taken whole."""
    lead = leading(equation.primitive.name, equation.params, len(equation.invars[0].aval.shape))
    given = [x for x in operands if x.kind is not Kind.CONSTANT]
    if any(x.kind is not Kind.ROWS or max(walk.batch.places(x), default=0) >= lead for x in given):
        return [UNKNOWN] * len(equation.outvars)
    if len({walk.batch.layouts(viewed) for viewed in (rows(x.dims[:lead]) for x in given)}) > 1:
        return [UNKNOWN] * len(equation.outvars)
    shapes = [variable.aval.shape for variable in equation.outvars]
    return [rows([*given[0].dims[:lead], *fresh_dims(shape[lead:])]) for shape in shapes]


@rule("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _window(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, shape, sizes = operands[0], equation.outvars[0].aval.shape, equation.params["window_dimensions"]
    if x.kind is not Kind.ROWS or any(sizes[place] > 1 for place in walk.batch.places(x)):
        return [UNKNOWN] * len(equation.outvars)
    dims = [dim if size == 1 else fresh(new) for dim, size, new in zip(x.dims, sizes, shape, strict=True)]
    return [rows(dims) for _ in equation.outvars]


@rule("conv_general_dilated")
def _conv(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    image, kernel = operands
    numbers = equation.params["dimension_numbers"]
    if kernel.kind is not Kind.CONSTANT or image.kind is not Kind.ROWS or equation.params["batch_group_count"] > 1:
        return [UNKNOWN]
    if walk.batch.places(image) != [numbers.lhs_spec[0]]:
        return [UNKNOWN]
    dims = list(fresh_dims(equation.outvars[0].aval.shape))
    dims[numbers.out_spec[0]] = image.dims[numbers.lhs_spec[0]]
    return [rows(dims)]
