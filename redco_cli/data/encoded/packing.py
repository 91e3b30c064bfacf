"""What is too long, and which texts share a row: best-fit decreasing.

A piece is a part of a text, or all of it. The longest pieces are placed first, each into the row with the least room
that still holds it. (Johnson, 1974: about 11/9 of the fewest rows at worst.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Overflow = Literal["truncate", "split", "drop"]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parts of texts, none longer than a row, in the order of the texts.

    Attributes:
        text: number of the text of each piece.
        start: its first token in the text.
        stop: the token after its last.
    """

    text: Numbers
    start: Numbers
    stop: Numbers

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> Numbers:
        """Tokens of each piece."""
        return self.stop - self.start


def pieces_of(lengths: Any, capacity: int, overflow: Overflow) -> Pieces:
    """Texts as pieces that fit a row; empty ones have none.

    Args:
        lengths: tokens of each text.
        capacity: tokens of a row.
        overflow: of a longer text keep the beginning, all of it as pieces of a row each and a rest, or nothing.

    >>> pieces_of([5, 0, 2], 4, "split").lengths.tolist()
    [4, 1, 2]
    """
    lengths = np.asarray(lengths, np.int64)
    if overflow == "split":
        counts = -(-lengths // capacity)
        text = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        start = number * capacity
        return Pieces(text, start, np.minimum(start + capacity, lengths[text]))
    kept = lengths > 0 if overflow == "truncate" else (lengths > 0) & (lengths <= capacity)
    text = np.flatnonzero(kept)
    return Pieces(text, np.zeros_like(text), np.minimum(lengths[text], capacity))


def best_fit(lengths: Any, capacity: int) -> tuple[Numbers, Numbers]:
    """Which pieces share a row.

    The result depends on nothing but the arguments: pieces of one length are placed in their order, and of rows with
    the same room the one comes first that has had it longest.

    Args:
        lengths: tokens of each piece, 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        The pieces, row after row; and where each row begins among them, with the end of the last: [rows + 1].

    >>> best_fit([3, 4, 1], 4)
    (array([1, 0, 2]), array([0, 1, 3]))
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"pieces of {lengths.min()} to {lengths.max()} tokens do not fit rows of {capacity}")
    rows: list[list[int]] = []
    having: defaultdict[int, deque[int]] = defaultdict(deque)
    room = 0  # bit r is set where a row has room for r tokens
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = room >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = having[left].popleft()
            if not having[left]:
                room ^= 1 << left
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left > length:
            having[left - length].append(row)
            room |= 1 << (left - length)
    counts = np.array([len(row) for row in rows], np.int64)
    order = np.array([piece for row in rows for piece in row], np.int64)
    return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def one_each(count: int) -> tuple[Numbers, Numbers]:
    """Rows of one piece each, in the form of `best_fit`."""
    return np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64)
