"""What orbax says: silenced while it works, shortened when it fails."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import warnings
from typing import Any


@functools.cache
def mute_orbax() -> None:
    """Silences, once and for the process, what orbax says besides what it raises.

    It narrates every save and logs its own errors; and after one, tensorstore complains of every other read and write
    that ends when nobody listens any more.
    """
    warnings.filterwarnings("ignore", r"coroutine 'async_serialize", RuntimeWarning)  # what a failed save gave up
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others


def reason(error: Exception) -> str:
    """What orbax raised in a few words: the system's own for an error code, else the first line, without its specs."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    first = str(error).strip().partition("\n")[0].partition(" [tensorstore_spec")[0]
    return first or type(error).__name__
