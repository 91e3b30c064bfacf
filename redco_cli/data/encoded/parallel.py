"""Examples encoded by several processes, with the result of one: everything comes in the order of the examples.

This process encodes alone at first. When that would go on for long, others are begun while it goes on; each of them
encodes what this one has just encoded, and where all do so alike, they encode the rest. What they cannot do (be begun,
be sent the function or an example, survive) is done here, and told. An example that fails there is encoded again
here, and fails with the same words as if there had never been others.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from redco_cli.data.encoded.child import Child
from redco_cli.data.encoded.outcome import Encode, Outcome, is_error, outcome_of, same_outcome
from redco_cli.data.examples import Example
from redco_cli.errors import RedcoError
from redco_cli.recipe.redaction import scrubbed

_WORTH, _EACH = 15.0, 5.0
"""Seconds that encoding must go on here to begin others, and those of work that each of them has at least."""
_LOOK = 1.0
"""Seconds between two estimates of that."""
_PROVED = 64
"""Examples by which another process is proved."""
_CHUNK, _LARGEST_CHUNK = 0.2, 4096
"""Seconds of work that are sent at once, and the most examples."""
_AHEAD = 2
"""Chunks of each process that are under way."""
_UNSENT = (pickle.PickleError, TypeError, AttributeError, ImportError, RecursionError)
"""What it raises to pickle an object that cannot be sent, or to read one that is not known here."""


@dataclass(frozen=True)
class Others:
    """The processes that may encode besides this one.

    Attributes:
        most: how many there may be.
        note: takes a line that says why there are none.
        warn: takes a line that says that they encode otherwise.
        worth: seconds that encoding must go on to begin them.
    """

    most: int
    note: Callable[[str], None]
    warn: Callable[[str], None]
    worth: float = _WORTH


def outcomes(encode: Encode, examples: Iterable[Example], total: int, others: Others) -> Generator[Outcome, None, None]:
    """What becomes of each example, in order; after an error nobody need go on.

    Args:
        encode: the plugin's `encode_fn`, checked; where it can be pickled, others can have it.
        examples: read in this process, once.
        total: their number.
        others: what processes there may be.

    Yields:
        The outcomes. Closing the generator ends the other processes.
    """
    source, recent = iter(examples), deque[tuple[Example, Outcome]](maxlen=_PROVED)
    crew: _Crew | None = None
    began, before, look = time.monotonic(), 0, time.monotonic() + _LOOK
    try:
        for number, example in enumerate(source, start=1):
            recent.append((example, outcome_of(encode, example)))
            yield recent[-1][1]
            if crew is None and time.monotonic() < look:
                continue
            if crew is None:
                rate = (number - before) / (time.monotonic() - began)
                began, before, look = time.monotonic(), number, time.monotonic() + _LOOK
                seconds = (total - number) / rate
                count = min(others.most, int(seconds // _EACH))
                if seconds > others.worth and count > 1:
                    crew = _Crew(encode, count, others)
                    crew.begin(list(recent))
            elif crew.is_ready:
                yield from crew.outcomes(source, rate)
                return
    finally:
        if crew is not None:
            crew.end()


class _Crew:
    """Processes that encode what they are sent."""

    def __init__(self, encode: Encode, count: int, others: Others) -> None:
        self._encode, self._count, self._others = encode, count, others
        self._free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="redco-encode")
        self._coming: list[Future[bool]] = []
        self._is_lost = False

    @property
    def is_coming(self) -> bool:
        """Whether some are not there yet."""
        return not all(one.done() for one in self._coming)

    @property
    def is_ready(self) -> bool:
        """Whether all are there and encode as this process does; told once where they are not."""
        if self._is_lost or self.is_coming:
            return False
        try:
            alike = [one.result() for one in self._coming]
        except (OSError, *_UNSENT) as error:
            self._lose(error)
            return False
        if not all(alike):
            self._is_lost = True
            self._others.warn("encode_fn gives other results in another process: one process encodes all examples")
        return all(alike)

    def begin(self, proof: Sequence[tuple[Example, Outcome]]) -> None:
        """Begins them; returns at once."""
        try:
            function = pickle.dumps(self._encode, pickle.HIGHEST_PROTOCOL)
        except _UNSENT as error:
            self._lose(error)
            return
        self._coming = [self._pool.submit(self._begun, function, proof) for _ in range(self._count)]

    def outcomes(self, source: Iterator[Example], rate: float) -> Iterator[Outcome]:
        """What becomes of the rest of the examples."""
        chunks = _chunks(source, max(1, min(_LARGEST_CHUNK, int(rate * _CHUNK))))
        pending: deque[tuple[list[Example], Future[list[Outcome]]]] = deque()
        unread: RedcoError | None = None
        while True:
            chunk = None
            if unread is None and len(pending) <= _AHEAD * self._count:
                try:
                    chunk = next(chunks, None)
                except RedcoError as error:  # those before it come first
                    unread = error
            if chunk is not None:
                pending.append((chunk, self._pool.submit(self._encoded, chunk)))
            elif pending:
                yield from self._answered(*pending.popleft())
            elif unread is not None:
                raise unread
            else:
                return

    def end(self) -> None:
        """Ends them all."""
        self._is_lost = True
        for child in self._children:
            child.kill()
        self._pool.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def _begun(self, function: bytes, proof: Sequence[tuple[Example, Outcome]]) -> bool:
        if self._is_lost:
            return False
        child = Child()
        self._children.append(child)
        if self._is_lost:  # since then
            child.kill()
        child.give(function)
        examples, expected = zip(*proof, strict=True)
        found = child.encoded(examples)
        self._free.put(child)
        return len(found) == len(expected) and all(map(same_outcome, found, expected))

    def _encoded(self, chunk: list[Example]) -> list[Outcome]:
        child = self._free.get()
        try:
            if self._is_lost:
                raise ChildProcessError("another one ended")
            return child.encoded(chunk)
        finally:
            self._free.put(child)

    def _answered(self, chunk: list[Example], future: Future[list[Outcome]]) -> Iterator[Outcome]:
        found: list[Outcome] = []
        try:
            found = future.result()
        except (OSError, *_UNSENT) as error:
            self._lose(error)
        for example, outcome in itertools.zip_longest(chunk, found):
            yield outcome_of(self._encode, example) if outcome is None or is_error(outcome) else outcome

    def _lose(self, error: BaseException) -> None:
        if not self._is_lost:
            self._is_lost = True
            reason = scrubbed(
                f"{error}" if isinstance(error, ChildProcessError) else f"{type(error).__name__}: {error}"
            )
            self._others.note(f"one process encodes all examples, since others cannot: {reason:.300}")


def _chunks(source: Iterator[Example], size: int) -> Iterator[list[Example]]:
    """The examples, so many at once; those before one that cannot be read come before the error."""
    chunk: list[Example] = []
    try:
        for example in source:
            chunk.append(example)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except RedcoError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
