"""Whether something can be written, asked before there is work to lose; and files that are seen to be written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from io import FileIO
from pathlib import Path

from redco_cli.errors import StorageError
from redco_cli.recipe.load import shown


def check_directory(directory: Path, where: str, remedy: str) -> None:
    """Refuses a directory that could not be made or written, as far as can be told without touching the disk.

    Args:
        directory: absolute; it and those above it need not exist.
        where: the place for the error.
        remedy: what to do about it.

    Raises:
        StorageError: a file is in the way, or a permission is missing.
    """
    nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise StorageError(where, f"{shown(directory)} cannot be made: {shown(nearest)} is no directory", remedy)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageError(where, f"{shown(directory)} cannot be written: no permission for {shown(nearest)}", remedy)


def open_held(path: Path) -> FileIO:
    """A file to append to, locked as long as it is open: others see that it is written, until this process ends."""
    file = path.open("ab", buffering=0)
    with contextlib.suppress(OSError):  # a disk without locks, or somebody who is just looking
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def is_at(file: FileIO, path: Path) -> bool:
    """Whether an open file is the one that a path leads to: nobody has deleted, moved or replaced it since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether a process has a file open by `open_held`; not seen where another machine's locks are not shared."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
