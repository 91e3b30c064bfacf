"""Gathers parameters right where a program uses them, and scatters their gradients.

A parameter p lives in shards over `fsdp`. Used as it is, a matmul x·p would move activations. With

    forward     y = x · gather(p)          gather: from `spec` to `gathered`, an all-gather over fsdp
    backward    dp = scatter(xᵀ · dy)      scatter: back to `spec`, a reduce-scatter over fsdp

it moves the parameter once each way, and no device ever holds more gathered parameters than the compiler needs at a
time. Layers that are stacked and scanned are gathered one by one, inside the loop. This is fully sharded data
parallelism (ZeRO stage 3, arXiv 1910.02054) said in constraints on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.plan import AXES, BATCH_AXES, TENSOR

_INLINED = ("jit", "pjit", "closed_call", "core_call")
_REMAT = ("remat", "remat2", "checkpoint")
_VIEWS = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type")


@dataclass(frozen=True)
class _Context:
    """How parameters are gathered.

    Attributes:
        mesh: the devices.
        reshard_after_forward: once for the forward pass, and once more for the backward pass.
    """

    mesh: Mesh
    reshard_after_forward: bool


@dataclass(frozen=True)
class _Sharded:
    """A parameter that was not used yet.

    Attributes:
        value: the array.
        spec: the mesh axes of its dims where it lives.
        gathered: the same where it is used.
        views: equations of one operand, to apply once it is gathered.
    """

    value: Any
    spec: PartitionSpec
    gathered: PartitionSpec
    views: tuple[Any, ...] = ()

    def whole(self, mesh: Mesh) -> Any:
        """The array, as it is used."""
        whole = self.value if self.spec == self.gathered else self._all_gather(mesh)
        for equation in self.views:
            (whole,) = _bind(equation, [whole])
        return whole

    def _all_gather(self, mesh: Mesh) -> Any:
        lives, used = NamedSharding(mesh, self.spec), NamedSharding(mesh, self.gathered)

        @jax.custom_vjp
        def gather(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, used)

        def forward(x: Any) -> tuple[Any, None]:
            return gather(x), None

        def backward(_: None, gradient: Any) -> tuple[Any]:
            summed = jax.lax.with_sharding_constraint(gradient, used)  # keeps the scattering out of the matmul before
            return (jax.lax.with_sharding_constraint(summed, lives),)

        gather.defvjp(forward, backward)
        return gather(self.value)

    def viewed(self, equation: Any) -> _Sharded:
        """The same parameter, seen in another way; cast at once, as it is cheaper to gather in fewer bits."""
        if equation.primitive.name == "convert_element_type" and not self.views:
            return replace(self, value=_bind(equation, [self.value])[0])
        return replace(self, views=(*self.views, equation))

    def slice(self, value: Any) -> _Sharded:
        """One layer of it."""
        return _Sharded(value, PartitionSpec(*self.spec[1:]), PartitionSpec(*self.gathered[1:]))


def gathering(
    function: Callable[..., Any], specs: Any, gathered: Any, mesh: Mesh, *, reshard_after_forward: bool = False
) -> Callable[..., Any]:
    """The same function of parameters that live in shards.

    Args:
        function: `function(params, *others)`, any that JAX can trace.
        specs: like the parameters, where each lives.
        gathered: the same, where each is used.
        mesh: the devices.
        reshard_after_forward: forget gathered parameters after the forward pass, and gather them once more in the
            backward pass (the name is that of PyTorch's FSDP2): half as much again is moved, and they take no memory
            in between.

    Returns:
        A function of the same arguments, to be called under `jax.jit`; `function` itself where nothing is gathered.
        `redco_cli.sharding.compiled` shows it in a whole step.
    """
    lives, used = (jax.tree.leaves(tree, is_leaf=_is_spec) for tree in (specs, gathered))
    if lives == used and mesh.shape.get(TENSOR, 1) == 1:
        return function
    context = _Context(mesh, reshard_after_forward)

    def gathers(params: Any, *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *others)
        stored = [
            _Sharded(value, where, there)
            for value, where, there in zip(jax.tree.leaves(params), lives, used, strict=True)
        ]
        results = _evaluate(closed.jaxpr, closed.consts, [*stored, *jax.tree.leaves(others)], context)
        return jax.tree.unflatten(jax.tree.structure(shape), [_whole(x, mesh) for x in results])

    return gathers


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _whole(x: Any, mesh: Mesh) -> Any:
    return x.whole(mesh) if isinstance(x, _Sharded) else x


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Sharded) else x


def _with_value(sharded: Any, value: Any) -> Any:
    return replace(sharded, value=value) if isinstance(sharded, _Sharded) else value


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], context: _Context) -> list[Any]:
    """Runs a jaxpr on arrays and sharded parameters."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        with jax.named_scope(str(equation.source_info.name_stack) or equation.primitive.name):
            results = _apply(equation, [read(atom) for atom in equation.invars], context)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, operands: Sequence[Any], context: _Context) -> Sequence[Any]:
    """One equation: parameters pass through views and into loops as they are stored, all else gathers them."""
    name, params = equation.primitive.name, equation.params
    if any(isinstance(x, _Sharded) for x in operands):
        if name in _INLINED:
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            return _evaluate(inner.jaxpr, inner.consts, operands, context)
        if name in _REMAT:
            return _remat(equation, operands, context)
        if name == "scan":
            return _scan(equation, operands, context)
        if name in _VIEWS and len(operands) == 1:
            return [operands[0].viewed(equation)]
        if context.reshard_after_forward and any(isinstance(x, _Sharded) and x.spec != x.gathered for x in operands):
            use = jax.checkpoint(
                lambda values: _use(
                    equation, [_with_value(x, y) for x, y in zip(operands, values, strict=True)], context
                )
            )
            results: Sequence[Any] = use([_value(x) for x in operands])
            return results
    return _use(equation, operands, context)


def _use(equation: Any, operands: Sequence[Any], context: _Context) -> Sequence[Any]:
    """An equation on whole parameters."""
    params = equation.params
    grouped = equation.primitive.name == "conv_general_dilated" and params["feature_group_count"] > 1
    if grouped and context.mesh.shape.get(TENSOR, 1) > 1:
        image, kernel = operands
        operands = [_split_over_every_axis(image, kernel, params["dimension_numbers"], context.mesh), kernel]
    return list(_bind(equation, [_whole(x, context.mesh) for x in operands]))


def _split_over_every_axis(images: Any, kernel: Any, numbers: Any, mesh: Mesh) -> Any:
    """The input of a grouped convolution, split over every axis of the mesh: its channels where the kernel's are.

    XLA (with JAX 0.10) adds up the gradient of the kernel once for each device of an axis that splits nothing of the
    convolution while another axis splits its batch: the gradient comes out too large by the size of that axis.
    """
    whole = _whole(images, mesh)
    dims: list[Any] = [None] * whole.ndim
    batch, channels = numbers.lhs_spec[:2]
    out = numbers.rhs_spec[0]
    known = isinstance(kernel, _Sharded) and not kernel.views
    if known and len(kernel.gathered) > out and kernel.gathered[out] == TENSOR:
        dims[batch], dims[channels] = BATCH_AXES, TENSOR
    elif whole.shape[batch] % mesh.size == 0:
        dims[batch] = AXES
    return jax.lax.with_sharding_constraint(whole, NamedSharding(mesh, PartitionSpec(*dims)))


def _bind(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def _remat(equation: Any, operands: Sequence[Any], context: _Context) -> Sequence[Any]:
    """Gathered inside, so that the backward pass gathers again."""
    params = equation.params

    def body(values: Sequence[Any]) -> list[Any]:
        inside = [_with_value(x, value) for x, value in zip(operands, values, strict=True)]
        return [_whole(x, context.mesh) for x in _evaluate(params["jaxpr"], [], inside, context)]

    rematerialized = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
    results: list[Any] = rematerialized([_value(x) for x in operands])
    return results


def _scan(equation: Any, operands: Sequence[Any], context: _Context) -> Sequence[Any]:
    """Consts and layers go in as they are stored, and are gathered in each iteration."""
    params = equation.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts = operands[:first]
    stacked = [_whole(x, context.mesh) if isinstance(x, _Sharded) and x.views else x for x in operands[last:]]
    inner = params["jaxpr"]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        slices = [x.slice(value) if isinstance(x, _Sharded) else value for x, value in zip(stacked, xs, strict=True)]
        results = [
            _whole(x, context.mesh) for x in _evaluate(inner.jaxpr, inner.consts, [*consts, *carry, *slices], context)
        ]
        return results[: last - first], results[last - first :]

    carry, ys = jax.lax.scan(
        body,
        [_whole(x, context.mesh) for x in operands[first:last]],
        [_value(x) for x in stacked],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]
