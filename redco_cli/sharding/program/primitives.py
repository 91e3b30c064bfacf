"""How logical axes pass through each primitive of a program.

A rule takes the values of the operands and returns those of the results. It unifies what the operation makes equal,
and notes which collectives it would need if a dim were split (`Walk.may_need`), forward and backward. A dim that a rule
cannot follow becomes a dim of its own: that is always safe, and what it costs is noted.
"""

from __future__ import annotations

from typing import Any

from redco_cli.sharding.axes import Dim, factors, fresh, fresh_dims, mark_layer, reshape, split, unify
from redco_cli.sharding.program.events import ActivationProduct, Matmul, Use, Value, itemsize
from redco_cli.sharding.program.walk import Walk, combined, constant, rule, viewed

ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2
    logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow pvary real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_and_gather_add select_n shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign
    sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
"""Primitives whose result at a place depends on the operands at that place alone."""
OF_EACH_ENTRY = frozenset(ELEMENTWISE.split()) - {"sharding_constraint"}
"""Those of them that say nothing of where arrays are."""


@rule(*ELEMENTWISE.split())
def _elementwise(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Dims at the same place are the same. A scalar, or a dim of size one, is repeated."""
    avals = [atom.aval for atom in equation.invars]
    results = []
    for variable in equation.outvars:
        shape = getattr(variable.aval, "shape", ())
        dims: list[Dim] = [()] * len(shape)
        for x, aval in zip(operands, avals, strict=True):
            for place, dim in enumerate(x.dims):
                if not dims[place]:
                    dims[place] = dim
                elif not unify(dims[place], dim) and dim:
                    walk.needs_whole([dim], x, aval, "array whose parts do not line up")
        dims = [dim or fresh(size) for dim, size in zip(dims, shape, strict=True)]
        for x, aval in zip(operands, avals, strict=True):
            if x.from_batch and x.dims:
                walk.repeats(x, aval, [dim if not mine else () for dim, mine in zip(dims, x.dims, strict=True)])
        results.append(combined(operands, dims))
    if equation.primitive.name in ("add", "add_any"):
        walk.adds(equation, operands, results[0])
    return results


@rule("optimization_barrier", "device_put")
def _barrier(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return operands


@rule("debug_print", "debug_callback")
def _shown(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """What is shown is no part of what is computed."""
    return [constant(variable.aval) for variable in equation.outvars]


@rule("stop_gradient")
def _stop_gradient(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return [
        Value(x.dims, requires_grad=False, from_batch=x.from_batch, origin=x.origin, origins=x.origins)
        for x in operands
    ]


@rule(
    "iota",
    "threefry2x32",
    "rng_bit_generator",
    "random_gamma",
    "random_seed",
    "random_bits",
    "random_split",
    "random_fold_in",
    "random_wrap",
    "random_unwrap",
    "empty",
)
def _constant(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return [constant(variable.aval) for variable in equation.outvars]


@rule("dot_general", "ragged_dot_general")
def _dot(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    numbers = equation.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    groups = () if ragged is None else tuple(ragged.rhs_group_dimensions)
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    left, right = operands[:2]
    for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        unify(left.dims[a], right.dims[b])
    left_free = [dim for i, dim in enumerate(left.dims) if i not in (*left_sum, *left_batch)]
    right_free = [dim for i, dim in enumerate(right.dims) if i not in (*right_sum, *right_batch, *groups)]
    batch, contracted = [left.dims[i] for i in left_batch], [left.dims[i] for i in left_sum]
    result = combined(operands[:2], [*batch, *left_free, *right_free])
    left_aval, right_aval = (atom.aval for atom in equation.invars[:2])
    if left.from_batch != right.from_batch:
        walk.factors[id(result)] = result, left if left.from_batch else right
    if not _is_summed_later(result):
        walk.may_need_sums(contracted, result, equation.outvars[0].aval, "matmul")
    for x, aval, free in ((left, left_aval, right_free), (right, right_aval, left_free)):
        if x.requires_grad and x.from_batch and not _is_summed_later(x):
            walk.may_need("all-reduce", free, x, aval, "gradient of a matmul's input", of=x)
    if left.from_batch and right.from_batch:
        walk.compares(left_free, right, right_aval)
    composed = any(
        x.requires_grad and not x.from_batch and not x.path for x in (left, right)
    )  # such as learned queries
    if (left.from_batch and right.from_batch) or (composed and any(batch)):
        walk.activation_products.append(
            ActivationProduct(tuple(contracted), tuple(batch), (tuple(left_free), tuple(right_free)))
        )
    else:
        walk.batched.extend(batch)
    for x, aval, other, free in ((left, left_aval, right, left_free), (right, right_aval, left, right_free)):
        if other.from_batch and not x.from_batch:
            dims = x.dims, tuple(contracted), tuple(free), other.dims, result.dims
            walk.matmuls.append(Matmul(x.origin, *dims, walk.times))
            walk.uses.extend(Use(path, itemsize(aval), walk.recomputes) for path in x.sources)
    for group in groups:
        walk.batched.append(right.dims[group])
        walk.may_need("all-reduce", [right.dims[group]], result, equation.outvars[0].aval, "partial sums of experts")
    return [result]


def _is_summed_later(x: Value) -> bool:
    """Whether partial sums of an array are kept until what follows has been multiplied; see `marks.keep_whole`."""
    return any(axis.whole for dim in x.dims for axis in factors(dim))


@rule("transpose")
def _transpose(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    return [viewed(x, tuple(x.dims[i] for i in equation.params["permutation"]))]


@rule("reshape")
def _reshape(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x = operands[0]
    old, new = equation.invars[0].aval, equation.params["new_sizes"]
    dims, lost = reshape(x.dims, old.shape, new)
    walk.needs_whole([x.dims[i] for i in lost], x, old, "reshaped array")
    return [viewed(x, [fresh(size) if dim is None else dim for dim, size in zip(dims, new, strict=True)])]


@rule("broadcast_in_dim")
def _broadcast(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, shape = operands[0], equation.params["shape"]
    dims = list(fresh_dims(shape))
    new = set(range(len(shape)))
    for i, place in enumerate(equation.params["broadcast_dimensions"]):
        if x.dims[i] or shape[place] == 1:
            dims[place] = x.dims[i]
            new.discard(place)
    if x.from_batch:
        walk.repeats(x, equation.invars[0].aval, [dim if place in new else () for place, dim in enumerate(dims)])
    return [viewed(x, tuple(dims))]


@rule("stack")
def _stack(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    place, shape = equation.params["axis"], equation.outvars[0].aval.shape
    for x in operands[1:]:
        for mine, its in zip(operands[0].dims, x.dims, strict=True):
            unify(mine, its)
    return [combined(operands, [*operands[0].dims[:place], fresh(shape[place]), *operands[0].dims[place:]])]


@rule("unstack")
def _unstack(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,), place = operands, equation.params["axis"]
    if not x.from_batch:
        mark_layer(x.dims[place])
    walk.needs_whole([x.dims[place]], x, equation.invars[0].aval, "array that is taken apart")
    return [viewed(x, [*x.dims[:place], *x.dims[place + 1 :]]) for _ in equation.outvars]


@rule("squeeze")
def _squeeze(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    return [viewed(x, tuple(d for i, d in enumerate(x.dims) if i not in equation.params["dimensions"]))]


@rule("expand_dims")
def _expand_dims(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    old = iter(x.dims)
    rank, new = len(equation.outvars[0].aval.shape), equation.params["dimensions"]
    return [viewed(x, tuple(() if i in new else next(old) for i in range(rank)))]


@rule("tile")
def _tile(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    return [viewed(x, tuple((*fresh(times), *dim) for times, dim in zip(equation.params["reps"], x.dims, strict=True)))]


@rule("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _window(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    x, shape = operands[0], equation.outvars[0].aval.shape
    windowed = [size > 1 for size in equation.params["window_dimensions"]]
    walk.needs_whole(
        [dim for dim, cut in zip(x.dims, windowed, strict=True) if cut], x, equation.invars[0].aval, "image"
    )
    dims = [fresh(size) if cut else dim for dim, cut, size in zip(x.dims, windowed, shape, strict=True)]
    return [combined(operands, dims) for _ in equation.outvars]


@rule(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"
)  # fmt: skip
def _reduce(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,) = operands
    axes = {int(i) for i in equation.params["axes"]}
    result = Value(tuple(d for i, d in enumerate(x.dims) if i not in axes), x.requires_grad, x.from_batch)
    reduced = [x.dims[i] for i in axes]
    if equation.primitive.name in ("argmax", "argmin"):
        walk.may_need("all-gather", reduced, x, equation.invars[0].aval, "array whose largest element is sought")
        return [Value(result.dims, requires_grad=False, from_batch=x.from_batch)]
    walk.may_need("all-reduce", reduced, result, equation.outvars[0].aval, "partial sums of a reduction")
    return [result]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "sort", "top_k")
def _along(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Needs one dim whole, or several."""
    params = equation.params
    along = params.get("dimensions", (params.get("axis", params.get("dimension")),))
    along = (-1,) if along == (None,) else along
    first, aval = operands[0], equation.invars[0].aval
    for x, atom in zip(operands, equation.invars, strict=True):
        for mine, its in zip(first.dims, x.dims, strict=True):
            unify(mine, its)
        walk.needs_whole([x.dims[i] for i in along], x, atom.aval, "array that is scanned or sorted")
    dims = list(first.dims)
    if equation.primitive.name == "top_k":
        walk.ranked.append(first.dims[along[0]])
    if equation.outvars[0].aval.shape != aval.shape:
        dims[along[0]] = fresh(equation.outvars[0].aval.shape[along[0]])
    return [combined(operands, dims) for _ in equation.outvars]


@rule("conv_general_dilated")
def _conv(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    left, right = operands
    params, aval = equation.params, equation.outvars[0].aval
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    left_feature, right_in, right_out = left.dims[numbers.lhs_spec[1]], *_kernel(right, numbers)
    dims = list(fresh_dims(aval.shape))
    dims[numbers.out_spec[0]] = left.dims[numbers.lhs_spec[0]]
    dims[numbers.out_spec[1]] = right_out
    for i in numbers.rhs_spec[2:]:
        mark_layer(right.dims[i])
    for i in numbers.lhs_spec[2:]:
        walk.needs_whole([left.dims[i]], left, equation.invars[0].aval, "edges of an image")
    result = combined(operands, dims)
    walk.matmuls.append(Matmul(right.path, right.dims, (right_in,), (right_out,), left.dims, result.dims, walk.times))
    walk.uses.extend(Use(path, itemsize(equation.invars[1].aval), walk.recomputes) for path in right.sources)
    if groups == 1:
        unify(left_feature, right_in)
        walk.may_need_sums([right_in], result, aval, "convolution")
        if left.requires_grad:
            walk.may_need("all-reduce", [right_out], left, equation.invars[0].aval, "gradient of a convolution's input")
        return [result]
    features = equation.invars[0].aval.shape[numbers.lhs_spec[1]]
    grouped = split(left_feature, [groups, features // groups])
    made = split(right_out, [groups, aval.shape[numbers.out_spec[1]] // groups])
    if grouped is None or made is None:
        walk.needs_whole([left_feature], left, equation.invars[0].aval, "channels of a convolution")
        return [result]
    unify(grouped[0], made[0])
    unify(grouped[1], right_in)
    walk.may_need("all-reduce", [right_in], result, aval, "partial sums of a convolution")
    return [result]


def _kernel(right: Value, numbers: Any) -> tuple[Dim, Dim]:
    return right.dims[numbers.rhs_spec[1]], right.dims[numbers.rhs_spec[0]]


@rule("unknown")
def _unknown(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Not understood: everything it takes is needed whole, everything it gives is new."""
    if any(x.requires_grad for x in operands):
        walk.unknown[equation.primitive.name] += 1
    for x, atom in zip(operands, equation.invars, strict=True):
        if x.dims:
            walk.needs_whole(x.dims, x, atom.aval, f"operand of {equation.primitive.name}")
    return [combined(operands, fresh_dims(getattr(variable.aval, "shape", ()))) for variable in equation.outvars]
