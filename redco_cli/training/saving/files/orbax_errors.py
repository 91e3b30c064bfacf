"""What orbax says: silenced while it works, and told to a person when it fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redco_cli.errors import StorageError
from redco_cli.recipe.load import shown

_SHOWN = 3
_GIVEN_UP = ("Event loop is closed", "Encountered error while reading array index")
"""What readings and writings end with that nobody waits for any more, as of a checkpoint that was deleted."""


@functools.cache
def mute_orbax() -> None:
    """Silences, once and for the process, what orbax says besides what it raises.

    It narrates every save and logs its own errors; and after one, tensorstore complains of every other read and write
    that ends when nobody listens any more. For a line of that narration it collects tensorstore's metrics twice with
    every save, and tensorstore (0.1.86) never frees what it returns: about 30 KiB each time a checkpoint is written.
    """
    with contextlib.suppress(ImportError):
        from orbax.checkpoint._src.serialization import tensorstore_utils

        tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0
    # what a failed save gave up, and the reading of a checkpoint that was deleted meanwhile
    warnings.filterwarnings("ignore", r"coroutine '(async_serialize|_read_array)", RuntimeWarning)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_GIVEN_UP):
            report(unraisable)

    sys.unraisablehook = report_others


def is_missing(error: Exception) -> bool:
    """Whether orbax raised something because a file or directory is not there."""
    return reason(error) == os.strerror(errno.ENOENT) or "NOT_FOUND" in str(error)


def reason(error: Exception) -> str:
    """What orbax raised in a few words: the system's own for an error code, else the first line, without its specs."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    first = str(error).strip().partition("\n")[0].partition(" [tensorstore_spec")[0]
    return first or type(error).__name__


def unwritable(path: Path, error: Exception, complete: Sequence[str]) -> StorageError:
    """A checkpoint that cannot be written, for a disk that is full as a rule.

    Args:
        path: of the checkpoint.
        error: what orbax raised.
        complete: the names of those that are complete.
    """
    remedy = "free space or correct the permissions, then run the same command again: it continues"
    kept = f"complete before it: {', '.join(complete) or 'none'}"
    return StorageError(shown(path), f"cannot be written: {reason(error)}; {kept}", remedy)


def unreadable(path: Path, error: Exception, older: Sequence[str]) -> StorageError:
    """A checkpoint that cannot be read, though its files are as they were written.

    Args:
        path: of the checkpoint.
        error: what orbax raised.
        older: the names of those before it.
    """
    remedy = f"move it away to fall back to {older[-1]}" if older else "move it away"
    return StorageError(shown(path), f"is damaged and cannot be read: {reason(error)}", remedy)


def of_another_model(path: Path, wrong: Sequence[str]) -> StorageError:
    """A checkpoint that does not fit the recipe.

    Args:
        path: of the checkpoint.
        wrong: what does not, not empty.
    """
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    problem = f"is of another model or optimizer: {', '.join(wrong[:_SHOWN])}{more}"
    remedy = "restore the recipe and the plugin that wrote it, or choose another checkpoint or output_dir"
    return StorageError(shown(path), problem, remedy)
