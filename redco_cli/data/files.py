"""Finds what a recipe names as data, on this machine."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from redco_cli.data.jsonl import find_fault
from redco_cli.errors import DataError
from redco_cli.recipe.load import shown

# `datasets` ends the process on a JSON file that holds `null`, and takes [1, 2] for rows of text.
_JSON_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*[{\]]|\{|$)")


def find_files(patterns: Sequence[str], directory: Path, where: str) -> list[str]:
    """The files that the patterns match, in the order of the patterns, each pattern's sorted; URLs pass unchanged.

    Args:
        patterns: paths or globs; relative ones are searched from `directory`, then from the working directory.
        directory: the recipe's folder.
        where: the recipe key that gave them, for errors.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: list[str] = []
    for pattern in patterns:
        found += [pattern] if "://" in pattern else _matches(pattern, directory, where)
    return found


def find_path(name: str, directory: Path) -> Path | None:
    """The file or folder of this name: seen from `directory`, else from the working directory, else None."""
    for base in (directory, Path.cwd()):
        path = (base / os.path.expanduser(name)).resolve()
        if path.exists():
            return path
    return None


def check_files(files: Sequence[str], *, json: bool, where: str) -> None:
    """Refuses, before any library reads them, empty files and, where `json` is true, what does not begin like objects.

    Raises:
        DataError: a file is refused, or cannot be opened.
    """
    for name in files:
        if "://" in name:
            continue
        path = Path(name)
        try:
            with path.open("rb") as file:
                start = file.read(1024)
        except OSError as error:
            raise DataError(where, f"{shown(path)} cannot be read: {error.strerror}", "check its permissions") from None
        if not start:
            raise DataError(where, f"{shown(path)} is empty", "write examples to it, or leave it out")
        compressed = path.suffix in (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
        if json and not compressed and not _JSON_START.match(start):
            fault = find_fault(name, shown(path)) or f"{shown(path)} holds no JSON objects"
            raise DataError(where, fault, "write one JSON object per line, or one list of objects")


def as_patterns(files: Sequence[str]) -> list[str]:
    """The files as `datasets` wants them: patterns that match only themselves."""
    return [name if "://" in name else glob.escape(name) for name in files]


def searched(directory: Path) -> str:
    """The places where relative names are looked for, as a phrase."""
    places = dict.fromkeys((str(directory.resolve()), str(Path.cwd())))
    return " or ".join(places)


def _matches(pattern: str, directory: Path, where: str) -> list[str]:
    literal = find_path(pattern, directory)
    if literal is not None and literal.is_file():
        return [str(literal)]
    for base in (directory, Path.cwd()):
        names = glob.glob(os.path.expanduser(pattern), root_dir=base, recursive=True)
        files = sorted(str((base / name).resolve()) for name in names if (base / name).is_file())
        if files:
            return files
    raise DataError(
        where, f"{pattern} matches no file in {searched(directory)}", "check the path; patterns look like data/*.jsonl"
    )
