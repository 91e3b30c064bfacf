"""Examples from a plugin's own object, which may fail at any of them: what it raises gets its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from redco_cli.plugin.contract import Example
from redco_cli.plugin.guard import guarded


def guard_examples(examples: Any, file: str) -> Sequence[Example] | Iterable[Example]:
    """The same examples, read under guard.

    Args:
        examples: with `len` and `[int]`, or only an `__iter__`. Lists and tuples come back as they are.
        file: the plugin's source file.
    """
    if isinstance(examples, list | tuple):
        return examples
    indexed = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    return GuardedSequence(examples, file) if indexed else GuardedStream(examples, file)


@dataclass(frozen=True)
class GuardedSequence(Sequence[Example]):
    """Examples with a known length. Made by `guard_examples`."""

    examples: Any
    file: str

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError(index)  # the end of a loop over a sequence
        with reading(self.file):
            return self.examples[index]

    def place(self, index: int) -> str:
        """The place of an example, for errors."""
        return _place(self.file, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Several at once, which some libraries do faster."""
        together = getattr(self.examples, "__getitems__", None)
        with reading(self.file):
            return list(together(indices)) if together else [self.examples[index] for index in indices]


@dataclass(frozen=True)
class GuardedStream(Iterable[Example]):
    """Examples of unknown length. Made by `guard_examples`."""

    examples: Any
    file: str

    def __iter__(self) -> Iterator[Example]:
        with reading(self.file):
            yield from self.examples

    def place(self, number: int) -> str:
        """The place of an example, for errors."""
        return _place(self.file, number)


def _place(file: str, number: int) -> str:
    return f"{file}: load_examples: examples[{number}]"


def reading(file: str) -> AbstractContextManager[None]:
    """Guards reading examples of a plugin's own object."""
    return guarded(f"{file}: load_examples", "reading an example of load_examples", file)
