"""Encoded texts as the loader reads them: each row put together from its pieces when it is asked for."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_cli.data.encoded.packing import Numbers, Overflow, Pieces, best_fit, one_each, pieces_of
from redco_cli.data.encoded.store import Encoded
from redco_cli.data.examples import evenly_spread
from redco_cli.row_notes import WITHOUT_LOSS

IDS, LABELS, SEGMENTS, POSITIONS = "input_ids", "labels", "segment_ids", "position_ids"

_AT_ONCE, _SAMPLE = 10_000, 256
"""Pieces whose labels are in memory at once; texts whose tokens are in the digest."""


def longer_note(capacity: int, overflow: Overflow) -> str:
    """What is noted of texts that are longer than a row."""
    done = {"truncate": "cut", "split": "split", "drop": "left out"}[overflow]
    return f"longer than data.max_length {capacity}, and {done}"


@dataclass(frozen=True)
class Row(Mapping[str, Any]):
    """One row: name to 1-D array. What it is made of needs no encoding any more.

    Attributes:
        fields: the arrays.
        origin: tells where its texts are from; None where its number does.
    """

    fields: Mapping[str, NDArray[Any]]
    origin: Callable[[], str] | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


class Rows(Sequence[Row]):
    """All rows of a split, in an order that follows from the texts alone.

    A packed row has `segment_ids`, which number its texts from 1, and `position_ids`, which begin at 0 in each; the
    first token of each text, which nothing predicts, has no label.

    Attributes:
        encoded: the texts.
        pieces: what is left of them.
        capacity: the most tokens of a row.
        is_packed: whether several texts share a row.
    """

    def __init__(self, encoded: Encoded, capacity: int, overflow: Overflow, *, packed: bool, ignored: int) -> None:
        """Reads the lengths only.

        Args:
            encoded: the texts.
            capacity: the most tokens of a row.
            overflow: what becomes of longer texts.
            packed: whether several texts share a row.
            ignored: the label of a token that carries no loss.
        """
        self.encoded, self.capacity, self.is_packed = encoded, capacity, packed
        self._overflow, self._ignored = overflow, ignored
        self.pieces: Pieces = pieces_of(encoded.lengths, capacity, overflow)
        lengths = self.pieces.lengths
        self._order: Numbers
        self._first: Numbers
        self._order, self._first = best_fit(lengths, capacity) if packed else one_each(len(lengths))

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        pieces = self._order[self._first[index] : self._first[index + 1]]
        parts = [self._part(int(piece)) for piece in pieces]
        if not self.is_packed:
            return Row(parts[0])
        for number, part in enumerate(parts, start=1):
            count = len(part[IDS])
            part[LABELS] = part[LABELS].copy()
            part[LABELS][0] = self._ignored
            part[SEGMENTS], part[POSITIONS] = np.full(count, number, np.int32), np.arange(count, dtype=np.int32)
        return Row({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    @functools.cached_property
    def lengths(self) -> Numbers:
        """Of each row that is not packed, what its longest field needs."""
        tokens, longest = self.encoded.lengths[self.pieces.text], self.pieces.lengths
        for offsets in self.encoded.offsets.values():
            own = np.diff(offsets)[self.pieces.text]  # targets of their own are not cut with the text
            longest = np.maximum(longest, np.where(own == tokens, self.pieces.lengths, own))
        return longest[self._order]

    @property
    def filled(self) -> float:
        """The share of the positions of all rows that hold a token."""
        return float(self.pieces.lengths.sum() / (len(self) * self.capacity)) if len(self) else 0.0

    def notes(self) -> Counter[str]:
        """What is to be said of the texts, to how many of them. Reads all labels."""
        notes = Counter(self.encoded.notes)
        notes[longer_note(self.capacity, self._overflow)] += int((self.encoded.lengths > self.capacity).sum())
        pieces = self.pieces
        notes[WITHOUT_LOSS] += len(self.encoded) - len(np.unique(pieces.text[self._teaching()]))
        return +notes

    def _teaching(self) -> NDArray[np.bool_]:
        """Of each piece, whether one of its labels but the first, which nothing predicts, counts."""
        labels, offsets = self.encoded.values[LABELS], self.encoded.offsets[LABELS]
        if not np.array_equal(offsets, self.encoded.offsets[IDS]):  # targets of their own, all of which count
            counted = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(labels) != self._ignored)])
            return (counted[offsets[1:]] > counted[offsets[:-1]])[self.pieces.text]
        first = offsets[self.pieces.text] + self.pieces.start + 1
        stop = first - 1 + self.pieces.lengths
        found = np.zeros(len(first), bool)
        for begin in range(0, len(first), _AT_ONCE):
            chunk = slice(begin, begin + _AT_ONCE)
            origin = int(first[chunk][0])
            counted = np.asarray(labels[origin : int(stop[chunk][-1])]) != self._ignored
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counted)])
            found[chunk] = before[stop[chunk] - origin] > before[first[chunk] - origin]
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return int(self.pieces.lengths.max(initial=0))

    @property
    def digest(self) -> str:
        """Of the lengths of all texts and the tokens of a sample: other rows have another."""
        digest = hashlib.sha256(np.ascontiguousarray(self.encoded.lengths).tobytes())
        digest.update(self.encoded.content(evenly_spread(len(self.encoded), _SAMPLE)))
        return digest.hexdigest()[:16]

    def place(self, index: int) -> str:
        """Where the texts of a row are from."""
        pieces = self._order[self._first[index] : self._first[index + 1]]
        return ", ".join(self.encoded.place(int(self.pieces.text[piece])) for piece in pieces)

    def _part(self, piece: int) -> dict[str, NDArray[Any]]:
        start, stop = int(self.pieces.start[piece]), int(self.pieces.stop[piece])
        text = self.encoded[int(self.pieces.text[piece])]
        length = len(text[IDS])
        return {name: field[start:stop] if len(field) == length else field for name, field in text.items()}
