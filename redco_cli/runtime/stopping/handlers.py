"""Handlers of signals for a while, which children that are forked do not keep."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that ask a run to end; SIGHUP, of a terminal that is closed, unless `nohup` has it ignored."""
Handler = Callable[[int, FrameType | None], None]

_active: list[Mapping[signal.Signals, Handler]] = []


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handles signals while the context lasts; elsewhere than in the main thread, none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _leave_children_alone()
    handlers = {number: handler for number, handler in handlers.items() if not is_ignored(number)}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    _active.append(handlers)
    try:
        yield
    finally:
        _active.pop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_ignored(number: int) -> bool:
    """Whether `nohup` asked that the end of a terminal be no end of the program."""
    return number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@functools.cache
def _leave_children_alone() -> None:
    """From now on, children that are forked, as by `multiprocessing`, have signals of their own.

    They inherit handlers, and the socket that tells of a signal: one sent to a child would stop the run.
    """

    def forget() -> None:
        if _active:
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                if not is_ignored(number):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)


_last: list[Callable[[], None]] = []


@contextlib.contextmanager
def before_end(action: Callable[[], None]) -> Iterator[None]:
    """While the context lasts, an action is done before this process ends at once; it must not raise, nor wait long."""
    _last.append(action)
    try:
        yield
    finally:
        _last.remove(action)


def act_before_end() -> None:
    """Does what `before_end` was given, the latest first."""
    for action in reversed(_last):
        action()
