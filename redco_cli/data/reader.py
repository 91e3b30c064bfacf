"""Reads what `datasets` opened, and tells its failures with their place: the file, and the line where it is JSON."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_cli.data.examples import Example, Indexed
from redco_cli.data.files import as_patterns
from redco_cli.data.jsonl import find_fault
from redco_cli.data.places import file_place
from redco_cli.data.verbatim import keep_text
from redco_cli.errors import DataError
from redco_cli.recipe.data import SourceSection
from redco_cli.recipe.explain import did_you_mean
from redco_cli.recipe.load import shown

FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""What `path` may name besides a directory and a hub id; `data_files` then says which files."""

_LONGEST_REASON = 300  # `datasets` may list every file ending it knows
_NO_ROWS = re.compile("corresponds to no data|No columns to parse from file|at least one example")
_BAD_CONFIGURATION = re.compile("Config name is missing|BuilderConfig .* not found")


def library() -> Any:
    """`datasets`, without progress bars, dates made of text, and the log of errors that it raises as well."""
    import datasets

    datasets.disable_progress_bars()
    keep_text()
    logger = logging.getLogger("datasets")
    logger.propagate = False  # other libraries give the root logger a handler, which would say it again
    for handler in logger.handlers:
        handler.addFilter(_below_error)
    return datasets


@dataclass(frozen=True)
class Reader:
    """A source, and how its failures are told.

    Attributes:
        source: the recipe's section.
        place: field of the section to its place in the recipe.
        files: the paths and URLs to read; empty when `datasets` finds the data itself.
    """

    source: SourceSection
    place: Callable[[str], str]
    files: Sequence[str] = ()

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turns what `datasets` raises for data that is damaged or out of reach into a `DataError`.

        Args:
            what: what could not be done, for failures that no file explains.
        """
        try:
            yield
        except ConnectionError as error:
            raise self._unreachable(error) from error
        except library().exceptions.DatasetNotFoundError as error:
            problem = f"there is no dataset {self.source.path} on the Hugging Face hub, or it is private"
            remedy = f"{_maybe_format(self.source.path)}check the name; for private and gated ones `hf auth login`"
            raise DataError(self.place("path"), problem, remedy) from error
        except _damage() as error:
            raise self._damaged(error, what) from error

    def example_place(self, number: int, split: str) -> str:
        """The place of an example: file and line of JSON lines, file and row else, or a row of what has no files.

        Args:
            number: in its split, from 0.
            split: its name.
        """
        with contextlib.suppress(*_damage()):
            place = file_place(self.files, self.source.path, number, functools.partial(_count_rows, self.source.path))
            if place is not None:
                return place
        return f"{self.source.path}: row {number + 1} of {split}"

    def _unreachable(self, error: ConnectionError) -> DataError:
        if self.files:
            return DataError(self.place("data_files"), str(error), "check the address and the network")
        problem = f"{self.source.path} is no local directory, and the Hugging Face hub cannot be reached: {error}"
        remedy = "check the name and the network; HF_HUB_OFFLINE=1 allows only what was downloaded before"
        return DataError(self.place("path"), problem, f"{_maybe_format(self.source.path)}{remedy}")

    def _damaged(self, error: BaseException, what: str) -> DataError:
        reason = _reason(error)
        if _NO_ROWS.search(reason):
            return DataError(self.place("data_files" if self.files else "path"), "holds no examples", NO_EXAMPLES)
        if _BAD_CONFIGURATION.match(reason):
            return DataError(self.place("name"), reason, "name one of these configurations")
        if not self.files:
            return DataError(self.place("path"), f"{what}: {reason}", "check that data")
        fault = _find_damage(self.source.path, self.files, reason)
        if fault is not None:
            return DataError(self.place("data_files"), fault, "repair or replace the file, or leave it out")
        problem = f"each file can be read, but not all together: {reason}"
        return DataError(self.place("data_files"), problem, "give all files the same columns and types")


@dataclass(frozen=True)
class Rows(Indexed):
    """A `datasets.Dataset` as a plain sequence of dicts. Safe to read from several threads.

    Attributes:
        dataset: the rows.
        reader: of what they are from.
        slices: splits and the numbers in them that the rows are, in this order.
    """

    dataset: Any
    reader: Reader
    slices: Sequence[tuple[str, range]] = ()

    def __len__(self) -> int:
        return len(self.dataset)

    def one(self, index: int) -> Example:
        """A row, which may be damaged: then the error says where it is from."""
        with self.reader.explained(f"example {index} cannot be read"):
            return self.dataset[index]  # type: ignore[no-any-return]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Several rows at once, which costs a third of one by one."""
        try:
            return list(self.dataset.__getitems__(list(indices)))
        except _damage():
            return [self[index] for index in indices]  # names the one that is damaged

    def place(self, index: int) -> str:
        """The place of a row, for errors."""
        number = index
        for split, part in self.slices:
            if number < len(part):
                return self.reader.example_place(part[number], split)
            number -= len(part)
        return self.reader.example_place(index, self.reader.source.split)


NO_EXAMPLES = "check what the data is made from"
"""The remedy for data that is there, but holds nothing."""


def _find_damage(form: str, files: Sequence[str], reason: str) -> str | None:
    """The first file that cannot be read by itself and why, with the line where it is JSON; None when all can."""
    local = [name for name in files if "://" not in name]
    for name in local if form == "json" else ():
        with contextlib.suppress(OSError, EOFError):  # then the reason that `datasets` gives says more
            fault = find_fault(name, shown(Path(name)))
            if fault is not None:
                return fault
    if len(files) == 1:
        return f"{shown(Path(files[0])) if local else files[0]} cannot be read as {form}: {reason}"
    for name in local:
        try:
            for _ in library().load_dataset(form, data_files=as_patterns([name]), split="train", streaming=True):
                pass
        except _damage() as error:
            return f"{shown(Path(name))} cannot be read as {form}: {_reason(error)}"
    return None


def _count_rows(form: str, name: str) -> int:
    """How many rows one local file has."""
    if form == "parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(name).num_rows)
    return sum(1 for _ in library().load_dataset(form, data_files=as_patterns([name]), split="train", streaming=True))


def _reason(error: BaseException) -> str:
    generic = isinstance(error, library().exceptions.DatasetGenerationError) and error.__cause__ is not None
    cause = error.__cause__ if generic else error
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _damage() -> tuple[type[BaseException], ...]:
    """What `datasets` and the libraries below it raise for input they cannot read, as was seen with damaged files."""
    import pyarrow

    general = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, StopIteration)
    return (*general, ImportError, library().exceptions.DatasetsError, pyarrow.ArrowException, zlib.error)


def _maybe_format(path: str) -> str:
    remedy = did_you_mean(path, FILE_FORMATS)
    return f"{remedy} Otherwise " if remedy.startswith("did you mean") else ""


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
