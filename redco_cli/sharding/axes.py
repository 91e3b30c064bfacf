"""Logical axes: which dims of which arrays are one and the same, found by unification.

An *axis* is what a dim means: the width of one MLP, the heads of one attention, the vocabulary. Two dims that an
operation makes equal element by element have the same axis. A dim may be an ordered product of axes, its *factors*,
major first: a projection to `heads * head_dim` features has the factors (heads, head_dim) once the program reshapes it.

    unify(a, b)            the two dims are the same from here on
    split(a, [h, d])       dim a as its factors of sizes h and d: reshape, read backwards it merges

A dim is kept as a tuple of axes. An axis that is found to be a product later is replaced by its factors wherever it
occurs, because axes are looked up only through `factors`. Dims of size one have no factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Axis:
    """A node of a union-find forest. Compare axes by identity, after `root`."""

    __slots__ = ("children", "layer", "parent", "size", "whole")

    def __init__(self, size: int) -> None:
        """An axis that nothing is known about.

        Args:
            size: number of elements, more than one.
        """
        self.size = size
        self.parent: Axis | None = None
        self.children: tuple[Axis, ...] = ()
        self.layer = False
        self.whole = False


Dim = tuple[Axis, ...]


def fresh(size: int) -> Dim:
    """A dim of its own."""
    return (Axis(size),) if size > 1 else ()


def fresh_dims(shape: Sequence[int]) -> tuple[Dim, ...]:
    """Dims of their own for each size in a shape."""
    return tuple(fresh(size) for size in shape)


def root(axis: Axis) -> Axis:
    """The representative of all axes that were unified with this one."""
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def factors(dim: Dim) -> Dim:
    """The dim as representatives that are not products themselves, major first."""
    if len(dim) == 1:  # by far the most frequent case
        only = root(dim[0])
        return factors(only.children) if only.children else (only,)
    found: list[Axis] = []
    for axis in dim:
        found.extend(factors((axis,)))
    return tuple(found)


def size(dim: Dim) -> int:
    """The number of elements along a dim."""
    return math.prod(axis.size for axis in dim)


def mark_layer(dim: Dim) -> None:
    """Says that a loop or a window runs over this dim: its elements are used one by one, so it is never split."""
    for axis in factors(dim):
        axis.layer = True


def unify(first: Dim, second: Dim) -> bool:
    """Makes two dims of equal size the same, factor by factor.

    Returns:
        False where their factors do not line up, such as 6 = 2·3 and 6 = 3·2; what lines up before is unified.
    """
    left, right = list(factors(first)), list(factors(second))
    while left and right:
        a, b = root(left[0]), root(right[0])
        if a.children or b.children:  # split while an earlier factor was unified
            left[:1], right[:1] = factors((a,)), factors((b,))
        elif a is b:
            del left[0], right[0]
        elif a.size == b.size:
            _join(a, b)
            del left[0], right[0]
        elif a.size % b.size == 0:
            _divide(a, b.size)
        elif b.size % a.size == 0:
            _divide(b, a.size)
        else:
            return False
    return not left and not right


def split(dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
    """The dim as consecutive dims of the given sizes.

    Args:
        dim: to be cut.
        sizes: major first, their product the size of the dim.

    Returns:
        The parts; None where they cut through a factor unevenly.
    """
    rest, parts = list(factors(dim)), []
    for wanted in sizes:
        part: list[Axis] = []
        left = wanted
        while left > 1:
            axis = rest[0]
            if left % axis.size == 0:
                part.append(rest.pop(0))
                left //= axis.size
            elif axis.size % left == 0:
                rest[:1] = _divide(axis, left)
            else:
                return None
        parts.append(tuple(part))
    return parts


def reshape(dims: Sequence[Dim], old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim | None], list[int]]:
    """Carries dims through a row-major reshape.

    Args:
        dims: of the operand.
        old: its shape.
        new: the shape of the result.

    Returns:
        The dims of the result, None for those that cannot be told; and which dims of the operand are lost so.
    """
    result: list[Dim | None] = [()] * len(new)
    lost: list[int] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        before, after = 1, 1
        while True:  # the smallest groups of dims, one from each shape, that hold the same number of elements
            if before <= after and i < len(old) and (before < after or i == first_i):
                before, i = before * old[i], i + 1
            elif j < len(new) and (after < before or j == first_j):
                after, j = after * new[j], j + 1
            if before == after:
                break
        merged = tuple(axis for dim in dims[first_i:i] for axis in dim)
        parts = split(merged, new[first_j:j])
        if parts is None:
            lost.extend(range(first_i, i))
            result[first_j:j] = [None] * (j - first_j)
        else:
            result[first_j:j] = parts
    return result, lost


def _join(a: Axis, b: Axis) -> None:
    b.parent = a
    a.layer |= b.layer
    a.whole |= b.whole


def _divide(axis: Axis, major: int) -> Dim:
    """Finds that an axis is a product of two."""
    axis.children = (Axis(major), Axis(axis.size // major))
    for child in axis.children:
        child.layer, child.whole = axis.layer, axis.whole
    return axis.children
