"""Examples without a length of which each text is a row: encoded with its batch, looked at before the first.

What rows are padded to is chosen by the first examples alone, which are read again when a run continues: so the lengths
stay the same, and with them every number of a step.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from redco_cli.data.digests import FIRST
from redco_cli.data.encoded.encode import encoded_part
from redco_cli.data.encoded.outcome import Encode
from redco_cli.data.encoded.rows import IDS, Rows
from redco_cli.data.encoded.store import Encoded
from redco_cli.data.examples import Example
from redco_cli.data.places import place_of
from redco_cli.data.stream import Journal
from redco_cli.errors import DataError
from redco_cli.row_notes import RowCounts

LOOKED_AT = 1000
"""Examples of a stream by which it is looked at before anything is trained."""
Pack = Callable[[Encoded], Rows]
"""Some texts to rows."""


@dataclass(frozen=True)
class TextStream(Iterable[Example]):
    """Examples without a length, to be encoded with their batch.

    Attributes:
        examples: an iterable that starts afresh each time, and perhaps at a bookmark.
        encode: one example to a text, for the first ones.
        pack: the same of these texts to rows.
        where: the place of `encode_fn`.
        name: the place of the data.
    """

    examples: Any
    encode: Encode
    pack: Pack
    where: str
    name: str

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    @property
    def journal(self) -> Journal | None:
        """Where training is in the examples; None where they can only be read from their start."""
        journal = getattr(self.examples, "journal", None)
        return journal if isinstance(journal, Journal) else None

    def open(self, bookmark: Any, epoch: int = 0) -> Any:
        """Begins to read the examples of an epoch, of a source that has a journal."""
        return self.examples.open(bookmark, epoch)

    def place(self, number: int) -> str:
        """The place of an example, for errors."""
        return place_of(self.examples, number)

    @functools.cached_property
    def first(self) -> Rows:
        """Rows of the first examples, to look at; see `first_rows`."""
        return first_rows(self.examples, self.encode, self.pack, where=self.where, name=self.name)

    @property
    def digest(self) -> str:
        """Of the tokens of the examples by which streams are told apart; see `first_digest`."""
        return first_digest(self.first)


def first_rows(examples: Iterable[Example], encode: Encode, pack: Pack, *, where: str, name: str) -> Rows:
    """Rows of the first examples of a stream, at most 1000 of them, to look at.

    Args:
        examples: of the stream.
        encode: one example to a text.
        pack: texts to rows.
        where: the place of `encode_fn`.
        name: the place of the data.

    Raises:
        DataError, PluginError: one cannot be encoded, or nothing is left of them.
    """
    part = itertools.islice(examples, LOOKED_AT)
    place = functools.partial(place_of, examples)
    count, notes, encoded = encoded_part(encode, part, measure=IDS, where=where, place=place)
    rows = None if encoded is None else pack(encoded)
    if rows is None or not len(rows):
        noted = RowCounts(count, notes if rows is None else rows.notes()).line()
        problem = f"nothing is left of its first {count} examples: {noted}"
        raise DataError(name, problem, "correct the data, or raise data.max_length")
    return rows


def first_digest(first: Rows) -> str:
    """A digest of what `first_rows` returned, by which streams are told apart: other tokens have another."""
    texts = first.encoded
    return hashlib.sha256(texts.content(range(min(len(texts), FIRST)))).hexdigest()[:16]
