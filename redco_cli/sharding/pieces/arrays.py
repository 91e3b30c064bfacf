"""Arrays in pieces: a weight that is taken apart where it is used, and what is not joined yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.sharding.plan import Partition
from redco_cli.sharding.program.rewrite import bind


@dataclass(frozen=True)
class Weight:
    """A weight that is taken apart where it is used.

    Attributes:
        arrays: the whole, or its pieces.
        cut: where it is taken apart.
        number: which of the arguments it is.
        uncut: gets the number where a use needs the whole.
    """

    arrays: Any
    cut: Partition
    number: int = 0
    uncut: set[int] = field(default_factory=set, compare=False)

    def having(self, arrays: Any) -> Weight:
        """The same with other arrays."""
        return replace(self, arrays=arrays)

    def array(self, use: str = "") -> Any:
        """The whole."""
        self.uncut.add(self.number)
        return jnp.concatenate(self.arrays, self.cut.dim) if isinstance(self.arrays, tuple) else self.arrays

    def stacked(self) -> Any:
        """Itself; whole where a loop takes it apart along that dim."""
        return self if self.cut.dim else self.array()

    def layer(self, arrays: Any) -> Weight:
        """One layer of it."""
        return replace(self, arrays=arrays, cut=replace(self.cut, dim=self.cut.dim - 1))

    def viewed(self, equation: Any) -> Any:
        """Seen in another way, with the dim still one of its own."""
        some = self.arrays[0] if isinstance(self.arrays, tuple) else self.arrays
        found = _viewed(equation, self.cut, some.shape)
        if found is None:
            return bind(equation, [self.array()])[0]
        if equation.primitive.name == "convert_element_type" and not isinstance(self.arrays, tuple):
            return replace(self, arrays=bind(equation, [self.arrays])[0])
        equations, dim = found
        return replace(self, arrays=each(equations, self.pieces().arrays), cut=replace(self.cut, dim=dim))

    def pieces(self) -> Pieces:
        """What it consists of."""
        if isinstance(self.arrays, tuple):
            return Pieces(self.arrays, self.cut.dim)
        return Pieces(tuple(jax.lax.split(self.arrays, self.cut.sizes, self.cut.dim)), self.cut.dim)


@dataclass(frozen=True)
class Pieces:
    """An array that is not joined yet.

    Attributes:
        arrays: its pieces, in order.
        dim: along which they are to be joined.
    """

    arrays: tuple[Any, ...]
    dim: int

    @property
    def cut(self) -> Partition:
        """Of which sizes they are."""
        return Partition(self.dim, tuple(int(one.shape[self.dim]) for one in self.arrays))

    def having(self, arrays: Any) -> Pieces:
        """The same with other arrays."""
        return replace(self, arrays=tuple(arrays))

    def array(self, use: str = "") -> Any:
        """The array, joined."""
        return jnp.concatenate(self.arrays, self.dim)

    def stacked(self) -> Any:
        """The array: a loop runs over it."""
        return self.array()

    def layer(self, arrays: Any) -> Any:
        """The layer itself."""
        return arrays

    def viewed(self, equation: Any) -> Any:
        """Seen in another way; joined where the dim is none of its own then."""
        found = _viewed(equation, self.cut, self.arrays[0].shape)
        return bind(equation, [self.array()])[0] if found is None else Pieces(each(found[0], self.arrays), found[1])


def pieces_of(leaf: Any, cut: Partition) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the pieces of an array."""
    before, after = leaf.shape[: cut.dim], leaf.shape[cut.dim + 1 :]
    return tuple(jax.ShapeDtypeStruct((*before, size, *after), leaf.dtype) for size in cut.sizes)


def _viewed(equation: Any, cut: Partition, shape: Sequence[int]) -> tuple[list[Any], int] | None:
    """A view of each piece, of an array with such dims in front of `cut`; and which dim is theirs, where it is one."""
    name, params, count = equation.primitive.name, equation.params, len(cut.sizes)
    if name == "convert_element_type":
        return [equation] * count, cut.dim
    if name == "transpose":
        return [equation] * count, params["permutation"].index(cut.dim)
    if name == "squeeze":
        return [equation] * count, cut.dim - sum(dim < cut.dim for dim in params["dimensions"])
    if name != "reshape" or params["dimensions"] is not None or params.get("sharding") is not None:
        return None
    sizes, before = params["new_sizes"], math.prod(shape[: cut.dim])
    places = (i for i, size in enumerate(sizes) if size == sum(cut.sizes) and math.prod(sizes[:i]) == before)
    place = next(places, None)
    if place is None:
        return None
    new = ((*sizes[:place], size, *sizes[place + 1 :]) for size in cut.sizes)
    return [having_params(equation, {**params, "new_sizes": own}) for own in new], place


def each(equations: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of equations, one of each piece."""
    return tuple(bind(equation, [one])[0] for equation, one in zip(equations, arrays, strict=True))


def having_params(equation: Any, params: Mapping[str, Any]) -> Any:
    """The equation with other parameters."""
    return equation.replace(params=dict(params))
