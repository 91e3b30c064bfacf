"""Axes as letters: what a walk through a small function finds, in one line.

    follow(lambda x: x.T, X(2, 3)).axes         "a b -> b a"
    follow(lambda x: x.reshape(6), X(2, 3)).axes    "a b -> a*b"

Operands come first, results after the arrow. A dim that is a product has its factors joined by `*`, a dim of one
element is `1`. The same letter is the same axis. A letter with an apostrophe is a layer: never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_cli.sharding.axes import Axis, Dim, factors, fresh_dims
from redco_cli.sharding.program import (
    primitives,  # noqa: F401  the rules register themselves
)
from redco_cli.sharding.program.events import Event, Value
from redco_cli.sharding.program.walk import Walk


class Operand(NamedTuple):
    """An array that goes in.

    Attributes:
        array: abstract.
        trained: whether it is a parameter.
        given: whether it depends on the batch.
    """

    array: Any
    trained: bool
    given: bool


def W(*shape: int, dtype: Any = jnp.float32) -> Operand:
    """A weight."""
    return Operand(jax.ShapeDtypeStruct(shape, dtype), trained=True, given=False)


def X(*shape: int, dtype: Any = jnp.float32) -> Operand:
    """An example."""
    return Operand(jax.ShapeDtypeStruct(shape, dtype), trained=False, given=True)


def H(*shape: int, dtype: Any = jnp.float32) -> Operand:
    """An activation: made of examples and of weights."""
    return Operand(jax.ShapeDtypeStruct(shape, dtype), trained=True, given=True)


@dataclass(frozen=True)
class Followed:
    """What was found.

    Attributes:
        axes: of operands and results, as above.
        events: what would have to move: `kind when: moved, times x what`.
        walk: everything else.
        results: of the function.
    """

    axes: str
    events: list[str]
    walk: Walk
    results: list[Value]


def follow(function: Callable[..., Any], *operands: Operand) -> Followed:
    """Walks through a function of some arrays."""
    closed = jax.make_jaxpr(function)(*(operand.array for operand in operands))
    walk = Walk()
    values = [
        Value(fresh_dims(operand.array.shape), operand.trained, operand.given, f"w{place}" if operand.trained else "")
        for place, operand in enumerate(operands)
    ]
    results = walk.closed(closed, values)
    names = Names()
    before, after = (", ".join(names.array(value.dims) for value in some) for some in (values, results))
    return Followed(f"{before} -> {after}", [names.event(event) for event in walk.events], walk, results)


class Names:
    """Letters for axes, in the order in which they are met."""

    def __init__(self) -> None:
        self.known: dict[Axis, str] = {}

    def array(self, dims: Sequence[Dim]) -> str:
        return " ".join(self.dim(dim) for dim in dims) or "."

    def dim(self, dim: Dim) -> str:
        return "*".join(self._axis(axis) for axis in factors(dim)) or "1"

    def event(self, event: Event) -> str:
        when = " or ".join(self.dim(dim) for dim in event.when)
        return f"{event.kind} if {when}: {self.array(event.moved)}, {event.times} x {event.what}"

    def _axis(self, axis: Axis) -> str:
        letter = self.known.setdefault(axis, chr(ord("a") + len(self.known)))
        return letter + "'" * axis.layer
