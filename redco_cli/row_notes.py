"""What is noted of single rows of a batch while it is collated (cut, empty, ...), and how such notes add up.

A building block notes rows without knowing who listens: `collate_fn` stays a plain function from examples to arrays.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

Notes = dict[str, list[int]]
"""What was noted, in the words that follow \"37 of 5000 rows\", to the rows of the batch, from 0."""
WITHOUT_LOSS = "without a token that carries loss"
"""The note that has a meaning to redco: where it is true of all rows there is nothing to learn."""

_listening: ContextVar[Notes | None] = ContextVar("listening", default=None)


def note_rows(what: str, rows: Iterable[int]) -> None:
    """Notes something of rows of the batch that is being collated; nothing where nobody counts.

    Args:
        what: in words that follow "37 of 5000 rows", such as "longer than 512 tokens, and cut".
        rows: which of the examples, from 0.
    """
    notes, found = _listening.get(), list(rows)
    if notes is not None and found:
        notes[what] = sorted({*notes.get(what, ()), *found})


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """Collects what is noted within, in this thread."""
    notes: Notes = {}
    token = _listening.set(notes)
    try:
        yield notes
    finally:
        _listening.reset(token)


@dataclass
class RowCounts:
    """How many rows there were, and of how many something was noted.

    Attributes:
        rows: all of them.
        noted: what was noted to the number of rows.
    """

    rows: int = 0
    noted: Counter[str] = field(default_factory=Counter)

    def add(self, counted: Sequence[bool], notes: Mapping[str, Sequence[int]]) -> None:
        """Adds a batch.

        Args:
            counted: of each row, whether it counts.
            notes: of the batch.
        """
        self.rows += sum(counted)
        for what, rows in notes.items():
            self.noted[what] += sum(counted[row] for row in rows)

    def line(self) -> str:
        """One line: `37 of 5000 rows longer than data.max_length 512, and cut; 3 with an empty 'text'`; "" for none."""
        told = [f"{count} {what}" for what, count in self.noted.items() if count]
        first, _, what = "; ".join(told).partition(" ")
        return f"{first} of {self.rows} rows {what}" if told else ""

    def nothing_to_learn(self) -> str:
        """The problem when not one row carries loss; "" where one does, or nothing was counted."""
        if not self.rows or self.noted[WITHOUT_LOSS] < self.rows:
            return ""
        others = "; ".join(f"{count} {what}" for what, count in self.noted.items() if count and what != WITHOUT_LOSS)
        return f"nothing to learn: {self.rows} of {self.rows} rows {WITHOUT_LOSS}{'; ' if others else ''}{others}"


NOTHING_REMEDY = "correct the data or the columns in plugin.options; where rows are cut, raise data.max_length"
"""What to do when there is nothing to learn."""
