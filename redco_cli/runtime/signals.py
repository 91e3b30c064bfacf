"""Signals that ask a run to end: the first lets it finish its step and save, the second ends it at once.

Several processes must end at the same step, or those that go on wait for ever for the others. So each counts the points
at which it could stop, such as the ends of steps; they come in the same order on all. When one is asked to stop, each
says which point it has not yet passed, and passes none before the answer: the latest of them. Threads say this, so it
takes no device and no time of a step, and works while the program compiles or waits.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from redco_cli.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Requeue
from redco_cli.runtime.everyone import link as joined_link
from redco_cli.runtime.link import Link

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


_early: list[str] = []
"""Signals that came before there was anything to save: a package that is being imported may swallow what they raise."""


class Stopped(BaseException):
    """A signal has come where there is nothing to save; no `except Exception` on the way takes it for an error."""

    def requeue(self) -> Requeue:
        """What it is for the user."""
        return Requeue(str(self), "stopped by a signal; nothing was to be saved", "run the same command to continue")


class StopRequest:
    """Set by a signal, read by the loop at its points.

    Attributes:
        exit_code: None while nothing is to stop; 130 after Ctrl-C; 75 after SIGTERM or SIGUSR1 (requeue me). With
            several processes it changes only within `due`.
    """

    def __init__(self, link: Link | None = None, tell: Callable[[str], None] = lambda _text: None) -> None:
        """Nothing is asked yet.

        Args:
            link: to the other processes, if there are any.
            tell: says to the user what another process was asked.
        """
        self.exit_code: int | None = None
        self._asked: int | None = None
        self._link, self._tell = link, tell
        self._point = 0
        self._stop_at: int | None = None
        self._is_frozen, self._code = False, EXIT_REQUEUE
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()  # a handler may put into it whatever is locked
        if link is not None:
            link.on_freeze, link.on_stop = self._freeze, self._decided
            if link.frozen is not None:  # asked before there was anything to stop
                self._is_frozen, self._code, self._stop_at = True, link.frozen, link.stop_at
            threading.Thread(target=self._ask, args=(link,), daemon=True, name="redco-stop").start()

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked, though the point to stop at may not be known."""
        return self._asked is not None

    def ask(self, code: int) -> None:
        """Asks this run to stop. May be called from a signal handler."""
        self._asked = code
        if self._link is None:
            self.exit_code = code
        self._requests.put(code)

    def due(self) -> bool:
        """Whether to stop here: the same answer on all processes, which must ask at the same points."""
        if self._link is None:
            return self.exit_code is not None
        with self._changed:
            if self._stop_at is None and self._is_frozen:
                self._changed.wait_for(lambda: self._stop_at is not None)
            stopping = self._stop_at is not None and self._point >= self._stop_at
            self._point += 1
            if stopping:
                self.exit_code = self._code
            return stopping

    def _ask(self, link: Link) -> None:
        link.ask_stop(self._requests.get())

    def _freeze(self, code: int, process: int) -> int:
        """The first point that is not passed; none is from now on."""
        with self._changed:
            self._is_frozen, self._code = True, code
            point = self._point
        if self._asked is None:
            self._tell(f"process {process} was asked to stop: stopping and saving after this step")
        return point

    def _decided(self, point: int) -> None:
        with self._changed:
            self._stop_at = point
            self._changed.notify_all()


@contextlib.contextmanager
def stop_on_signal(tell: Callable[[str], None]) -> Iterator[StopRequest]:
    """Catches SIGINT, SIGTERM and SIGUSR1 while the context lasts; elsewhere than in the main thread, none.

    The processes of a run stop together.

    Args:
        tell: says to the user that the signal was heard.
    """
    if _early:
        raise Stopped(_early[-1])
    request = StopRequest(joined_link(), tell)

    def handle(number: int, _frame: FrameType | None) -> None:
        if request.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.ask(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE)
        tell(f"{signal.Signals(number).name}: stopping and saving after this step; Ctrl-C again stops at once")

    with _handling(dict.fromkeys(_HEARD, handle)):
        yield request


@contextlib.contextmanager
def stop_at_once() -> Iterator[None]:
    """While the context lasts, SIGTERM and SIGUSR1 end what has nothing to save yet: exit code 75, as later.

    Raises:
        Requeue: a signal came.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        _early.append(signal.Signals(number).name)
        raise Stopped(_early[-1])

    with _handling({number: handle for number in _HEARD if number != signal.SIGINT}):
        try:
            yield
        except Stopped as stopped:
            raise stopped.requeue() from None
        finally:
            _early.clear()


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
