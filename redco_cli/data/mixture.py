"""Examples of one or several sources, some of them held out, some several times; all of known length.

Which examples these are follows from their numbers in their source alone: the seed of a run decides about their order,
never about what is trained on and what is evaluated. So runs compare, and what was evaluated stays so when the source
grows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from redco_cli.data.digests import FileDigests, example_digests, source_digests
from redco_cli.data.examples import Example, Indexed
from redco_cli.data.loader import fetch
from redco_cli.data.mixed.choice import HELD_OUT, WEIGHED, Numbers, drawn, one_of_each
from redco_cli.data.mixed.streams import MixedStream
from redco_cli.data.places import place_of
from redco_cli.recipe.data import SourceSection


@dataclass(frozen=True)
class Part:
    """Some of the examples of one source.

    Attributes:
        examples: all of the source.
        numbers: those that are meant, in this order, perhaps several times.
    """

    examples: Sequence[Example]
    numbers: Numbers

    @classmethod
    def whole(cls, examples: Sequence[Example]) -> Part:
        """All examples of a source, each once."""
        return cls(examples, np.arange(len(examples), dtype=np.int64))

    def split(self, held_out: Fraction | int) -> tuple[Part, Part]:
        """What is left, and what is held out: either may be empty where there are few."""
        numbers = self.numbers
        if isinstance(held_out, Fraction):
            chosen = one_of_each(held_out, int(numbers.max(initial=-1)) + 1, HELD_OUT)
            chosen = chosen if len(chosen) else drawn(numbers, min(1, len(numbers)), HELD_OUT)
        else:
            chosen = drawn(numbers, min(held_out, len(numbers)), HELD_OUT)
        is_held = np.isin(numbers, chosen)
        return Part(self.examples, numbers[~is_held]), Part(self.examples, numbers[is_held])

    def weighed(self, weight: float) -> Part:
        """Each example as often as the weight says; of its fraction the same examples always."""
        times, rest = divmod(Fraction(str(weight)), 1)
        some = drawn(self.numbers, round(rest * len(self.numbers)), WEIGHED)
        return Part(self.examples, np.concatenate([*(self.numbers,) * times, some]))


class Mixture(Indexed):
    """The examples of several parts, one after the other, each as its source gives it. Safe to read from threads.

    Attributes:
        parts: of the sources.
        held_out: the examples of the same sources that are kept for evaluation; None where nothing is.
    """

    def __init__(self, parts: Sequence[Part], held_out: Mixture | None = None) -> None:
        """Reads no example.

        Args:
            parts: of the sources.
            held_out: of the same sources.
        """
        self.parts, self.held_out = tuple(parts), held_out
        self._ends = np.cumsum([len(part.numbers) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def one(self, index: int) -> Example:
        """As its source gives it."""
        part, number = self._at(index)
        return self.parts[part].examples[number]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Several at once, those of one source together."""
        found: dict[int, Example] = {}
        places = [self._at(index) for index in indices]
        for part in {part for part, _ in places}:
            rows = [row for row, place in enumerate(places) if place[0] == part]
            examples = fetch(self.parts[part].examples, [places[row][1] for row in rows])
            found.update(zip(rows, examples, strict=True))
        return [found[row] for row in range(len(places))]

    def place(self, index: int) -> str:
        """The place of an example in its source, for errors."""
        part, number = self._at(index)
        return place_of(self.parts[part].examples, number)

    @functools.cached_property
    def choice(self) -> str:
        """A digest of which examples of each source these are, in which order."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(len(part.numbers).to_bytes(8, "little") + part.numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _at(self, index: int) -> tuple[int, int]:
        """The part of an example, and its number in the source of this."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[part - 1]) if part else 0
        return part, int(self.parts[part].numbers[index - before])


def split_digests(
    sources: Mapping[str, SourceSection], examples: Any, directory: Path, plugin: Path, known: FileDigests
) -> dict[str, str]:
    """Digests of the examples of a split, by what they are of.

    Args:
        sources: the sections of the recipe that they are from; none where they are the plugin's.
        examples: of the split.
        directory: the recipe's folder.
        plugin: the plugin's folder.
        known: of files.

    Raises:
        DataError: a file cannot be read.
    """
    is_mixed = isinstance(examples, Mixture | MixedStream)
    parts = examples.sources if isinstance(examples, MixedStream) else getattr(examples, "parts", ())
    wholes = [part.examples for part in parts] if is_mixed else [examples]
    found = {"choice of examples": examples.choice} if is_mixed else {}
    for number, whole in enumerate(wholes):
        section = [*sources.values()][number] if sources else None
        one = example_digests(whole, plugin) if section is None else source_digests(section, whole, directory, known)
        found |= {f"source {number}: {name}" if len(wholes) > 1 else name: digest for name, digest in one.items()}
    return found
