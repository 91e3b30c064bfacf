"""Streams that can be opened where they were left: with `state_dict` and `load_state_dict`, as those of `datasets`.

Not every such pair leads back to the same examples: a source may count behind its `yield`, or leave out what its own
shuffle buffer holds. So before a state is trusted, a copy is opened there once, and must give the next examples alike.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redco_cli.data.examples import Example
from redco_cli.data.stream import Journal

_PROVED = 8
"""Examples by which a state is proved."""
_UNCOPIED = (TypeError, ValueError, RuntimeError, AttributeError, OSError, copy.Error, pickle.PickleError)
"""What it raises to copy an object that holds a generator, a lock or a connection."""
Guard = Callable[[], AbstractContextManager[None]]
"""Tells, within it, what the source raises."""


def is_resumable(source: Any) -> bool:
    """Whether a source has a state that a copy of it can take over."""
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return False
    try:
        copy.deepcopy(source)
    except _UNCOPIED:
        return False
    return True


@dataclass
class ResumableStream(Iterable[Example]):
    """A source as a plain iterable of dicts, which starts afresh each time, or where a bookmark says.

    Attributes:
        source: it is copied, never read itself: its state is that of one reader.
        guard: tells what it raises.
        tell: takes a line for the user when its state cannot be trusted.
        place: from the number of an example, from 0, to where it is from.
        expected: tells about how many examples it has; None where nobody knows.
        journal: bookmarks of the training data.
        trusted: whether its state leads back to the same examples; None as long as this is not proved.
    """

    source: Any
    guard: Guard
    tell: Callable[[str], None]
    place: Callable[[int], str] = "examples[{}]".format
    expected: Callable[[], int | None] = lambda: None
    journal: Journal = field(default_factory=Journal, compare=False)
    trusted: bool | None = None

    def __iter__(self) -> Iterator[Example]:
        return iter(self.open(None))

    def open(self, bookmark: Any, epoch: int = 0) -> OpenStream:
        """Begins to read, at a bookmark or at the start; whoever reads already is not disturbed."""
        with self.guard():
            source = copy.deepcopy(self.source)
            if bookmark is not None:
                source.load_state_dict(bookmark)
        return OpenStream(self, source)

    def settle_trust(self, trusted: bool) -> None:
        """Settles whether its state is trusted."""
        self.trusted = trusted
        if not trusted:
            self.tell(
                "state_dict() does not restore the same examples, so a resumed run reads the stream from its start"
            )


class OpenStream:
    """A stream that is being read."""

    def __init__(self, stream: ResumableStream, source: Any) -> None:
        """Reads nothing yet.

        Args:
            stream: what it is of.
            source: a copy of its source, for this reader alone.
        """
        self._stream, self._source = stream, source
        self._ahead: list[Example] = []

    def __iter__(self) -> Iterator[Example]:
        with self._stream.guard():
            for example in self._source:
                if self._ahead:
                    alike = same(example, self._ahead.pop(0))
                    if not alike or not self._ahead:
                        self._ahead.clear()
                        self._stream.settle_trust(alike)
                yield example

    def bookmark(self) -> Any:
        """What opens the stream behind the example that came last; None where that is no plain data, or not proved."""
        if self._stream.trusted is False or self._ahead:
            return None
        with self._stream.guard():
            state = self._source.state_dict()
        try:
            plain = json.loads(json.dumps(state))
        except (TypeError, ValueError):
            return None
        if not same(plain, state):  # such as keys that are numbers
            return None
        if self._stream.trusted is None:
            self._ahead = list(itertools.islice(self._stream.open(plain), _PROVED))
            return None
        return plain


def same(one: Any, other: Any) -> bool:
    """Whether two examples, or states, are equal throughout."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=getattr(one, "dtype", np.dtype(object)).kind == "f")
    return bool(one == other) or bool(one != one and other != other)
