"""Several streams as one that can be opened where it was left.

An epoch has each example as often as the weight of its source says, as data of known length has it: with 2 a source is
read twice, with 2.5 a third time for one half of its examples, the same half in each epoch. When a source ends, the
others go on, and the epoch ends with the last of them. Example g of a source comes before example h of another where
(g + 1/2) / r < (h + 1/2) / s; r and s are the shares of the epoch that the sources are expected to be. So how many of
each were given says which one is next, and nothing is drawn: the shuffle buffer, or the window that is packed, mixes
them further.

`datasets.interleave_datasets` is not used: it fills up the columns that a source lacks, and knows neither examples that
come several times in an epoch nor fractions of a source.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from redco_cli.data.examples import Example
from redco_cli.data.mixed.choice import WEIGHED, is_one, one_of, one_of_each
from redco_cli.data.places import place_of
from redco_cli.data.stream import Journal, Opened, Seekable
from redco_cli.errors import DataError

_END: Any = object()


@dataclass(frozen=True)
class Source:
    """One of the streams.

    Attributes:
        examples: it can be opened at a bookmark.
        weight: how often each of its examples comes in an epoch.
        expected: about how many examples it has; None where nobody knows.
        where: the place of the dataset in the recipe.
    """

    examples: Seekable
    weight: float
    expected: int | None
    where: str

    @functools.cached_property
    def times(self) -> int:
        """How often all of it is read in an epoch."""
        return int(self.weight)

    @functools.cached_property
    def rest(self) -> Fraction:
        """The share of it that is given once more."""
        return Fraction(str(self.weight)) - self.times

    @property
    def passes(self) -> int:
        """How often it is read in an epoch."""
        return self.times + (self.rest > 0)

    def gives(self, turn: int, number: int) -> bool:
        """Whether an example of the source is given in a pass over it."""
        return turn < self.times or is_one(self.rest, number, WEIGHED)

    def total(self, length: int) -> int:
        """How many examples it gives in an epoch, being so long."""
        return self.times * length + (len(one_of_each(self.rest, length, WEIGHED)) if self.rest else 0)

    def number(self, index: int, length: int | None) -> int:
        """The number in the source of an example that it gives, being so long; None before its end was met."""
        whole = self.times * (length or 0)
        if self.times and (length is None or index < whole):
            return index if length is None else index % length
        return one_of(self.rest, index - whole, WEIGHED)


class MixedStream(Iterable[Example]):
    """Several streams as one that starts afresh each time, or where a bookmark says.

    Attributes:
        sources: the streams.
        shares: how much of an epoch each is expected to be; where nobody knows that, as if all were of one length.
        in_turn: whether each begins when the one before it has ended, as data that is not shuffled does.
        journal: where training is in it.
        lengths: examples of each source, of which the end was met.
    """

    def __init__(self, sources: Sequence[Source], *, in_turn: bool) -> None:
        """Reads nothing.

        Args:
            sources: the streams.
            in_turn: see above.
        """
        self.sources, self.in_turn, self.journal = tuple(sources), in_turn, Journal()
        known = all(source.expected is not None for source in sources)
        parts = [source.weight * ((source.expected or 1) if known else 1) for source in sources]
        self.shares = [part / sum(parts) for part in parts]
        self.lengths: list[int | None] = [None] * len(sources)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.open(None))

    def open(self, bookmark: Any, epoch: int = 0) -> OpenMixture:
        """Begins to read an epoch: at a bookmark, or for None at its start."""
        return OpenMixture(self, bookmark, epoch)

    @property
    def is_spread(self) -> bool:
        """Whether the sources are expected to end together, or none begins before another has ended."""
        return self.in_turn or all(source.expected is not None for source in self.sources)

    def next_of(self, given: Sequence[int], ended: Iterable[int]) -> int | None:
        """Which source gives the next example, when so many of each were given; None when all have ended."""
        rest = [number for number in range(len(self.sources)) if number not in set(ended)]
        if self.in_turn or not rest:
            return next(iter(rest), None)
        return min(rest, key=lambda number: (given[number] + 0.5) / self.shares[number])

    def place(self, number: int) -> str:
        """The place of an example of an epoch, worked out from its beginning."""
        totals = [
            None if length is None else source.total(length)
            for source, length in zip(self.sources, self.lengths, strict=True)
        ]
        given, chosen = [0] * len(totals), 0
        for _ in range(number + 1):
            ended = [one for one, total in enumerate(totals) if total is not None and given[one] >= total]
            chosen = self.next_of(given, ended) or 0
            given[chosen] += 1
        source = self.sources[chosen]
        return place_of(source.examples, source.number(given[chosen] - 1, self.lengths[chosen]))

    @property
    def choice(self) -> str:
        """A digest of which examples of each source these are, in which order."""
        order = [[str(source.weight) for source in self.sources], None if self.in_turn else self.shares]
        return hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16]


class OpenMixture:
    """Several streams that are being read."""

    def __init__(self, mixed: MixedStream, bookmark: Any, epoch: int) -> None:
        """Reads nothing yet.

        Args:
            mixed: what they are of.
            bookmark: as `bookmark` returned it; None is the start.
            epoch: from 0.
        """
        count = len(mixed.sources)
        self._mixed, self._given = mixed, [0] * count if bookmark is None else [*bookmark["given"]]
        places = [_Place()] * count if bookmark is None else [_Place(*place) for place in bookmark["places"]]
        pairs = zip(mixed.sources, places, strict=True)
        self._readers = [_Reader(source, place, epoch) for source, place in pairs]
        if bookmark is not None:
            mixed.lengths = [
                known if known is not None else saved
                for known, saved in zip(mixed.lengths, bookmark["lengths"], strict=True)
            ]

    def __iter__(self) -> Iterator[Example]:
        mixed, ended = self._mixed, set[int]()
        reading = [iter(reader) for reader in self._readers]
        while (chosen := mixed.next_of(self._given, ended)) is not None:
            example = next(reading[chosen], _END)
            length = self._readers[chosen].length
            mixed.lengths[chosen] = mixed.lengths[chosen] if length is None else length
            if example is not _END:
                self._given[chosen] += 1
                yield example
                continue
            ended.add(chosen)
            if not self._given[chosen]:
                source = mixed.sources[chosen]
                problem = f"{source.weight} of {length} examples is none"
                raise DataError(f"{source.where}.weight", problem, "give a larger weight, or leave the dataset out")

    def bookmark(self) -> Any:
        """What opens the stream behind the example that came last, as plain data."""
        places = [[*reader.place()] for reader in self._readers]
        return {"given": [*self._given], "places": places, "lengths": [*self._mixed.lengths]}


@dataclass(frozen=True)
class _Place:
    """How far a source is read.

    Attributes:
        turn: how often it was read to its end, in this epoch.
        read: examples of this pass over it.
        number: examples before `mark`.
        mark: a bookmark in it; None is the start.
    """

    turn: int = 0
    read: int = 0
    number: int = 0
    mark: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.turn, self.read, self.number, self.mark))


class _Reader:
    """Reads one source as often as its weight says.

    Attributes:
        length: its examples; None before its end was met.
    """

    def __init__(self, source: Source, place: _Place, epoch: int) -> None:
        self._source, self._place, self._epoch = source, place, epoch
        self._opened: Opened | None = None
        self.length: int | None = None

    def __iter__(self) -> Iterator[Example]:
        while self._place.turn < self._source.passes:
            place = self._place
            opened = self._source.examples.open(place.mark, self._epoch)
            examples, read = iter(opened), place.number
            while read < place.read:
                if next(examples, _END) is _END:
                    problem = f"has fewer examples than when the run was saved: example {read} is missing"
                    remedy = "restore the data, or choose another output_dir for a new run"
                    raise DataError(self._source.where, problem, remedy)
                read += 1
            self._opened = opened
            for example in examples:
                number, read = read, read + 1
                self._place = replace(self._place, read=read)
                if self._source.gives(place.turn, number):
                    yield example
            self._opened, self.length, self._place = None, read, _Place(place.turn + 1)

    def place(self) -> _Place:
        """How far the source is read, with the bookmark that is nearest."""
        mark = None if self._opened is None else self._opened.bookmark()
        if mark is not None:
            self._place = replace(self._place, number=self._place.read, mark=mark)
        return self._place
