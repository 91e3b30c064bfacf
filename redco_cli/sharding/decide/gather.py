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
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.plan import AXES, BATCH_AXES, TENSOR
from redco_cli.sharding.program.rewrite import bind, rewritten


@dataclass(frozen=True)
class _Sharded:
    """A parameter that was not used yet.

    Attributes:
        arrays: the array.
        spec: the mesh axes of its dims where it lives.
        gathered: the same where it is used.
        mesh: the devices.
        views: equations of one operand, to apply once it is gathered.
    """

    arrays: Any
    spec: PartitionSpec
    gathered: PartitionSpec
    mesh: Mesh
    views: tuple[Any, ...] = ()

    def array(self, use: str = "") -> Any:
        """The array, whole, as it is used."""
        whole = self.arrays if self.spec == self.gathered else self._all_gather()
        for equation in self.views:
            (whole,) = bind(equation, [whole])
        return whole

    def _all_gather(self) -> Any:
        lives, used = NamedSharding(self.mesh, self.spec), NamedSharding(self.mesh, self.gathered)

        @jax.custom_vjp
        def gather(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, used)

        def forward(x: Any) -> tuple[Any, None]:
            return gather(x), None

        def backward(_: None, gradient: Any) -> tuple[Any]:
            summed = jax.lax.with_sharding_constraint(gradient, used)  # keeps the scattering out of the matmul before
            return (jax.lax.with_sharding_constraint(summed, lives),)

        gather.defvjp(forward, backward)
        return gather(self.arrays)

    def having(self, arrays: Any) -> _Sharded:
        """The same with another array."""
        return replace(self, arrays=arrays)

    def viewed(self, equation: Any) -> _Sharded:
        """The same parameter, seen in another way; cast at once, as it is cheaper to gather in fewer bits."""
        fewer = not jnp.issubdtype(self.arrays.dtype, jnp.integer)  # codes of a quantised weight are few as they are
        if equation.primitive.name in ("convert_element_type", "name") and fewer and not self.views:
            return replace(self, arrays=bind(equation, [self.arrays])[0])
        return replace(self, views=(*self.views, equation))

    def stacked(self) -> Any:
        """Itself; whole where its layers are no longer its leading dim."""
        return self.array() if self.views else self

    def layer(self, arrays: Any) -> _Sharded:
        """One layer of it."""
        return _Sharded(arrays, PartitionSpec(*self.spec[1:]), PartitionSpec(*self.gathered[1:]), self.mesh)


@dataclass(frozen=True)
class _Gathering:
    """How parameters are gathered.

    Attributes:
        mesh: the devices.
        reshard_after_forward: once for the forward pass, and once more for the backward pass.
    """

    mesh: Mesh
    reshard_after_forward: bool
    enters: frozenset[str] = frozenset()
    everywhere: bool = False

    def is_tracked(self, operand: Any) -> bool:
        """Whether it is a parameter in shards."""
        return isinstance(operand, _Sharded)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation on whole parameters; a name is none."""
        if equation.primitive.name == "name" and isinstance(operands[0], _Sharded):
            return [operands[0].viewed(equation)]
        if self.reshard_after_forward and any(isinstance(x, _Sharded) and x.spec != x.gathered for x in operands):
            again = jax.checkpoint(
                lambda arrays: self._on_whole(
                    equation, [_having(x, own) for x, own in zip(operands, arrays, strict=True)]
                )
            )
            results: Sequence[Any] = again([x.arrays if isinstance(x, _Sharded) else x for x in operands])
            return results
        return self._on_whole(equation, operands)

    def _on_whole(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        params = equation.params
        grouped = equation.primitive.name == "conv_general_dilated" and params["feature_group_count"] > 1
        if grouped and self.mesh.shape.get(TENSOR, 1) > 1:
            image, kernel = operands
            operands = [_split_over_every_axis(image, kernel, params["dimension_numbers"], self.mesh), kernel]
        return list(bind(equation, [_whole(x) for x in operands]))


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
    rewriting = _Gathering(mesh, reshard_after_forward)

    def gathers(params: Any, *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *others)
        stored = [
            _Sharded(value, where, there, mesh)
            for value, where, there in zip(jax.tree.leaves(params), lives, used, strict=True)
        ]
        results = rewritten(closed, [*stored, *jax.tree.leaves(others)], rewriting)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return gathers


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _whole(x: Any) -> Any:
    return x.array() if isinstance(x, _Sharded) else x


def _having(x: Any, arrays: Any) -> Any:
    return x.having(arrays) if isinstance(x, _Sharded) else arrays


def _split_over_every_axis(images: Any, kernel: Any, numbers: Any, mesh: Mesh) -> Any:
    """The input of a grouped convolution, split over every axis of the mesh: its channels where the kernel's are.

    XLA (with JAX 0.10) adds up the gradient of the kernel once for each device of an axis that splits nothing of the
    convolution while another axis splits its batch: the gradient comes out too large by the size of that axis.
    """
    whole = _whole(images)
    dims: list[Any] = [None] * whole.ndim
    batch, channels = numbers.lhs_spec[:2]
    out = numbers.rhs_spec[0]
    known = isinstance(kernel, _Sharded) and not kernel.views
    if known and len(kernel.gathered) > out and kernel.gathered[out] == TENSOR:
        dims[batch], dims[channels] = BATCH_AXES, TENSOR
    elif whole.shape[batch] % mesh.size == 0:
        dims[batch] = AXES
    return jax.lax.with_sharding_constraint(whole, NamedSharding(mesh, PartitionSpec(*dims)))
