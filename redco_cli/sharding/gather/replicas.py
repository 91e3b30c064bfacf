"""Gradients of weights, added up over devices: scattered over `fsdp` first, over `data` last, once in a step.

Every device has a part of the gradient of a weight, summed over its own examples. Written as one product, xᵀ·dy, it is
left to XLA how these are added up: all of it on every device of `data` and `fsdp`, cut afterwards, unless one of its
passes finds that it could have been scattered. Here it is said. For a batch over D x F devices:

    x, dy [B, ..]      ->  [D·F, B/(D·F), ..]    the examples of each device
    parts = xᵀ·dy          [D·F, ..]             nothing moves
    reduce-scatter         [D, ../F]             over `fsdp`
    all-reduce             [../F]                over `data`, the slowest links: of a shard

which is hybrid sharding (arXiv 2304.11277, section 3.2.2). The last line is a sum like any other: micro-batches add up
their parts of each replica, and it is done once in a step (`Apart`); so do the uses of a weight that has several, such
as a table that is the head, too. Nothing is assumed of the loss: what is apart is the gradient of one product, not the
examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.batch_shards import OF_EACH_SHARD
from redco_cli.sharding.gather.repeated import Summed, batch_ways
from redco_cli.sharding.gather.sharded import SMALL, Apart, Sharded, cut, part_spec
from redco_cli.sharding.plan import BATCH_AXES, DATA, as_dims
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.rewrite import bind


def has_replicas(places: Any) -> bool:
    """Whether a tree of shardings is on a mesh of several replicas over `data`."""
    leaves = jax.tree.leaves(places)
    return any(isinstance(place, NamedSharding) and place.mesh.shape.get(DATA, 1) > 1 for place in leaves)


def places_of_parts(params: Any, places: Any) -> Any:
    """Where the parts [..., D] of gradients live, each replica with its own.

    Args:
        params: a tree of parameters [...].
        places: like it, the sharding of each.
    """
    return jax.tree.map(lambda leaf, place: NamedSharding(place.mesh, part_spec(place.spec, leaf.ndim)), params, places)


def parts_like(params: Any, places: Any) -> Any:
    """Zeros to ask for gradients in parts with, [..., D] for each parameter [...]; see `Apart`.

    Args:
        params: a tree of parameters.
        places: like it, the sharding of each.
    """
    return jax.tree.map(
        lambda leaf, place: jnp.zeros((*leaf.shape, place.mesh.shape[DATA]), leaf.dtype), params, places
    )


def add_up(parts: Any, places: Any) -> Any:
    """Gradients from their parts of each replica.

    Args:
        parts: a tree of arrays [..., D].
        places: like it, where each sum [...] lives.
    """
    return jax.tree.map(lambda leaf, place: jax.lax.with_sharding_constraint(leaf.sum(-1), place), parts, places)


def summed_once(weight: Any, spec: PartitionSpec, mesh: Mesh, dtype: Any) -> Any:
    """A weight that is used in several places, likewise; a small one, or one without replicas, as it is.

    Args:
        weight: the array.
        spec: the mesh axes of its dims.
        mesh: the devices.
        dtype: in which the sum over replicas is moved.
    """
    if mesh.shape.get(DATA, 1) == 1 or weight.nbytes < SMALL or not jnp.issubdtype(weight.dtype, jnp.floating):
        return weight  # of complex ones XLA ends the process (jax 0.10.2, CPU)
    lives = part_spec(spec, weight.ndim)

    def value(weight: Any) -> Apart:
        parts = jnp.zeros((*weight.shape, mesh.shape[DATA]), weight.dtype)
        return Apart(weight, jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, lives)), takes_sums=True)

    def backward(_: None, given: Apart) -> tuple[Any]:
        parts = jax.lax.with_sharding_constraint(given.parts.astype(dtype), NamedSharding(mesh, lives))
        summed = jax.lax.with_sharding_constraint(jax.lax.reduce_sum(parts, (weight.ndim,)), NamedSharding(mesh, spec))
        return (given.value + summed.astype(weight.dtype),)

    apart = jax.custom_vjp(value)
    apart.defvjp(lambda weight: (value(weight), None), backward)
    return apart(weight)


def is_spread(equation: Any, operands: Sequence[Any], examples: Examples) -> bool:
    """Whether an equation gives a weight to each shard of the batch, see `for_each_shard`, or to each example.

    Args:
        equation: any.
        operands: its own, of which some are a `Sharded`.
        examples: where they are in its program.
    """
    weight = operands[0] if equation.primitive.name == "broadcast_in_dim" else None
    if not isinstance(weight, Sharded):
        return False
    is_named = any(one.params.get("name") == OF_EACH_SHARD for one in weight.views[-1:])
    ways, rows = batch_ways(weight.mesh), equation.params["shape"][0]
    is_for_all = rows == ways if is_named else equation.outvars[0] in examples.repeated and rows % ways == 0
    return is_for_all and _adds_up(weight)


def spread(equation: Any, operands: Sequence[Any]) -> Any:
    """The result of an equation that `is_spread`; the gradient of its weight is the sum of what each device has."""
    weight: Sharded = operands[0]
    ways, params = batch_ways(weight.mesh), equation.params

    def value(arrays: Any) -> Any:
        return bind(equation, [weight.having(arrays).array()])[0]

    def given(rows: int, whole: Any) -> Any:
        return jax.lax.broadcast_in_dim(whole, (rows, *params["shape"][1:]), params["broadcast_dimensions"])

    def part(own: Any) -> Any:
        anywhere = jnp.zeros(weight.value.shape, weight.value.dtype)
        return jax.vjp(lambda whole: given(len(own), weight.seen(whole)), anywhere)[1](own)[0]

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (weight.cotangent(jax.vmap(part)(cut(gradient, 0, ways))),)

    apply = jax.custom_vjp(value)
    apply.defvjp(lambda arrays: (value(arrays), None), backward)
    return apply(weight.arrays)


def added_up_first(weight: Any, x: Any) -> tuple[Any, Any]:
    """A weight whose gradient is to come first, and with what, see `gradient_first`; GPUs overlap it as it is."""
    if not isinstance(weight, Sharded) or not weight.is_on_tpu or weight.spec == weight.gathered:
        return weight, x
    arrays = weight.arrays
    own, x = _first(arrays.parts if isinstance(arrays, Apart) else arrays, x)
    return weight.having(replace(arrays, parts=own) if isinstance(arrays, Apart) else own), x


@jax.custom_vjp
def _first(weight: Any, x: Any) -> tuple[Any, Any]:
    return weight, x


def _first_forward(weight: Any, x: Any) -> tuple[tuple[Any, Any], tuple[()] | None]:
    return (weight.value, x.value), () if weight.perturbed and x.perturbed else None


def _first_backward(both: tuple[()] | None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    """What nobody asks for is not computed in order to come first."""
    if both is None or any(isinstance(one, SymbolicZero) for one in gradients):
        weight, x = (None if isinstance(one, SymbolicZero) else one for one in gradients)
        return weight, x
    ordered: tuple[Any, Any] = jax.lax.optimization_barrier(gradients)
    return ordered


_first.defvjp(_first_forward, _first_backward, symbolic_zeros=True)


def is_product(equation: Any, operands: Sequence[Any], examples: Examples) -> bool:
    """Whether an equation takes examples through one weight, whose gradient is to be added up here.

    Args:
        equation: any.
        operands: its own, of which some are a `Sharded` or `Summed`.
        examples: where they are in its program.
    """
    weights = [x for x in operands if isinstance(x, Sharded | Summed)]
    if len(weights) != 1 or len(operands) != 2 or _result_dim(equation, _place(operands)) is None:
        return False
    (weight,), x = weights, equation.invars[1 - _place(operands)]
    return examples.lead(x) and _adds_up(weight) and x.aval.shape[0] % batch_ways(weight.mesh) == 0


def product(equation: Any, operands: Sequence[Any], cut_once: Callable[[Any], Any] | None = None) -> Any:
    """The result of an equation that `is_product`; the gradient of its weight is the sum of those of all devices.

    Args:
        equation: the product.
        operands: its own.
        cut_once: cuts the examples of what the weight multiplies, where other products may have done so.
    """
    at = _place(operands)
    weight: Sharded | Summed = operands[at]
    leading = _result_dim(equation, at) or 0
    ways = batch_ways(weight.mesh)

    def run(x: Any, used: Any) -> Any:
        return bind(equation, [used, x] if at == 0 else [x, used])[0]

    def multiply(x: Any, arrays: Any) -> Any:
        return forward(x, arrays)[0]

    def forward(x: Any, arrays: Any) -> tuple[Any, tuple[Any, Any]]:
        used = weight.having(arrays).array()
        return run(x, used), (x, used)

    def backward(saved: tuple[Any, Any], dy: Any) -> tuple[Any, Any]:
        x, used = saved
        dx = jax.linear_transpose(lambda x: run(x, used), x)(dy)[0] if _is_inexact(x) else None
        each = jax.vmap(part, in_axes=(0, leading))
        own = cut(x, 0, ways) if cut_once is None else cut_once(x)
        return dx, weight.cotangent(each(own, cut(dy, leading, ways)))

    def part(x: Any, dy: Any) -> Any:
        anywhere = jnp.zeros(weight.value.shape, weight.value.dtype)  # the gradient is the same wherever it is taken
        return jax.vjp(lambda whole: run(x, weight.seen(whole)), anywhere)[1](dy)[0]

    apply = jax.custom_vjp(multiply)
    apply.defvjp(forward, backward)
    return apply(operands[1 - at], weight.arrays)


def _adds_up(weight: Sharded | Summed) -> bool:
    """Whether its gradient is one to add up over devices, each of which keeps as much of it as the others."""
    if isinstance(weight, Summed):
        return True
    if not set(BATCH_AXES) <= set(weight.mesh.shape):
        return False
    is_cut = set(itertools.chain(*as_dims(weight.spec))) > set(itertools.chain(*as_dims(weight.gathered)))
    return (weight.is_apart or is_cut) and _is_inexact(weight.value) and weight.divides


def _result_dim(equation: Any, at: int) -> int | None:
    """Which dim of the result has the examples that lead the operand beside the weight; None if there is none.

    Args:
        equation: of two operands.
        at: which of them is the weight.
    """
    name, numbers = equation.primitive.name, equation.params.get("dimension_numbers")
    if name == "dot_general":
        contracted, batched = numbers
        if 0 in (*contracted[1 - at], *batched[1 - at]):
            return None
        return len(batched[0]) if at == 1 else equation.invars[0].aval.ndim - len(contracted[0])
    if name == "gather" and at == 0 and not numbers.operand_batching_dims and equation.invars[1].aval.ndim > 1:
        return min(set(range(equation.outvars[0].aval.ndim)) - set(numbers.offset_dims))
    return None


def _place(operands: Sequence[Any]) -> int:
    return next(place for place, x in enumerate(operands) if isinstance(x, Sharded | Summed))


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
