"""Rows of examples without a length: window after window of them, each encoded and packed by itself.

Window k of an epoch is the examples [k * W, (k + 1) * W) of the source, or what is left of it. Its rows follow from
these examples alone, and their order from (seed, epoch, k). So a place in the stream is a window and a number of its
rows, and to go on from there, one window is read and encoded again. To draw examples from a buffer first and pack them
then would mix them further, but take 9 to 14 windows to go on, all encoded again.

While the rows of a window are used, a thread encodes the next one: two are in memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from redco_cli.data.encoded.encode import encoded_part
from redco_cli.data.encoded.outcome import Encode
from redco_cli.data.encoded.rows import IDS, Row, Rows
from redco_cli.data.encoded.store import Encoded
from redco_cli.data.encoded.texts import TextStream, first_digest, first_rows
from redco_cli.data.examples import Example
from redco_cli.data.places import place_of
from redco_cli.data.stream import Journal, is_seekable, random_state
from redco_cli.errors import DataError
from redco_cli.row_notes import RowCounts

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """The rows of one window.

    Attributes:
        first: number of its first example in the epoch.
        rows: of it, in the order of packing.
        order: in which they come out.
        source: where the source may be opened to read it: the number of an example at or before `first`, and the
            bookmark there; None is the start.
    """

    first: int
    rows: Rows
    order: list[int]
    source: tuple[int, Any]


class RowStream(Iterable[Row]):
    """Examples without a length as rows, in an order of its own: nothing need shuffle them.

    Attributes:
        examples: they are made of.
        pack: the texts of a window to rows.
        window: examples that are packed together, W.
        seed: of the order of the rows of a window; None leaves them in the order of packing.
        name: the place of the data, for errors.
        journal: where training is in it.
        counts: how many examples of the first epoch were read, and what was noted of them; alike on all processes.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        encode: Encode,
        pack: Callable[[Encoded], Rows],
        *,
        window: int,
        seed: int | None,
        where: str,
        name: str,
    ) -> None:
        """Reads nothing yet.

        Args:
            examples: an iterable that starts afresh each time, and perhaps at a bookmark.
            encode: one example to a text; it is called by one thread at a time.
            pack: the texts of a window to rows.
            window: examples that are packed together, W.
            seed: of the order of rows within a window; None leaves them in the order of packing.
            where: the place of `encode_fn`.
            name: the place of the data.
        """
        self.examples, self.pack, self.window, self.seed = examples, pack, window, seed
        self.journal, self.counts = Journal(), RowCounts()
        self.name, self._encode, self._where = name, encode, where
        self._counted: tuple[int, int] | None = None
        self.kept: dict[tuple[int, int], Window] = {}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.open(None))

    def open(self, bookmark: Any, epoch: int = 0) -> OpenRows:
        """Begins to read the rows of an epoch: at a bookmark, or for None at its start."""
        return OpenRows(self, bookmark, epoch)

    def place(self, number: int) -> str:
        """Where a row of `first` is from."""
        return self.first.place(number)

    @functools.cached_property
    def first(self) -> Rows:
        """Rows of the first examples, to look at; see `first_rows`."""
        return first_rows(self.examples, self._encode, self.pack, where=self._where, name=self.name)

    @property
    def digest(self) -> str:
        """Of the tokens of the examples by which streams are told apart; see `first_digest`."""
        return first_digest(self.first)

    def rows_of(self, examples: Iterable[Example], epoch: int, first: int) -> tuple[int, Rows | None]:
        """How many examples a window has, and its rows, which are counted; None where all are left out.

        Args:
            examples: of the window.
            epoch: of it.
            first: number of its first example.
        """
        count, notes, encoded = self._encoded(examples, first)
        rows = None if encoded is None else self.pack(encoded)
        place = epoch, first
        if count and (self._counted is None or (epoch == self._counted[0] and place > self._counted)):
            self._counted = place
            self.counts.rows += count
            self.counts.noted.update(notes if rows is None else rows.notes())
        return count, rows

    def keep(self, epoch: int, window: Window) -> None:
        """Keeps the two windows that were used last, for a loop that reads a few rows at a time."""
        before = [(place, one) for place, one in self.kept.items() if place != (epoch, window.first)]
        self.kept = dict([*before[-1:], ((epoch, window.first), window)])

    def _encoded(self, examples: Iterable[Example], first: int) -> Any:
        def place(number: int) -> str:
            return place_of(self.examples, first + number)

        return encoded_part(self._encode, examples, measure=IDS, where=self._where, place=place)


class OpenRows:
    """The rows of an epoch that is being read."""

    def __init__(self, stream: RowStream, bookmark: Any, epoch: int) -> None:
        """Reads nothing yet.

        Args:
            stream: what they are of.
            bookmark: as `bookmark` returned it; None is the start.
            epoch: from 0.
        """
        self._stream, self._epoch, self._begin = stream, epoch, bookmark
        self._given: tuple[Window, int] | None = None
        self._stopped = threading.Event()

    def __iter__(self) -> Iterator[Row]:
        stream, before = self._stream, 0 if self._begin is None else self._begin["row"]
        with contextlib.closing(_one_ahead(self._windows(), self._stopped)) as windows:
            for window in windows:
                if before and (window.first, before) > (self._begin["first"], len(window.order)):
                    break
                stream.keep(self._epoch, window)
                for number in range(before, len(window.order)):
                    self._given = window, number + 1
                    index = window.order[number]
                    yield Row(window.rows[index].fields, functools.partial(window.rows.place, index))
                before = 0
        if before:
            problem = f"has fewer rows than when the run was saved, from example {self._begin['first']} on"
            raise DataError(self._stream.name, problem, "restore the data, or choose another output_dir for a new run")

    def bookmark(self) -> Any:
        """What opens the stream behind the row that came last, as plain data."""
        if self._given is None:
            return self._begin
        window, row = self._given
        return {"first": window.first, "row": row, "source": list(window.source)}

    def _windows(self) -> Generator[Window, None, None]:
        """The windows from the first one that is needed to the end of the epoch."""
        stream, epoch = self._stream, self._epoch
        first, mark = (0, (0, None)) if self._begin is None else (self._begin["first"], tuple(self._begin["source"]))
        opened = stream.examples.open(mark[1], epoch) if is_seekable(stream.examples) else None
        source = iter(stream.examples if opened is None else opened)
        for _ in itertools.islice(source, first - mark[0]):
            if self._stopped.is_set():
                return

        def part() -> Iterator[Example]:
            nonlocal mark
            for number, example in enumerate(itertools.islice(source, stream.window), start=1):
                if self._stopped.is_set():
                    return
                yield example
                # Halfway too: a source may have to be proved before it gives the first one.
                if opened is not None and number in (stream.window // 2, stream.window):
                    found = opened.bookmark()
                    mark = mark if found is None else (first + number, found)

        while True:
            begun, kept = mark, stream.kept.get((epoch, first))
            if kept is not None:
                count = sum(1 for _ in part())
                if not self._stopped.is_set():
                    yield kept
            else:
                count, rows = stream.rows_of(part(), epoch, first)
                if rows is not None and not self._stopped.is_set():
                    yield Window(first, rows, self._order(len(rows), first), begun)
            if count < stream.window:
                return
            first += stream.window

    def _order(self, count: int, first: int) -> list[int]:
        seed = self._stream.seed
        if seed is None:
            return list(range(count))
        order: list[int] = random_state(seed, self._epoch, first // self._stream.window + 1).permutation(count).tolist()
        return order


EncodedStream = RowStream | TextStream
"""Examples without a length that a plugin with an `encode_fn` reads."""


def looked_at(rows: Any) -> Rows | None:
    """Rows of known length, or of a stream those of its first examples; None where nothing is known of lengths."""
    if isinstance(rows, EncodedStream):
        return rows.first
    return rows if isinstance(rows, Rows) else None


def _one_ahead(items: Generator[T, None, None], stopped: threading.Event) -> Generator[T, None, None]:
    """Items, each made by a thread while the one before it is in use; closed, it says so and waits for the thread."""
    with contextlib.closing(items), ThreadPoolExecutor(1, thread_name_prefix="redco-encode") as pool:
        try:
            ahead = pool.submit(next, items, None)
            while (item := ahead.result()) is not None:
                ahead = pool.submit(next, items, None)
                yield item
        finally:
            stopped.set()
