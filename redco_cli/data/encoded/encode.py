"""Examples encoded, in order: of a split every one once, and from then on it is read from disk; of a stream some."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from redco_cli.data.encoded.outcome import Encode, Outcome, outcome_of
from redco_cli.data.encoded.parallel import Others, outcomes
from redco_cli.data.encoded.store import Collector, Encoded, forget_oldest, read_encoded
from redco_cli.data.examples import Example, evenly_spread
from redco_cli.data.loader import fetch
from redco_cli.data.places import place_of, placed
from redco_cli.errors import DataError, ExampleError, PluginError, StorageError

LEFT_OUT, EMPTY = "left out by encode_fn", "without a token"
_KEPT = 20
"""Splits that stay encoded on disk, those that were used last."""
_SAMPLE, _AT_ONCE = 64, 256
"""Texts that are encoded again before what is kept is believed; examples that are read at once."""


def encoded_once(
    encode: Encode,
    examples: Sequence[Example],
    *,
    measure: str,
    where: str,
    kept_at: Path | None,
    done: Callable[[int, int], None],
    others: Others | None = None,
) -> Encoded:
    """All examples encoded: read where they were before, else encoded now and kept.

    Args:
        encode: the plugin's `encode_fn`, checked.
        examples: of known length.
        measure: the field whose length is that of a text.
        where: the place of `encode_fn`.
        kept_at: the directory in which exactly these examples, encoded by exactly this function, are kept; None for
            examples of which that cannot be said.
        done: told how many are encoded, of how many.
        others: processes that may encode as well; the result is the same without.

    Raises:
        DataError, PluginError: an example cannot be encoded, or all are left out.
        StorageError: the disk is full.
    """

    def place(number: int) -> str:
        return place_of(examples, number)

    found = None if kept_at is None else read_encoded(kept_at, measure)
    if found is None or not _is_current(encode, examples, found):
        try:
            found = _encoded(encode, examples, measure, kept_at, place, where, done, others)
        except OSError as error:
            problem = f"encoded data cannot be written: {error.strerror or error}"
            remedy = "free space, or set REDCO_CACHE to a directory on another disk"
            raise StorageError(str(kept_at), problem, remedy) from error
        if kept_at is not None:
            forget_oldest(kept_at.parent, _KEPT)
    return dataclasses.replace(found, place=place)


def _is_current(encode: Encode, examples: Sequence[Example], found: Encoded) -> bool:
    """Whether a sample, encoded again, is what is kept: a function may read more than a digest of it can know."""
    if len(found) != len(examples):
        return False
    for number in evenly_spread(len(found), _SAMPLE):
        try:
            text = encode(examples[number])
        except (ExampleError, PluginError):
            return False  # encoding all says which example, and where it is from
        kept = found[number]
        if text is None:
            text = {name: np.zeros(0) for name in kept}
        if text.keys() != kept.keys() or any(not np.array_equal(text[name], kept[name]) for name in kept):
            return False
    return True


def _encoded(
    encode: Encode,
    examples: Sequence[Example],
    measure: str,
    kept_at: Path | None,
    place: Callable[[int], str],
    where: str,
    done: Callable[[int, int], None],
    others: Others | None,
) -> Encoded:
    total = len(examples)
    if others is None:
        found = (outcome_of(encode, example) for example in _read(examples))
    else:
        found = outcomes(encode, _read(examples), total, others)
    with contextlib.closing(found), Collector(measure, kept_at) as collector:
        _, notes = _collected(found, collector, measure, place, where, lambda count: done(count, total))
        try:
            return collector.finish(notes)
        except ValueError as error:
            problem = f"{error}: there is nothing to learn"
            raise DataError(where, problem, "correct the data, or let encode_fn return tokens") from None


def encoded_part(
    encode: Encode, examples: Iterable[Example], *, measure: str, where: str, place: Callable[[int], str]
) -> tuple[int, Counter[str], Encoded | None]:
    """Some examples encoded, in memory.

    Args:
        encode: the plugin's `encode_fn`, checked.
        examples: read once.
        measure: the field whose length is that of a text.
        where: the place of `encode_fn`.
        place: from the number of one of these examples to where it is from.

    Returns:
        How many examples there were, what was noted of them, and the texts; None where all are left out.

    Raises:
        DataError, PluginError: an example cannot be encoded.
    """
    with Collector(measure, None) as collector:
        found = (outcome_of(encode, example) for example in examples)
        count, notes = _collected(found, collector, measure, place, where, lambda _count: None)
        if count == notes[LEFT_OUT]:
            return count, notes, None
        return count, notes, dataclasses.replace(collector.finish(notes), place=place)


def _collected(
    outcomes: Iterable[Outcome],
    collector: Collector,
    measure: str,
    place: Callable[[int], str],
    where: str,
    done: Callable[[int], None],
) -> tuple[int, Counter[str]]:
    """Adds texts to a collector until an example could not be encoded; how many, and what was noted of them."""
    number, notes = 0, Counter[str]()
    for number, (text, noted) in enumerate(outcomes, start=1):
        if isinstance(text, ExampleError | PluginError):
            text.row = 0
            raise placed(text, [place(number - 1)].__getitem__) from text.__cause__
        try:
            collector.add(text)
        except ValueError as error:
            raise PluginError(where, f"{error}, from {place(number - 1)}", "return the same fields always") from None
        notes.update(noted)
        if text is None or not len(text[measure]):
            notes[LEFT_OUT if text is None else EMPTY] += 1
        done(number)
    return number, notes


def _read(examples: Sequence[Example]) -> Iterator[Example]:
    for first in range(0, len(examples), _AT_ONCE):
        yield from fetch(examples, range(first, min(first + _AT_ONCE, len(examples))))


def described(lengths: NDArray[np.int64]) -> dict[str, int]:
    """The distribution of lengths, in tokens: least, quarters, and the most."""
    at = {"least": 0, "quarter": 25, "median": 50, "three quarters": 75, "95 %": 95, "most": 100}
    return {name: int(np.percentile(lengths, share)) for name, share in at.items()} if len(lengths) else {}
