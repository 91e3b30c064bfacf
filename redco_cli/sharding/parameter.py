"""A leaf of the parameter tree, and the logical axes of its dims."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from redco_cli.sharding.axes import Axis, Dim


@dataclass(frozen=True)
class Parameter:
    """One leaf of the parameter tree.

    Attributes:
        path: keys joined by `/`.
        shape: sizes of its dims.
        dtype: of its elements.
        dims: the factors of each dim.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[Dim, ...]

    @property
    def bytes(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def axes(self) -> frozenset[Axis]:
        """All its axes."""
        return frozenset(axis for dim in self.dims for axis in dim)

    @property
    def is_vector(self) -> bool:
        """Whether it has less than two dims, besides those of size one and those that a loop runs over."""
        return sum(bool(dim) and not all(axis.layer for axis in dim) for dim in self.dims) < 2

    def layers(self) -> tuple[bool, ...]:
        """For each dim whether a loop runs over it."""
        return tuple(any(axis.layer for axis in dim) for dim in self.dims)

    def indivisible(self) -> tuple[bool, ...]:
        """For each dim whether it must not be split: a loop runs over it, or the program says so."""
        return tuple(any(axis.layer or axis.whole for axis in dim) for dim in self.dims)
