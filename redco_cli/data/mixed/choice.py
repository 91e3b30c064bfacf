"""Some of many examples, drawn by their numbers in their source alone."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
HELD_OUT, WEIGHED = 1, 2
"""What numbers are drawn for: who is held out says nothing of who is left out by a weight."""


def one_of_each(share: Fraction, count: int, purpose: int) -> Numbers:
    """Numbers below `count`: one drawn from each stretch of 1/share, so that what follows changes none of them."""
    chosen = _of_stretches(np.arange(count * share.numerator // share.denominator + 1, dtype=np.int64), share, purpose)
    return chosen[chosen < count]


@functools.lru_cache(maxsize=256)
def one_of(share: Fraction, stretch: int, purpose: int) -> int:
    """The number that `one_of_each` draws of a stretch, counted from 0."""
    return int(_of_stretches(np.array([stretch], np.int64), share, purpose)[0])


def is_one(share: Fraction, number: int, purpose: int) -> bool:
    """Whether a number is one of those that `one_of_each` draws."""
    return number == one_of(share, number * share.numerator // share.denominator, purpose)


def drawn(numbers: Numbers, count: int, purpose: int) -> Numbers:
    """So many of the numbers, ascending: those whose own draws are the smallest."""
    return np.sort(numbers[np.argsort(_random(numbers, purpose), kind="stable")[:count]])


def _of_stretches(stretches: Numbers, share: Fraction, purpose: int) -> Numbers:
    """The number that is drawn from each stretch."""
    firsts = -(-stretches * share.denominator // share.numerator)
    sizes = -(-(stretches + 1) * share.denominator // share.numerator) - firsts
    chosen: Numbers = firsts + (_random(stretches, purpose) % sizes.astype(np.uint64)).astype(np.int64)
    return chosen


def _random(numbers: Numbers, purpose: int) -> NDArray[np.uint64]:
    """A draw for each number that depends on nothing else: the finalizer of splitmix64."""
    mixed = (numbers.astype(np.uint64) << np.uint64(2)) + np.array([purpose], np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
