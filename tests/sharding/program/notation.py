"""Axes as letters: what a walk through a small function finds, in one line.

    walked_axes(lambda x: x.T, X(2, 3)).axes                "a b -> b a"
    walked_axes(lambda x: x.reshape(6), X(2, 3)).axes       "a b -> a*b"

W is a weight, X an example of the batch, H a hidden activation. Operands come first, results after the arrow. A dim
that is a product has its factors joined by `*`, a dim of one element is `1`. The same letter is the same axis. A letter
with an apostrophe is a layer: never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_cli.sharding.axes import Axis, Dim, factors, fresh_dims
from redco_cli.sharding.program import primitives  # noqa: F401  the rules register themselves
from redco_cli.sharding.program.events import PossibleCollective, Value
from redco_cli.sharding.program.walk import Walk


class Operand(NamedTuple):
    """An array that goes in.

    Attributes:
        array: abstract.
        requires_grad: whether it is a parameter.
        from_batch: whether it depends on the batch.
    """

    array: Any
    requires_grad: bool
    from_batch: bool


def W(*shape: int, dtype: Any = jnp.float32) -> Operand:
    """A weight."""
    return Operand(jax.ShapeDtypeStruct(shape, dtype), requires_grad=True, from_batch=False)


def X(*shape: int, dtype: Any = jnp.float32) -> Operand:
    """An example."""
    return Operand(jax.ShapeDtypeStruct(shape, dtype), requires_grad=False, from_batch=True)


def H(*shape: int, dtype: Any = jnp.float32) -> Operand:
    """An activation: made of examples and of weights."""
    return Operand(jax.ShapeDtypeStruct(shape, dtype), requires_grad=True, from_batch=True)


@dataclass(frozen=True)
class Walked:
    """What was found.

    Attributes:
        axes: of operands and results, as above.
        collectives: what would have to move: `kind if split: moved, times x what`.
        walk: everything else.
        results: of the function.
    """

    axes: str
    collectives: list[str]
    walk: Walk
    results: list[Value]


def walked_axes(function: Callable[..., Any], *operands: Operand) -> Walked:
    """Walks through a function of some arrays."""
    closed = jax.make_jaxpr(function)(*(operand.array for operand in operands))
    walk = Walk()
    paths = [f"w{place}" if operand.requires_grad else "" for place, operand in enumerate(operands)]
    values = [
        Value(fresh_dims(operand.array.shape), operand.requires_grad, operand.from_batch, path, path)
        for operand, path in zip(operands, paths, strict=True)
    ]
    results = walk.closed(closed, values)
    letters = AxisLetters()
    before, after = (", ".join(letters.array(value.dims) for value in some) for some in (values, results))
    return Walked(f"{before} -> {after}", [letters.collective(one) for one in walk.collectives], walk, results)


class AxisLetters:
    """Letters for axes, in the order in which they are met."""

    def __init__(self) -> None:
        self.known: dict[Axis, str] = {}

    def array(self, dims: Sequence[Dim]) -> str:
        return " ".join(self.dim(dim) for dim in dims) or "."

    def dim(self, dim: Dim) -> str:
        return "*".join(self._axis(axis) for axis in factors(dim)) or "1"

    def collective(self, collective: PossibleCollective) -> str:
        when = " or ".join(self.dim(dim) for dim in collective.if_split)
        return f"{collective.kind} if {when}: {self.array(collective.moved)}, {collective.count} x {collective.what}"

    def _axis(self, axis: Axis) -> str:
        letter = self.known.setdefault(axis, chr(ord("a") + len(self.known)))
        return letter + "'" * axis.layer
