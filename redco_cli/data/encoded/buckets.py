"""What the rows of a batch are padded to: the shortest of a few lengths that holds the longest of them.

A step is compiled for one length, so there are few, known beforehand. All micro-batches and processes of a step share
its length. It follows from the lengths of rows alone, which every process knows, so that nobody has to be asked: of a
stream every process encodes all rows of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redco_cli.data.encoded.packing import Numbers
from redco_cli.data.encoded.windows import EncodedStream, looked_at
from redco_cli.recipe.data import DataSection

LENGTHS = 4
"""So many lengths are chosen at most: each is a program to be compiled, and further ones save little."""
_WORTH = 0.05
"""A length that saves less than this share of the positions is not chosen."""
_SHORTEST = 64
"""Prompts below this length gain nothing by being shorter still."""


@dataclass(frozen=True)
class Buckets:
    """The lengths that rows are padded to.

    Attributes:
        lengths: ascending; the last holds every row, as far as rows may be padded at all.
        rows: tokens of each row; of a stream those of its first examples.
    """

    lengths: tuple[int, ...]
    rows: Numbers

    def of(self, indices: Sequence[int] | Numbers) -> int:
        """The length of a batch that holds these rows."""
        return self.holding(int(self.rows[np.asarray(indices)].max()))

    def holding(self, longest: int) -> int:
        """The length of a batch whose longest row has so many tokens."""
        return next((length for length in self.lengths if length >= longest), self.lengths[-1])

    def filled(self, together: int) -> float:
        """The share of positions that hold a token, as expected over random batches of so many rows."""
        reached = np.searchsorted(np.sort(self.rows), self.lengths, side="right") / len(self.rows)
        expected = (np.diff(reached**together, prepend=0.0) * np.array(self.lengths)).sum()
        return float(self.rows.mean() / expected)

    def by_length(self) -> Numbers:
        """All rows, those of the longest bucket first, within a bucket in their own order.

        The longest come first so that a device with too little memory says so at once.
        """
        order: Numbers = np.argsort(-np.searchsorted(self.lengths, self.rows), kind="stable")
        return order

    def shortest(self, count: int) -> list[int]:
        """The `count` shortest rows, or all where there are fewer: any length that a batch may have holds them."""
        chosen: list[int] = np.argsort(self.rows, kind="stable")[:count].tolist()
        return chosen


def buckets_of(section: DataSection, rows: Any, known: Any, together: int, most: int = LENGTHS) -> Buckets | None:
    """What rows are padded to; None where all are to `data.max_length`: packed, or not encoded.

    Args:
        section: of the recipe.
        rows: what a loss reads, the recipe's or others; others are padded to lengths of the recipe's.
        known: the recipe's. Of a stream the first examples say which lengths there are, besides `data.max_length`.
        together: how many rows share a length; 1 where they are sorted by it.
        most: how many lengths are chosen at most.
    """
    own, recipe = looked_at(rows), looked_at(known)
    if section.buckets is False or own is None or own.is_packed or recipe is None:
        return None
    streamed = isinstance(known, EncodedStream)
    if section.buckets == "auto":
        lengths = chosen_lengths(recipe.lengths, section.max_length, together, most)
        if streamed and lengths[-1] < section.max_length:
            lengths = chosen_lengths(recipe.lengths, section.max_length, together, most - 1)
    else:
        longest = section.max_length if streamed else int(recipe.lengths.max())
        lengths = given_lengths(section.buckets, longest, section.max_length)
    if (streamed or rows is not known) and lengths[-1] < section.max_length:
        lengths = (*lengths, section.max_length)
    return Buckets(lengths, own.lengths)


def chosen_lengths(rows: Numbers, capacity: int, together: int, most: int = LENGTHS) -> tuple[int, ...]:
    """The lengths with which batches of these rows have the fewest positions, as expected over random batches.

    The longest of G rows is at most c with probability F(c)^G, F being the share of rows of at most c. So the expected
    length of a batch is Σ c_i (F(c_i)^G - F(c_i-1)^G), which is least for one choice of lengths c_1 < c_2 < ...: found
    by dynamic programming over multiples of some tokens.

    Args:
        rows: tokens of each row.
        capacity: `data.max_length`.
        together: G, the rows that share a length; 1 where they are sorted by it.
        most: how many lengths at most.

    Returns:
        Ascending. Fewer than `most` where these do within 5 % as well.

    >>> chosen_lengths(np.array([30] * 90 + [500] * 10), 512, together=1)
    (64, 512)
    >>> chosen_lengths(np.array([30] * 90 + [500] * 10), 512, together=64)
    (512,)
    """
    candidates = _candidates(rows, capacity)
    reached = np.searchsorted(np.sort(rows), candidates, side="right") / len(rows)
    reached[-1] = 1.0
    probability = np.concatenate([np.zeros(1), reached**together])
    # cost[i, j]: what batches contribute that are longer than candidate i - 1 and padded to candidate j
    cost = np.where(
        np.arange(len(candidates) + 1)[:, None] <= np.arange(len(candidates))[None, :],
        (probability[None, 1:] - probability[:, None]) * candidates[None, :],
        np.inf,
    )
    best, choices = cost[0], [[(int(length),) for length in candidates]]
    totals = [float(best[-1])]
    for _ in range(1, min(most, len(candidates))):
        sums = best[:, None] + cost[1:, :]  # up to candidate i, then one more length
        before = sums.argmin(axis=0)
        best = sums.min(axis=0)
        choices.append([(*choices[-1][i], int(length)) for i, length in zip(before, candidates, strict=True)])
        totals.append(float(best[-1]))
    enough = min(totals) * (1 + _WORTH)
    return next(row[-1] for total, row in zip(totals, choices, strict=True) if total <= enough)


def given_lengths(given: Sequence[int], longest: int, capacity: int) -> tuple[int, ...]:
    """The lengths of a recipe, ascending, as far as rows need them; `data.max_length` where rows are longer.

    >>> given_lengths([64, 32, 128], 40, 256), given_lengths([32], 40, 256)
    ((32, 64), (32, 256))
    """
    lengths = sorted({*given, capacity})
    shorter = tuple(itertools.takewhile(lambda length: length < longest, lengths))
    return (*shorter, *lengths[len(shorter) : len(shorter) + 1])


def prompt_lengths(capacity: int) -> tuple[int, ...]:
    """The lengths for prompts, of which nothing is known beforehand: an eighth, a quarter, half, and all of it.

    >>> prompt_lengths(2048), prompt_lengths(100)
    ((256, 512, 1024, 2048), (64, 100))
    """
    shares = {max(_SHORTEST, -(-capacity // part // 32) * 32) for part in (8, 4, 2)}
    return (*sorted(length for length in shares if length < capacity), capacity)


def _candidates(rows: Numbers, capacity: int) -> Numbers:
    """Lengths to choose from: multiples of 32 or 64 tokens, coarser for long rows, up to one that holds all of them."""
    unit = 32 if capacity < 512 else max(64, capacity // 32 // 64 * 64)
    last = min(capacity, -(-int(rows.max()) // unit) * unit)
    return np.array([*range(unit, last, unit), last], np.int64)
