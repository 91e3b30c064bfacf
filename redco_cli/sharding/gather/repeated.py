"""A weight within a loop that uses it in every iteration, and what products and biases make of it there.

Each adds its part of the gradient to what the device has of it already; see `loops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from redco_cli.sharding.gather.sharded import Sharded, cut
from redco_cli.sharding.plan import BATCH_AXES
from redco_cli.sharding.program.rewrite import bind

_TO_EACH = frozenset({"broadcast_in_dim", "add", "sub", "mul"})


@dataclass(frozen=True)
class Summed:
    """A weight whose products in a loop add up their gradients on each device.

    Attributes:
        arrays: the weight before its views [...], without a gradient; and zeros [D * F, ...], as if each shard of the
            batch added its own to it: what `jax.grad` finds for them are the parts of its gradient.
        mesh: the devices.
        views: equations of one operand, to apply before it is used.
    """

    arrays: tuple[Any, Any]
    mesh: Mesh
    views: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        """The array before its views."""
        return self.arrays[0]

    def array(self, use: str = "") -> Any:
        """The array as it is used."""
        return self.seen(self.value)

    def seen(self, whole: Any) -> Any:
        """What the program makes of the array before it uses it."""
        for equation in self.views:
            (whole,) = bind(equation, [whole])
        return whole

    def having(self, arrays: Any) -> Summed:
        """The same with other arrays."""
        return replace(self, arrays=arrays)

    def cotangent(self, parts: Any) -> tuple[None, Any]:
        """The gradient that `arrays` have of one product, from its part of each device of the batch [D * F, ...]."""
        return None, parts.astype(self.arrays[1].dtype)


@dataclass(frozen=True)
class Repeated:
    """A weight within a loop that uses it in every iteration, or an array that was made of such before it.

    Attributes:
        plain: a `Sharded`, or the array: for any use but a product.
        summed: for products.
    """

    plain: Any
    summed: Summed

    @property
    def arrays(self) -> Any:
        """What it consists of."""
        return (self.plain.arrays if isinstance(self.plain, Sharded) else self.plain), self.summed.arrays

    def having(self, arrays: Any) -> Repeated:
        """The same with other arrays."""
        own, summed = arrays
        plain = self.plain.having(own) if isinstance(self.plain, Sharded) else own
        return Repeated(plain, self.summed.having(summed))

    def viewed(self, equation: Any) -> Repeated:
        """The same weight, seen in another way."""
        plain = self.plain.viewed(equation) if isinstance(self.plain, Sharded) else bind(equation, [self.plain])[0]
        return Repeated(plain, replace(self.summed, views=(*self.summed.views, equation)))

    def array(self, use: str = "") -> Any:
        """The array, whole."""
        return self.plain.array(use) if isinstance(self.plain, Sharded) else self.plain

    def stacked(self) -> Any:
        """The array: a loop over its leading dim takes another layer each time, none of which is a `Repeated`."""
        return self.array()

    def layer(self, arrays: Any) -> Any:
        """The layer itself."""
        return arrays


def is_of_each_example(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether an equation gives a weight, such as a bias, to each example.

    Args:
        equation: any.
        operands: its own, of which some are a `Summed`.
    """
    places = [place for place, x in enumerate(operands) if isinstance(x, Summed)]
    if len(places) != 1 or equation.primitive.name not in _TO_EACH or any(isinstance(x, Sharded) for x in operands):
        return False
    shape, dims = equation.invars[places[0]].aval.shape, _dims(equation)
    rows = equation.outvars[0].aval.shape[:1]
    repeats_it = len(dims) == len(shape) and all(shape[place] == 1 for place, dim in enumerate(dims) if dim == 0)
    return repeats_it and bool(rows) and rows[0] % batch_ways(operands[places[0]].mesh) == 0


def of_each_example(equation: Any, operands: Sequence[Any]) -> Any:
    """The result of an equation that `is_of_each_example`; the gradient of the weight is added up on each device."""
    at, weight = next((place, x) for place, x in enumerate(operands) if isinstance(x, Summed))
    ways, (rows, *others) = batch_ways(weight.mesh), equation.outvars[0].aval.shape

    def given_to(rows: int, whole: Any) -> Any:
        return jax.lax.broadcast_in_dim(weight.seen(whole), (rows, *others), _dims(equation))

    def part(own: Any) -> Any:
        anywhere = jnp.zeros(weight.value.shape, weight.value.dtype)
        return jax.vjp(lambda whole: given_to(rows // ways, whole), anywhere)[1](own)[0]

    give = jax.custom_vjp(lambda arrays: given_to(rows, arrays[0]))
    give.defvjp(
        lambda arrays: (given_to(rows, arrays[0]), None),
        lambda _, gradient: (weight.cotangent(jax.vmap(part)(cut(gradient, 0, ways))),),
    )
    given = give(weight.arrays)
    if equation.primitive.name == "broadcast_in_dim":
        return given
    return bind(equation, [*operands[:at], given, *operands[at + 1 :]])[0]


def is_view(equation: Any) -> bool:
    """Whether an equation only adds dims of one entry to a weight."""
    name: str = equation.primitive.name
    return name == "broadcast_in_dim" and _size(equation.invars) == _size(equation.outvars)


def batch_ways(mesh: Mesh) -> int:
    """Devices, or groups of `tensor`, that share the examples."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def _dims(equation: Any) -> tuple[int, ...]:
    """Which dims of the result those of the weight are."""
    return tuple(equation.params.get("broadcast_dimensions", range(equation.outvars[0].aval.ndim)))


def _size(variables: Sequence[Any]) -> int:
    return sum(one.aval.size for one in variables)
