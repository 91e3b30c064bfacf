"""Signals that ask a run to end: the first lets it finish its step and save, the second ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from redco_cli.errors import EXIT_INTERRUPTED, EXIT_REQUEUE


@dataclass
class StopRequest:
    """Set by a signal, read by the loop between two steps.

    Attributes:
        exit_code: None while nothing was asked; 130 after Ctrl-C; 75 after SIGTERM or SIGUSR1 (requeue me).
    """

    exit_code: int | None = None


@contextlib.contextmanager
def stop_on_signal(tell: Callable[[str], None]) -> Iterator[StopRequest]:
    """Catches SIGINT, SIGTERM and SIGUSR1 while the context lasts; elsewhere than in the main thread, none.

    Args:
        tell: says to the user that the signal was heard.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if request.exit_code is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
        tell(f"{signal.Signals(number).name}: stopping and saving after this step; Ctrl-C again stops at once")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
