"""Examples without a length: shuffled within a buffer, and read on from any place without what came before it.

An epoch numbers the examples of the source 0, 1, 2, ... Draw d takes place p(seed, epoch, d) of a buffer of B examples:
the one that is there comes out, and number B + d takes its place. When the source has ended, what is left in the buffer
comes out in a random order. So the seed alone decides which numbers are in the buffer at any time, and to continue,
only these must be read again: the oldest is about B·ln B back, however much was read before. A source that can be
opened at a bookmark is opened at the last one before that number; any other is read from its start.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import numpy as np

from redco_cli.data.examples import Example
from redco_cli.errors import DataError

_DRAWS = 2**14  # of one table of places
_BOOKMARKS = 128
_MARKS = 64  # steps, of which few are ahead of the one that trains
_LEAST_SPACING = 64
_BACK = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
"""How many buffers back a save keeps a bookmark; the oldest of 10 000 examples is 9 to 14 back."""
Bookmark = tuple[int, int, Any]
"""An epoch, the number of an example of the source, and what opens the source there."""


@dataclass(frozen=True)
class StreamPosition:
    """A position in the stream.

    Attributes:
        epoch: from 0.
        given: examples of this epoch that came out.
        length: examples of the source in this epoch; None as long as its end was not met.
    """

    epoch: int = 0
    given: int = 0
    length: int | None = None


@dataclass
class Journal:
    """Where a stream was before each step, and bookmarks to get there. Read and written by different threads.

    Attributes:
        seed: of the order that it is about; None before one was begun.
        size: of the buffer.
    """

    seed: int | None = None
    size: int = 0
    _marks: dict[int, StreamPosition] = field(default_factory=dict)
    _bookmarks: deque[Bookmark] = field(default_factory=lambda: deque(maxlen=_BOOKMARKS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, seed: int, size: int) -> None:
        """Forgets what is about another order."""
        with self._lock:
            if (self.seed, self.size) != (seed, size):
                self.seed, self.size = seed, size
                self._marks.clear()
                self._bookmarks.clear()

    def mark(self, step: int, position: StreamPosition) -> None:
        """Notes the position before a step."""
        with self._lock:
            self._marks[step] = position
            self._marks.pop(step - _MARKS, None)

    def position(self, step: int) -> StreamPosition | None:
        """The position before a step; None when it is not known."""
        with self._lock:
            return self._marks.get(step)

    def add(self, bookmark: Bookmark) -> None:
        """Notes a bookmark."""
        with self._lock:
            self._bookmarks.append(bookmark)

    def before(self, epoch: int, number: int) -> Bookmark:
        """The last bookmark at or before an example of an epoch; else its start."""
        with self._lock:
            known = [one for one in self._bookmarks if one[0] == epoch and one[1] <= number]
        return max(known, key=lambda one: one[1], default=(epoch, 0, None))

    def saved(self, step: int) -> dict[str, Any] | None:
        """The position before a step and the bookmarks to get there, as plain data; None when it is not known.

        Which one is needed is worked out when they are: a save must not wait for that.
        """
        position = self.position(step)
        if position is None:
            return None
        read = position.given + self.size if position.length is None else position.length
        near = [self.before(position.epoch, read - back * max(self.size, 1)) for back in _BACK]
        bookmarks = {number: bookmark for _, number, bookmark in near if bookmark is not None}
        saved = {"seed": self.seed, "size": self.size, "bookmarks": [[*one] for one in bookmarks.items()]}
        return {**saved, "epoch": position.epoch, "given": position.given, "length": position.length}

    def load(self, step: int, saved: Mapping[str, Any]) -> None:
        """Takes over what `saved` returned before."""
        self.begin(saved["seed"], saved["size"])
        self.mark(step, StreamPosition(saved["epoch"], saved["given"], saved["length"]))
        for number, bookmark in saved["bookmarks"][::-1]:
            self.add((saved["epoch"], number, bookmark))


class Opened(Protocol):
    """A source that is being read."""

    def __iter__(self) -> Iterator[Example]: ...

    def bookmark(self) -> Any:
        """What opens the source behind the example that came last, as plain data; None when that cannot be."""
        ...


class Seekable(Protocol):
    """A source that can be opened at a bookmark."""

    journal: Journal

    def __iter__(self) -> Iterator[Example]: ...

    def open(self, bookmark: Any, epoch: int = 0) -> Opened:
        """Begins to read an epoch: at a bookmark, or for None at the start."""
        ...


def is_seekable(examples: Any) -> TypeGuard[Seekable]:
    """Whether examples can be opened at a bookmark."""
    return isinstance(getattr(examples, "journal", None), Journal)


@dataclass(frozen=True)
class ShuffleOrder:
    """Which example comes out when.

    Attributes:
        seed: of all epochs.
        size: of the buffer, B; 0 does not shuffle.
    """

    seed: int
    size: int

    def places(self, epoch: int, start: int) -> Iterator[int]:
        """The place of each draw of an epoch, from one on, for ever."""
        for table in itertools.count(start // _DRAWS):
            yield from self._table(epoch, table)[max(start - table * _DRAWS, 0) :].tolist()

    def rest(self, epoch: int, count: int) -> list[int]:
        """The order in which the `count` examples come out that are left when the source has ended."""
        places: list[int] = random_state(self.seed, epoch).permutation(count).tolist()
        return places

    def draws(self, position: StreamPosition) -> int:
        """How many draws were made, apart from what was left."""
        return position.given if position.length is None else min(position.given, max(position.length - self.size, 0))

    def held(self, epoch: int, draws: int) -> list[int]:
        """The number of the example in each place of the buffer after so many draws of an epoch."""
        held, empty = np.full(self.size, -1), self.size
        for table in range((draws - 1) // _DRAWS, -1, -1):
            first = table * _DRAWS
            places = self._table(epoch, table)[: draws - first]
            unset = held[places] < 0
            np.maximum.at(held, places[unset], (self.size + first + np.arange(len(places)))[unset])
            empty -= len(np.unique(places[unset]))
            if not empty:
                break
        numbers: list[int] = np.where(held < 0, np.arange(self.size), held).tolist()
        return numbers

    def number(self, position: StreamPosition) -> int:
        """The number in the source of the example that came out last before a position."""
        draw = position.given - 1
        if not self.size:
            return draw
        if position.length is None or draw < position.length - self.size:
            return self.held(position.epoch, draw)[next(self.places(position.epoch, draw))]
        draws, left = max(position.length - self.size, 0), min(self.size, position.length)
        return self.held(position.epoch, draws)[self.rest(position.epoch, left)[draw - draws]]

    def _table(self, epoch: int, table: int) -> np.ndarray:
        return _table(self.seed, epoch, table, self.size)


@functools.lru_cache(maxsize=4)
def _table(seed: int, epoch: int, table: int, size: int) -> np.ndarray:
    return random_state(seed, epoch, table + 1).randint(size, size=_DRAWS)  # [seed, epoch, 0] is [seed, epoch] to numpy


def random_state(*entropy: int) -> np.random.RandomState:
    """Random numbers that are the same under any version of numpy, which its newer generators do not promise."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(entropy)))


class ShuffledStream:
    """A stream that is being read: one epoch after the other, for ever.

    Attributes:
        position: where it is.
    """

    def __init__(
        self, examples: Iterable[Example], order: ShuffleOrder, spacing: int, start: StreamPosition | None
    ) -> None:
        """Reads nothing yet.

        Args:
            examples: an iterable that starts afresh each time; one with a journal has its bookmarks there.
            order: in which they come out.
            spacing: at least so many examples lie between two bookmarks.
            start: where to begin; None at the start.
        """
        self.position = start or StreamPosition()
        self._examples, self._order = examples, order
        self._spacing = max(spacing, order.size // 4, _LEAST_SPACING)

    def __iter__(self) -> Iterator[Example]:
        while True:
            epoch = self.position.epoch
            for example in self._shuffled() if self._order.size else self._plain():
                self.position = replace(self.position, given=self.position.given + 1)
                yield example
            if not self.position.given:
                problem = f"the stream holds no examples in epoch {epoch}"
                raise DataError("data.train", problem, "return an object whose __iter__ starts afresh each time")
            self.position = StreamPosition(epoch + 1)

    def number(self, position: StreamPosition) -> int:
        """The number in the source of the example that led to a position; worked out, for errors."""
        return self._order.number(position)

    def _plain(self) -> Iterator[Example]:
        """The rest of an epoch in the order of the source."""
        number, source = self._open(self.position.given)
        return itertools.islice(source, self.position.given - number, None)

    def _shuffled(self) -> Iterator[Example]:
        """The rest of an epoch."""
        start, order = self.position, self._order
        source, buffer = self._refilled() if start.given else self._filled()
        if start.length is None:
            for place, example in zip(order.places(start.epoch, start.given), source, strict=False):
                yield buffer[place]
                buffer[place] = example
            self.position = replace(self.position, length=len(buffer) + self.position.given)
        out = self.position.given - order.draws(self.position)
        for place in order.rest(start.epoch, len(buffer))[out:]:
            yield buffer[place]

    def _filled(self) -> tuple[Iterator[Example], list[Example]]:
        """The source behind the first examples of an epoch, and these."""
        _, source = self._open(0)
        return source, list(itertools.islice(source, self._order.size))

    def _refilled(self) -> tuple[Iterator[Example], list[Example]]:
        """The source where it is read on, and the buffer as it was.

        Raises:
            DataError: the source has become shorter.
        """
        draws = self._order.draws(self.position)
        read = self._order.size + draws if self.position.length is None else self.position.length
        numbers = self._order.held(self.position.epoch, draws)[:read]
        first, source = self._open(min(numbers))
        wanted = set(numbers)
        kept = {
            number: example for number, example in zip(range(first, read), source, strict=False) if number in wanted
        }
        if len(kept) < len(wanted):
            problem = f"has fewer examples than when the run was saved: example {max(wanted)} is missing"
            raise DataError("data.train", problem, "restore the data, or choose another output_dir for a new run")
        return source, [kept[number] for number in numbers]

    def _open(self, number: int) -> tuple[int, Iterator[Example]]:
        """The source from an example at or before `number` on, and the number of that example."""
        if not is_seekable(self._examples):
            return 0, iter(self._examples)
        epoch, first, bookmark = self._examples.journal.before(self.position.epoch, number)
        return first, self._noting(self._examples, self._examples.open(bookmark, epoch), epoch, first)

    def _noting(self, examples: Seekable, opened: Opened, epoch: int, number: int) -> Iterator[Example]:
        """The examples of a source, with bookmarks noted among them."""
        for example in opened:
            yield example
            number += 1
            if number % self._spacing == 0 and (bookmark := opened.bookmark()) is not None:
                examples.journal.add((epoch, number, bookmark))
