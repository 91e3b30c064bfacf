"""JSON lines, read with the place of every mistake."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

from redco_cli.errors import DataError

_REMEDY = 'write one JSON object per line, such as {"text": "..."}, in UTF-8'
_KINDS = {list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number", float: "a number"}


class JsonLines(list[dict[str, Any]]):
    """The objects of a JSON lines file, which know their lines."""

    def __init__(self, path: str, numbered: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Takes pairs of line and object."""
        pairs = list(numbered)
        super().__init__(parsed for _, parsed in pairs)
        self.path, self.lines = path, [number for number, _ in pairs]

    def place(self, index: int) -> str:
        """File and line of an object."""
        return f"{self.path}:{self.lines[index]}"


def read_jsonl(path: str | os.PathLike[str]) -> JsonLines:
    """The objects of a JSON lines file, one per line that is not blank.

    Raises:
        DataError: the file cannot be read, a line is not UTF-8, not JSON or no object, or there is no object at all.
    """
    try:
        with open(path, "rb") as file:
            return read_lines(file, str(path))
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror or error}", "check the path") from None


def read_lines(file: IO[bytes], name: str) -> JsonLines:
    """The objects of an open JSON lines file, to its end.

    Args:
        file: the file.
        name: what to call it.

    Raises:
        DataError: as `read_jsonl`.
        OSError: it cannot be read.
    """
    objects = JsonLines(name, _parse_lines(file, name))
    if not objects:
        raise DataError(name, "holds no examples", _REMEDY)
    return objects


def line_of(path: str, number: int) -> tuple[int | None, int | None]:
    """The line, from 1, of an object of a JSON lines file, from 0.

    Args:
        path: a local file, plain or gzipped.
        number: of the object.

    Returns:
        The line, None when the file has fewer; and how many objects it has, None when that is not known because it
        is no plain file of lines or the line was found before its end.
    """
    try:
        with _open(path) as file:
            if _is_document(file):
                return None, None
            rows = 0
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    if rows == number:
                        return line, None
                    rows += 1
            return None, rows
    except (OSError, EOFError):
        return None, None


def find_fault(path: str, name: str) -> str | None:
    """What is wrong in a JSON or JSON lines file, with its line; None when nothing is found.

    Args:
        path: a local file, plain or gzipped.
        name: what to call it.

    Raises:
        OSError, EOFError: the file cannot be read or decompressed.
    """
    with _open(path) as file:
        if _is_document(file):
            return _document_fault(file.read(), name)
        try:
            for _ in _parse_lines(file, name):
                pass
        except DataError as error:
            return f"{error.problems[0].where}: {error.problems[0].problem}"
    return None


def _open(path: str) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path) if path.endswith(".gz") else open(path, "rb"))


def _is_document(file: IO[bytes]) -> bool:
    """Whether a file that was just opened is one JSON document, and not lines."""
    first = file.readline().strip().removeprefix(b"\xef\xbb\xbf")
    file.seek(0)
    return first[:1] == b"[" or first == b"{"


def _parse_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(file, start=1):
        where = f"{name}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if not line:
                continue
            parsed = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(where, f"not JSON: {error.msg} at column {error.colno}", _REMEDY) from None
        except UnicodeDecodeError as error:
            problem = f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start} of the line"
            raise DataError(where, problem, "save the file as UTF-8") from None
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
            raise DataError(where, f"not readable as JSON: {error}", _REMEDY) from None
        if not isinstance(parsed, dict):
            raise DataError(where, f"holds {_KINDS[type(parsed)]}, but an object is expected", _REMEDY)
        yield number, parsed


def _document_fault(content: bytes, name: str) -> str | None:
    try:
        document = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return f"{name}:{error.lineno}: not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return f"{name}:{line}: not UTF-8: byte 0x{content[error.start]:02x}"
    except (ValueError, RecursionError) as error:
        return f"{name}: not readable as JSON: {error}"
    for index, item in enumerate(document if isinstance(document, list) else ()):
        if not isinstance(item, dict):
            return f"{name}: item {index} is {_KINDS[type(item)]}, but an object is expected"
    return None
