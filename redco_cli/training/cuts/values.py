"""What the rows of a batch come to in each array of a loss, and how that combines.

    CONSTANT    no row enters: parameters, numbers, random draws
    ROWS        row i of the array is made of row i of the batch alone
    SUM         a sum over the rows: cut the batch, and the parts add up to it
    QUOTIENT    made of such sums by multiplying or dividing, as a mean is: parts do not add up, unless it is undone
    MIXED       rows have met in a way that nothing undoes: parts do not add up
    UNKNOWN     it cannot be told

A loss that is a SUM does not depend on how its batch is cut. Where the rules have to guess they say UNKNOWN, and of an
UNKNOWN loss nothing is said to the user: a false alarm costs more than a mistake that a run finds by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from redco_cli.sharding.axes import Axis, Dim, factors


class Kind(Enum):
    """What an array holds of the rows of a batch."""

    CONSTANT = 0
    ROWS = 1
    SUM = 2
    QUOTIENT = 3
    MIXED = 4
    UNKNOWN = 5


@dataclass(frozen=True)
class Cause:
    """How rows have met.

    Attributes:
        what: in a few words.
        equation: where: the innermost equation that was traced for this very loss.
    """

    what: str
    equation: Any


@dataclass(frozen=True)
class Value:
    """What is known of an array.

    Attributes:
        kind: what it holds of the rows.
        dims: of ROWS, one for each dim: the axis of the batch is in one of them.
        cause: of QUOTIENT and MIXED, how it came about.
        from_key: the random key of the step enters.
        draws: numbers of the random draws that enter.
        is_given: some argument enters: a parameter, the batch, the key, the step.
        counts: the numbers of the rows, 0 to B - 1, enter: `x[arange(B), i]` picks something of each row.
    """

    kind: Kind
    dims: tuple[Dim, ...] = ()
    cause: Cause | None = None
    from_key: bool = False
    draws: frozenset[int] = frozenset()
    counts: bool = False
    is_given: bool = False


CONSTANT = Value(Kind.CONSTANT)
UNKNOWN = Value(Kind.UNKNOWN)
SUM = Value(Kind.SUM)


def rows(dims: Sequence[Dim]) -> Value:
    """An array whose rows are those of the batch."""
    return Value(Kind.ROWS, tuple(dims))


class Batch:
    """The axis of the batch, whatever factors a reshape finds in it."""

    def __init__(self, size: int) -> None:
        """One axis of `size` examples, at least two."""
        self.axis = Axis(size)

    def of(self, dim: Dim) -> frozenset[Axis]:
        """The factors of the batch in a dim."""
        return frozenset(factors(dim)) & self.all

    @property
    def all(self) -> frozenset[Axis]:
        """All factors of the batch."""
        return frozenset(factors((self.axis,)))

    def places(self, value: Value) -> list[int]:
        """Which dims of ROWS hold the batch, or a factor of it."""
        return [place for place, dim in enumerate(value.dims) if self.of(dim)]

    def layout(self, dim: Dim) -> tuple[Any, ...]:
        """A dim such that two are equal where the batch lies in them alike."""
        own, found = self.all, list[Any]()
        for is_own, group in itertools.groupby(factors(dim), own.__contains__):
            axes = list(group)
            found += axes if is_own else [math.prod(axis.size for axis in axes)]
        return tuple(found)

    def layouts(self, value: Value) -> tuple[tuple[Any, ...], ...]:
        """The layout of each dim."""
        return tuple(self.layout(dim) for dim in value.dims)


def tagged(value: Value, operands: Sequence[Value]) -> Value:
    """A value with the keys, draws, arguments and numbers of rows that its operands bring."""
    every = (value, *operands)
    keyed, counts = any(x.from_key for x in every), any(x.counts for x in every)
    is_given, draws = any(x.is_given for x in every), value.draws.union(*(x.draws for x in operands))
    if (keyed, draws, counts, is_given) == (value.from_key, value.draws, value.counts, value.is_given):
        return value
    return replace(value, from_key=keyed, draws=draws, counts=counts, is_given=is_given)


def either(batch: Batch, first: Value, second: Value) -> Value:
    """What holds of an array that is one of two, such as the carry of a loop before and after a round."""
    a, b = sorted((first, second), key=lambda x: x.kind.value)
    if a.kind is Kind.CONSTANT or b.kind is Kind.UNKNOWN or b.kind is Kind.MIXED:
        found = b
    elif a.kind is b.kind is Kind.ROWS:
        found = a if batch.layouts(a) == batch.layouts(b) else UNKNOWN
    elif b.kind is Kind.QUOTIENT or a.kind is b.kind:
        found = b
    else:
        found = UNKNOWN
    return tagged(found, (first, second))


def same(batch: Batch, first: Value, second: Value) -> bool:
    """Whether two values say the same."""
    plain = [replace(x, dims=(), cause=None) for x in (first, second)]
    return plain[0] == plain[1] and batch.layouts(first) == batch.layouts(second)
