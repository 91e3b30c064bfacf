"""Directories that are deleted beside the training, and what is left of them after a crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from redco_cli.errors import StorageError
from redco_cli.recipe.load import shown

UNFINISHED = ".orbax-checkpoint-tmp"
"""What the name of a checkpoint ends with while it is being written or deleted."""
_SWEEPS = 20
_PAUSE = 0.1


class CheckpointDeletedError(StorageError):
    """A checkpoint was deleted while it was read: that is no damage, and its run has newer ones."""

    @classmethod
    def at(cls, path: Path) -> CheckpointDeletedError:
        """The error for the directory of a checkpoint."""
        problem = "was deleted while it was read: its run keeps the newest checkpoint.keep, and the best"
        return cls(shown(path), problem, "choose another, or a copy of it elsewhere; or let the run keep more of them")


def is_gone(path: Path) -> bool:
    """Whether a directory is no longer there. Reads the one above it, which network disks do not remember so long."""
    try:
        return path.name not in os.listdir(path.parent)
    except OSError:
        return True


class DirectoryDeleter:
    """Deletes directories in a thread: a large one takes seconds, which no step should wait for."""

    def __init__(self, suffix: str) -> None:
        """Touches no disk.

        Args:
            suffix: what the name of a directory ends with while it is not whole.
        """
        self._suffix = suffix
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redco-delete")
        self._pending: list[Future[None]] = []

    def delete(self, path: Path) -> None:
        """Renames a directory now, and deletes it later.

        Raises:
            StorageError: it, or one that was to be deleted before, cannot be.
        """
        doomed = path.with_name(f"{path.name}.old{self._suffix}")
        self.collect(wait=doomed.exists())
        with moving(path), contextlib.suppress(FileNotFoundError):  # somebody else may have deleted it
            path.rename(doomed)
        self._pending.append(self._thread.submit(self._remove, path, doomed))

    def collect(self, *, wait: bool) -> None:
        """Reports what went wrong with the deletions that are done, or with all.

        Raises:
            StorageError: something cannot be deleted.
        """
        while self._pending and (wait or self._pending[0].done()):
            self._pending.pop(0).result()

    def settle(self, directory: Path, suffix: str) -> None:
        """Gives every directory that replaces another the name of that one, which is deleted.

        Args:
            directory: where they are.
            suffix: what the name of a replacement ends with; whole as it is, it counts until it has its name.

        Raises:
            StorageError: it cannot be renamed.
        """
        for new in sorted(directory.glob(f"checkpoint-*{suffix}")):
            path = new.with_name(new.name.removesuffix(suffix))
            if path.exists():
                self.delete(path)
            with moving(new):
                new.rename(path)

    def sweep(self, directory: Path, pattern: str) -> None:
        """Deletes what killed and failed saves left behind; of one that failed, some files are still being written."""
        for _ in range(_SWEEPS):
            unfinished = list(directory.glob(f"{pattern}{self._suffix}"))
            for path in unfinished:
                shutil.rmtree(path, ignore_errors=True)
            if not unfinished:
                return
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Waits for all deletions.

        Raises:
            StorageError: something cannot be deleted.
        """
        self._thread.shutdown()
        self.collect(wait=True)

    def _remove(self, path: Path, doomed: Path) -> None:
        with moving(path), contextlib.suppress(FileNotFoundError):  # `sweep` may have been there first
            shutil.rmtree(doomed)


def set_aside(path: Path, name: str) -> None:
    """Renames a directory, to `name` beside it or the first of `name-2`, `name-3`, ... that is not taken.

    Raises:
        StorageError: it cannot be renamed.
    """
    aside, number = path.parent / name, 1
    while aside.exists():
        number += 1
        aside = path.parent / f"{name}-{number}"
    with moving(path):
        path.rename(aside)


@contextlib.contextmanager
def moving(path: Path) -> Iterator[None]:
    """Says what cannot be renamed or deleted.

    Raises:
        StorageError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be renamed or deleted: {error.strerror or error}"
        raise StorageError(shown(path), problem, "correct the permissions of output_dir") from error
