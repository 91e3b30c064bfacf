"""When the arrays of a program exist, as data: what `liveness` finds and `peak` plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Layer:
    """A slice of a parameter that one iteration of a loop reads.

    Attributes:
        parameter: id of the whole, around the loop.
        array: id of the slice, within it.
        itemsize: of an element as it is read.
        first: when an iteration reads it first.
        last: when it does last.
    """

    parameter: int
    array: int
    itemsize: int
    first: int
    last: int


@dataclass(frozen=True)
class Loop:
    """A loop, or a branch of a choice.

    Attributes:
        time: when it runs.
        body: what happens in one iteration.
        stacked: index in `arrays` of the timeline around it of each stacked result.
        layers: what it reads of parameters without writing it out in another precision.
    """

    time: int
    body: Timeline
    stacked: tuple[int, ...]
    layers: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Reads:
    """How an input is read.

    Attributes:
        times: when.
        sliced: by loops, one slice at a time.
        rematerialized: also by parts of the backward pass that are rematerialized.
    """

    times: tuple[int, ...]
    sliced: bool
    rematerialized: bool


@dataclass(frozen=True)
class Cast:
    """An input of which loops cast slices.

    Attributes:
        itemsize: of the result.
        first: when the first of these loops runs.
        last: when the last does.
    """

    itemsize: int
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """When the arrays of a program exist. Time counts what is written out, in the order that it is.

    Attributes:
        arrays: ids of what is written out.
        births: the time at which each is written.
        deaths: the last time at which each is read.
        is_weight: whether each is a parameter in another place or precision, rather than computed.
        made_by: the primitive that wrote each.
        casts: by index of what a loop stacks of slices of an input, in another precision, that input, and whether
            what reads the stack gathers them once more.
        outputs: for each output of the program the indices in `arrays` of what it is: itself, and what it is the sum
            of; none where it is an input or a literal.
        stacked: the same for what an iteration of a loop adds to each stacked result; of a loop's body only.
        reads: by id of an input, how it is read.
        cast_slices: by id of an input, what loops cast of it and do not keep.
        loops: the loops and choices.
        loss: times of the last product before the first output, and of the first one after it.
        length: one more than the last time.
    """

    arrays: Integers
    births: Integers
    deaths: Integers
    is_weight: NDArray[np.bool_]
    made_by: tuple[str, ...]
    casts: Mapping[int, tuple[int, bool]]
    outputs: tuple[tuple[int, ...], ...]
    stacked: tuple[tuple[int, ...], ...]
    reads: Mapping[int, Reads]
    cast_slices: Mapping[int, Cast]
    loops: tuple[Loop, ...]
    loss: tuple[int, int]
    length: int
