"""Whether something can be written, asked before there is work to lose."""

from __future__ import annotations

import os
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
