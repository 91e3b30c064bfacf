"""Digests of data, by which a run that continues knows whether it is still the same data.

Of files it is their content. A digest is kept with the size and the times of its file, so that nothing is read twice:
neither when the run continues, nor when its directory was moved together with the files. Of data from elsewhere it is
what the library says of its version, and a sample of examples; of a plugin's examples their number and a sample: 256 of
them, evenly spread, so all of up to 256. Of a stream it is the first 8 examples. A sample that is not the same when it
is read again says nothing, and is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import hashlib
import itertools
import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from redco_cli.data.examples import Examples, evenly_spread, is_indexed
from redco_cli.data.files import find_files, find_path
from redco_cli.data.reader import FILE_FORMATS
from redco_cli.errors import DataError, RedcoError
from redco_cli.recipe.data import SourceSection

CACHE_NAME = ".data-digests.json"
"""The file in an output directory that keeps the digests of data files."""
SAMPLE = 256
"""Examples by which data of known length is told from other data."""
FIRST = 8
"""The same of a stream: as many as prove a plugin, which are read anyway."""
_NAMED = 64
"""Files that have a digest each; more of them have one together."""
_CHUNK = 2**22
_SETTLED = 2.0
"""Seconds after which another write surely gives a file another time."""
_PLAIN = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, enum.Enum, complex, range)
Told = Callable[[int, int], None]
"""Told of progress: bytes read, and all that are to be read."""


class FileDigests:
    """Digests of the content of files, kept in a directory; a context manager that writes what is new there."""

    def __init__(self, directory: Path, told: Told = lambda _done, _total: None) -> None:
        """Reads what is known.

        Args:
            directory: the output directory; absolute, and perhaps not there.
            told: of progress.
        """
        self.directory = directory
        self._told = told
        self._known: dict[str, Any] = {}
        self._new = False
        with contextlib.suppress(OSError, ValueError):
            read = json.loads((directory / CACHE_NAME).read_bytes())
            self._known = read if isinstance(read, dict) else {}

    def __enter__(self) -> FileDigests:
        return self

    def __exit__(self, *_: object) -> None:
        temporary = self.directory / f"{CACHE_NAME}.{os.getpid()}"
        with contextlib.suppress(OSError):  # it only saves time
            if self._new and self.directory.is_dir():
                temporary.write_text(json.dumps(self._known), encoding="utf-8")
                temporary.replace(self.directory / CACHE_NAME)

    def of(self, files: Sequence[Path]) -> list[str]:
        """The digest of each file.

        Raises:
            OSError: one cannot be read.
        """
        marks = {file: _mark(file) for file in files}
        unread = [file for file, mark in marks.items() if self._lookup(file, mark) is None]
        total, done, found = sum(marks[file][0] for file in unread), 0, {}
        for file, mark in marks.items():
            known = self._lookup(file, mark)
            if known is None:
                began = time.time()
                found[file] = self._read(file, done, total)
                done += mark[0]
                if _mark(file) == mark and began - mark[1] / 1e9 > _SETTLED:
                    self._known[self._key(file)] = [*mark, found[file]]
                    self._new = True
            else:
                found[file] = known
        return [found[file] for file in files]

    def _key(self, file: Path) -> str:
        return os.path.relpath(file, self.directory)

    def _lookup(self, file: Path, mark: tuple[int, int, int]) -> str | None:
        known = self._known.get(self._key(file))
        matches = isinstance(known, list) and len(known) == 4 and tuple(known[:3]) == mark
        return str(known[3]) if matches and isinstance(known, list) else None

    def _read(self, file: Path, done: int, total: int) -> str:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                self._told(min(done, total), total)
        return digest.hexdigest()[:16]


def source_digests(source: SourceSection, examples: Examples, directory: Path, known: FileDigests) -> dict[str, str]:
    """Digests of the data that a section of a recipe names, by what they are of; none depends on the place of files.

    Args:
        source: the section.
        examples: what was loaded from it.
        directory: the recipe's folder.
        known: of files.

    Raises:
        DataError: a file cannot be read.
    """
    names = _files_of(source, directory, known.directory)
    local = [Path(name) for name in names or () if "://" not in name]
    found = _named(local, known) if local else {}
    if names is None or len(local) < len(names):
        version = _hashed([source.revision, *_versions(examples)])
        found |= {"version": version, **example_digests(examples, directory)}
    return found


def example_digests(examples: Examples, folder: Path) -> dict[str, str]:
    """Digests of examples of whatever origin: how many there are, and a sample; of a stream the first.

    Args:
        examples: a few of them are read twice.
        folder: of the project. Where examples hold paths, there is a second digest, of paths as they are seen from
            there: a project that was moved agrees in one of the two; see `alike`.
    """
    if not is_indexed(examples):
        return _sampled("first examples", lambda count: itertools.islice(examples, count), FIRST, folder)
    count = len(examples)
    chosen = evenly_spread(count, SAMPLE)
    sample = _sampled("examples", lambda count: (examples[index] for index in chosen[:count]), len(chosen), folder)
    return {"number of examples": str(count), **sample}


def alike(before: str, now: str) -> bool:
    """Whether two digests are of the same content, of which there may be two each."""
    return not set(before.split()).isdisjoint(now.split())


def _sampled(name: str, read: Callable[[int], Iterable[Any]], count: int, folder: Path) -> dict[str, str]:
    """The digest of a sample; none where its beginning is not the same twice: such data is drawn anew each time."""
    plain, seen = hashlib.sha256(), hashlib.sha256()
    try:
        first = [value_digest(example) for example in read(min(count, FIRST))]
        for index, example in enumerate(read(count)):
            plain.update(value_digest(example))
            seen.update(value_digest(example, folder))
            if index < len(first) and value_digest(example) != first[index]:
                return {}
    except (RedcoError, RecursionError) as error:  # training says so if it comes that far
        return {name: type(error).__name__}
    return {name: " ".join(dict.fromkeys((plain.hexdigest()[:16], seen.hexdigest()[:16])))}


def _files_of(source: SourceSection, directory: Path, output: Path) -> list[str] | None:
    """The files and addresses that data is read from; None where only its library knows."""
    if source.path in FILE_FORMATS:
        patterns = [source.data_files] if isinstance(source.data_files, str) else list(source.data_files or ())
        return find_files(patterns, directory, "data_files")
    folder = find_path(source.path, directory)
    if folder is None:
        return None
    splits = set(re.findall(r"(?:^|\+)\s*([^\[+\s]+)", source.split))
    saved = (folder / "dataset_dict.json").exists()
    folders = sorted(folder / split for split in splits) if saved else [folder]
    files = sorted(path for one in folders for path in one.rglob("*") if path.is_file())
    within = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return [str(path) for path in within if not path.is_relative_to(output)]


def _named(files: Sequence[Path], known: FileDigests) -> dict[str, str]:
    """Digest by name; where there are several, of their order too, which is that of the examples."""
    try:
        digests = known.of(files)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise DataError(str(error.filename), problem, "check the file and its permissions") from error
    folder = os.path.commonpath([file.parent for file in files])
    names = [Path(os.path.relpath(file, folder)).as_posix() for file in files]
    together = _hashed(zip(names, digests, strict=True))
    if len(files) > _NAMED:
        return {f"{len(files)} files": together}
    return dict(zip(names, digests, strict=True)) | ({"order of files": _hashed(names)} if len(files) > 1 else {})


def _versions(examples: Any) -> list[str]:
    """What `datasets` says of where rows are from, without the place of its cache: configuration, version, commit."""
    dataset = getattr(examples, "dataset", None)
    if dataset is not None:
        return ["/".join(Path(one["filename"]).parts[-4:-1]) for one in getattr(dataset, "cache_files", ())[:1]]
    inner = getattr(getattr(examples, "source", None), "_ex_iterable", None)
    found: set[str] = set()
    while inner is not None:  # such as `take`, around what reads
        texts = [one for value in getattr(inner, "kwargs", {}).values() if isinstance(value, list) for one in value]
        found |= {one for one in texts if isinstance(one, str) and "://" in one}
        inner = getattr(inner, "ex_iterable", None)
    return sorted(found)


def _hashed(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value_digest(value))
    return digest.hexdigest()[:16]


def value_digest(value: Any, folder: Path | None = None) -> bytes:
    """A digest of a value as examples hold it: numbers, text, arrays, lists and dicts of them.

    The same for equal values in any process, whatever the order of a dict. Of an object that is none of these only its
    type counts.

    Args:
        value: the value.
        folder: paths of files that are there count as they are seen from it; default: as they are.
    """
    kind, content = _content(value, folder)
    return hashlib.sha256(kind.encode() + b"\0" + content).digest()


def _content(value: Any, folder: Path | None) -> tuple[str, bytes]:
    if value is None or isinstance(value, bool | int | np.bool_ | np.integer):
        return "plain", repr(value if value is None else int(value)).encode()
    if isinstance(value, float | np.floating):
        return "float", struct.pack("<d", value)
    if isinstance(value, str | PurePath):
        return "text", _placed(str(value), folder).encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray):
        return "bytes", bytes(value)
    if isinstance(value, _PLAIN):
        return "value", repr(value).encode()
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        array = _as_array(value)
        if array is not None and not array.dtype.hasobject:
            return f"array {array.dtype.str} {array.shape}", np.ascontiguousarray(array).tobytes()
        value = value if array is None else array.ravel().tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        pairs = (value_digest(key) + value_digest(one, folder) for key, one in value.items())
        return "mapping", b"".join(sorted(pairs))
    if isinstance(value, list | tuple):
        return "sequence", b"".join(value_digest(one, folder) for one in value)
    if isinstance(value, set | frozenset):
        return "set", b"".join(sorted(value_digest(one, folder) for one in value))
    return "object", f"{type(value).__module__}.{type(value).__qualname__}".encode()


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """A value as an array; None where it cannot be one, such as a tensor of another library on its device."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _placed(text: str, folder: Path | None) -> str:
    is_path = folder is not None and text.startswith(os.sep) and "\0" not in text and os.path.exists(text)
    return os.path.relpath(text, folder) if is_path else text


def _mark(file: Path) -> tuple[int, int, int]:
    """What tells that a file was not written since: its size, and the times of its content and of its entry."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
