"""A program as a flat list of operations on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LITERAL = -1
"""Stands for a literal among operands: it has no size worth counting."""
NARROW = ("bfloat16", "float16")


@dataclass(slots=True)
class Op:
    """One operation.

    Attributes:
        name: of the primitive.
        operands: ids of arrays, or `LITERAL`.
        results: ids of arrays.
        params: of the primitive.
        bodies: the programs it runs: of a loop, or the branches of a choice.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    bodies: tuple[FlatProgram, ...] = ()


@dataclass(slots=True)
class Arrays:
    """All arrays of a program, by id.

    Attributes:
        shapes: whole, not of a shard.
        itemsizes: bytes of an element.
        dtypes: such as `float32`.
        rematerialized: ids of arrays that a rematerialized part of the backward pass reads once more.
        on_host: ids of arrays in the host's memory, which take none of a device; to the bytes of an element.
    """

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    itemsizes: list[int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    rematerialized: set[int] = field(default_factory=set)
    on_host: dict[int, int] = field(default_factory=dict)

    def new(self, shape: Sequence[int], itemsize: int, dtype: str) -> int:
        """The id of one more array."""
        self.shapes.append(tuple(shape))
        self.itemsizes.append(itemsize)
        self.dtypes.append(dtype)
        return len(self.shapes) - 1

    def like(self, array: int, shape: Sequence[int]) -> int:
        """One more array with elements like another's."""
        return self.new(shape, self.itemsizes[array], self.dtypes[array])

    def widen(self, array: int) -> None:
        """The array is in float32 instead of fewer bits."""
        if self.dtypes[array] in NARROW and array not in self.on_host:
            self.itemsizes[array], self.dtypes[array] = 4, "float32"


@dataclass(slots=True)
class FlatProgram:
    """A program without calls.

    Attributes:
        arrays: of this program and of all those in it.
        inputs: ids of its arguments.
        outputs: ids of its results, or `LITERAL`.
        ops: what it does, in order; nothing whose result is not used.
        propagated: how its arrays are split, by how its inputs are: what `propagate` found so far.
    """

    arrays: Arrays
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: list[Op]
    propagated: dict[Any, list[Any]] = field(default_factory=dict, compare=False)
