"""`redco`, and `python -m redco_cli`: from the first line on, a signal that asks for an end gets its exit code."""

from __future__ import annotations

import os
import signal
from types import FrameType

_REQUEUE = 75  # `errors.EXIT_REQUEUE`: importing it takes time in which a signal would not be heard


def hear_early() -> None:
    """Makes SIGTERM and SIGUSR1 end this process with the code for it, until somebody with more to lose hears them."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _end_at_once)


def main() -> None:
    """The entry point."""
    hear_early()
    from redco_cli.cli import main as run

    run()


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os.write(2, f"{signal.Signals(number).name}: nothing was to be saved\n".encode())
    os._exit(_REQUEUE)


if __name__ == "__main__":
    main()
