"""Streams that can be opened where they were left: with `state_dict` and `load_state_dict`, as those of `datasets`."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from redco_cli.data.examples import Example
from redco_cli.data.stream import Journal

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


@dataclass(frozen=True)
class ResumableStream(Iterable[Example]):
    """A source as a plain iterable of dicts, which starts afresh each time, or where a bookmark says.

    Attributes:
        source: it is copied, never read itself: its state is that of one reader.
        guard: tells what it raises.
        journal: bookmarks of the training data.
    """

    source: Any
    guard: Guard
    journal: Journal = field(default_factory=Journal, compare=False)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.open(None))

    def open(self, bookmark: Any) -> OpenStream:
        """Begins to read, at a bookmark or at the start; whoever reads already is not disturbed."""
        with self.guard():
            source = copy.deepcopy(self.source)
            if bookmark is not None:
                source.load_state_dict(bookmark)
        return OpenStream(source, self.guard)


@dataclass(frozen=True)
class OpenStream:
    """A stream that is being read."""

    source: Any
    guard: Guard

    def __iter__(self) -> Iterator[Example]:
        with self.guard():
            yield from self.source

    def bookmark(self) -> Any:
        """What opens the stream behind the example that came last; None where that is no plain data."""
        with self.guard():
            state = self.source.state_dict()
        try:
            return json.loads(json.dumps(state))
        except TypeError:
            return None
