"""Encoded texts, in memory or on disk: for each field all texts behind each other, and where each begins.

On disk a directory holds `<field>.bin`, the numbers alone, `<field>.offsets.npy`, int64 [texts + 1], and `encoded.json`
with the types of the fields and what was noted. It is written under another name and then moved there, so that one that
exists is whole. Nothing of it is read before it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_DOCUMENT = "encoded.json"
_VERSION = 1
_DAY = 86_400


@dataclass(frozen=True)
class Encoded:
    """The texts of a split, in the order of its examples; one that was left out is empty.

    Attributes:
        values: name of a field to the numbers of all texts [their sum].
        offsets: name of a field to where each text begins in it, and the end of the last [texts + 1].
        measure: the field whose length is that of a text.
        notes: what was noted of texts, to how many.
        place: the number of a text to where it is from.
    """

    values: Mapping[str, NDArray[Any]]
    offsets: Mapping[str, NDArray[np.int64]]
    measure: str
    notes: Mapping[str, int] = field(default_factory=dict)
    place: Callable[[int], str] = str

    def __len__(self) -> int:
        return len(self.offsets[self.measure]) - 1

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        return {
            name: np.asarray(values[self.offsets[name][index] : self.offsets[name][index + 1]])
            for name, values in self.values.items()
        }

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each text."""
        lengths: NDArray[np.int64] = np.diff(self.offsets[self.measure])
        return lengths

    def content(self, numbers: Iterable[int]) -> bytes:
        """What some of the texts hold, for a digest."""
        fields = (pair for number in numbers for pair in sorted(self[number].items()))
        return b"".join(name.encode() + np.ascontiguousarray(field).tobytes() for name, field in fields)


def read_encoded(directory: Path, measure: str) -> Encoded | None:
    """What a directory holds, mapped rather than read; None where there is none, or one of another version.

    Args:
        directory: that `Collector.finish` made.
        measure: the field whose length is that of a text.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError, IndexError):
        document = json.loads((directory / _DOCUMENT).read_bytes())
        if document["version"] != _VERSION:
            return None
        offsets = {name: np.load(directory / f"{name}.offsets.npy", mmap_mode="r") for name in document["fields"]}
        values = {
            name: _mapped(directory / f"{name}.bin", np.dtype(dtype), int(offsets[name][-1]))
            for name, dtype in document["fields"].items()
        }
        with contextlib.suppress(OSError):  # of another user
            os.utime(directory)
        return Encoded(values, offsets, measure, document["notes"])
    return None


def _mapped(path: Path, dtype: np.dtype[Any], size: int) -> NDArray[Any]:
    if path.stat().st_size != size * dtype.itemsize:
        raise ValueError(f"{path} has {path.stat().st_size} bytes")
    return np.memmap(path, dtype, "r", shape=(size,)) if size else np.zeros(0, dtype)


class Collector:
    """Takes encoded texts one after the other; a context manager that leaves nothing behind when it is cut off."""

    def __init__(self, measure: str, directory: Path | None) -> None:
        """Makes nothing yet.

        Args:
            measure: the field whose length is that of a text.
            directory: where the texts are to be kept; None for memory.
        """
        self._measure, self._directory = measure, directory
        self._partial = None if directory is None else directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._ends: dict[str, list[int]] = {}
        self._types: dict[str, np.dtype[Any] | None] = {}  # None until a text has something there
        self._skipped = 0  # before the first that is not

    def __enter__(self) -> Collector:
        if self._partial is not None:
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, text: Mapping[str, NDArray[Any]] | None) -> None:
        """Adds a text; None for one that is left out.

        Raises:
            ValueError: it has other fields, or of another type, than those before it.
        """
        if text is None:
            for ends in self._ends.values():
                ends.append(ends[-1])
            self._skipped += not self._ends
            return
        if not self._types:
            self._types = dict.fromkeys(text)
            self._ends = {name: [0] * (self._skipped + 1) for name in text}
            self._parts = {name: [] for name in text}
            if self._partial is not None:
                self._files = {name: (self._partial / f"{name}.bin").open("wb") for name in text}
        if text.keys() != self._types.keys():
            given, first = (", ".join(one) for one in (text, self._types))
            raise ValueError(f"it has the fields {given}, but examples before it {first}")
        for name, value in text.items():
            if len(value) and self._types[name] is None:
                self._types[name] = value.dtype
            elif len(value) and value.dtype != self._types[name]:
                raise ValueError(f"its field {name} is {value.dtype}, but {self._types[name]} in examples before it")
            self._ends[name].append(self._ends[name][-1] + len(value))
            if self._partial is None:
                self._parts[name].append(value)
            else:
                self._files[name].write(np.ascontiguousarray(value).tobytes())

    def finish(self, notes: Mapping[str, int]) -> Encoded:
        """All texts, on disk where they are kept there, in the place of what was kept before.

        Args:
            notes: what was noted of them, to how many.

        Raises:
            ValueError: all were left out.
            OSError: the disk is full.
        """
        if not self._types:
            raise ValueError("every example is left out")
        offsets = {name: np.array(ends, np.int64) for name, ends in self._ends.items()}
        if self._partial is None or self._directory is None:
            values = {
                name: np.concatenate(parts).astype(self._types[name] or np.int32) for name, parts in self._parts.items()
            }
            return Encoded(values, offsets, self._measure, dict(notes))
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            np.save(self._partial / f"{name}.offsets.npy", offsets[name])
        fields = {name: (dtype or np.dtype(np.int32)).str for name, dtype in self._types.items()}
        document = {"version": _VERSION, "fields": fields, "notes": dict(notes)}
        (self._partial / _DOCUMENT).write_text(json.dumps(document))
        # What this process has written stays readable for it when its place is taken, or cannot be.
        found = read_encoded(self._partial, self._measure)
        if found is None:
            raise OSError(f"{self._partial} cannot be read back")
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was faster: what it wrote is the same
            self._partial.rename(self._directory)
        return found


def forget_oldest(directory: Path, kept: int) -> None:
    """Deletes what was used longest ago among the directories of a cache, unless that was within the last day.

    Args:
        directory: that holds them.
        kept: how many stay in any case.
    """
    found: list[tuple[float, Path]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError):  # another process forgets it as well
            if path.is_dir():
                found.append((path.stat().st_mtime, path))
    for used, path in sorted(found, reverse=True)[kept:]:
        if time.time() - used > _DAY:
            shutil.rmtree(path, ignore_errors=True)
