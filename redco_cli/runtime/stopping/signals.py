"""Signals that ask a run to end: the first lets it finish its step and save, a second Ctrl-C ends it at once.

Several processes must end at the same step, or those that go on wait for ever for the others. So each counts the points
at which it could stop, the ends of steps and the batches of evaluation and prediction; they come in the same order on
all. When one is asked to stop, each says which point it has not yet passed, and passes none before the answer: the
latest of them. Threads say this, so it takes no device and no time of a step, and works while a program compiles.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from redco_cli.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Interrupted, RedcoError, Requeue
from redco_cli.runtime.peers.cluster import timeout
from redco_cli.runtime.peers.connection import Connection
from redco_cli.runtime.peers.multihost import current_connection
from redco_cli.runtime.stopping.handlers import STOP_SIGNALS, act_before_end, handling

AT_ONCE = 3.0
"""Seconds after a second Ctrl-C in which the program may end by itself."""
_REMEDY = "run the same command to continue"


class Stopped(BaseException):
    """A signal ends what is under way; no `except Exception` on the way takes it for an error."""


class StopRequest:
    """Set by a signal, read by the loop at its points.

    Attributes:
        exit_code: None while nothing is to stop; 130 after Ctrl-C; 75 after the others (requeue me). With several
            processes it changes only within `due`.
        is_reached: whether a point to stop at has come; what is left is to save.
        reason: what asked it to stop.
    """

    def __init__(self, connection: Connection | None = None, tell: Callable[[str], None] = lambda _text: None) -> None:
        """Nothing is asked yet.

        Args:
            connection: to the other processes, if there are any.
            tell: says to the user what another process was asked.
        """
        self.exit_code: int | None = None
        self._asked: int | None = None
        self._connection, self._tell = connection, tell
        self.is_reached, self.reason = False, "a signal"
        self._point = 0
        self._stop_at: int | None = None
        self._is_frozen, self._code = False, EXIT_REQUEUE
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()  # a handler may put into it whatever is locked
        if connection is not None:
            connection.on_freeze, connection.on_stop = self._freeze, self._decided
            with self._changed:
                if connection.frozen is not None:  # asked before there was anything to stop
                    self._is_frozen, self._code, self._stop_at = True, connection.frozen, connection.stop_at
            threading.Thread(target=self._ask, args=(connection,), daemon=True, name="redco-stop").start()

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked, though the point to stop at may not be known."""
        return self._asked is not None

    def ask(self, code: int) -> None:
        """Asks this run to stop. May be called from a signal handler."""
        self._asked = code
        if self._connection is None:
            self.exit_code = code
        self._requests.put(code)

    def due(self) -> bool:
        """Whether to stop here: the same answer on all processes, which must ask at the same points."""
        if self._connection is None:
            self.is_reached = self.exit_code is not None
            return self.is_reached
        with self._changed:
            if self._stop_at is None and self._is_frozen:
                self._changed.wait_for(lambda: self._stop_at is not None)
            stopping = self._stop_at is not None and self._point >= self._stop_at
            self._point += 1
            if stopping:
                self.exit_code, self.is_reached = self._code, True
            return stopping

    def outcome(self, where: str, problem: str) -> RedcoError:
        """The error that a run which has stopped ends with, by what it was asked."""
        kind = Interrupted if self.exit_code == EXIT_INTERRUPTED else Requeue
        return kind(where, f"stopped by {self.reason} {problem}", _REMEDY)

    def _ask(self, connection: Connection) -> None:
        connection.request_stop(self._requests.get())

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


_current: list[StopRequest] = []
_pieces: list[None] = []
"""One entry for each piece of work under way that does not stop between two batches."""


def stopping_point() -> None:
    """A point between two batches, which all processes come to alike.

    Raises:
        Stopped: a signal asked this run to end, and this is where.
    """
    if _current and not _pieces and _current[-1].due():
        raise Stopped("between two batches")


@contextlib.contextmanager
def in_one_piece() -> Iterator[None]:
    """While the context lasts, nothing stops between two batches: whoever asked for this has points of its own."""
    _pieces.append(None)
    try:
        yield
    finally:
        _pieces.pop()


@contextlib.contextmanager
def stop_on_signal(tell: Callable[[str], None]) -> Iterator[StopRequest]:
    """Catches the stop signals while the context lasts; elsewhere than in the main thread, none.

    The processes of a run stop together.

    Args:
        tell: says to the user that the signal was heard.
    """
    request = StopRequest(current_connection(), tell)
    handled: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        handled.append(number)
        request.ask(_code(number))
        if number == signal.SIGINT and len(handled) > 1:
            raise KeyboardInterrupt

    with handling(dict.fromkeys(STOP_SIGNALS, handle)), _watching(request, tell):
        _current.append(request)
        try:
            yield request
        finally:
            _current.remove(request)


@dataclass
class EarlyStop:
    """What signals do before there is anything to save.

    Attributes:
        tell: lets the other processes know the reason, and the exit code for them.
        is_over: whether one came, or none matters any more.
    """

    tell: Callable[[str, int], object] = lambda _reason, _code: None
    is_over: bool = False


@contextlib.contextmanager
def stop_at_once(show: Callable[[RedcoError], None]) -> Iterator[EarlyStop]:
    """While the context lasts, a signal ends this process, with the exit code that it has later.

    It raises nothing: native code that is being imported would abort, or make another error of it, or swallow it. Only
    Ctrl-C does, once more, or when all is over.

    Args:
        show: takes the reason, in a thread.
    """
    early = EarlyStop()

    def end(number: int) -> None:
        name, kind = signal.Signals(number).name, Interrupted if number == signal.SIGINT else Requeue
        early.tell(name, _code(number))
        show(kind(name, "stopped by a signal; nothing was to be saved", _REMEDY))
        end_now(_code(number))

    def handle(number: int, _frame: FrameType | None) -> None:
        if not early.is_over:
            early.is_over = True
            threading.Thread(target=end, args=(number,), daemon=True, name="redco-end").start()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    with handling(dict.fromkeys(STOP_SIGNALS, handle)):
        yield early


def end_now(code: int) -> None:
    """Ends this process, whatever its threads are waiting for."""
    act_before_end()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _code(number: int) -> int:
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


@contextlib.contextmanager
def _watching(request: StopRequest, tell: Callable[[str], None]) -> Iterator[None]:
    """Hears each signal at once, in a thread: Python's handlers wait until native code, such as a compiler, returns."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hearing, told = socket.socketpair()
    told.setblocking(False)
    seconds = timeout(os.environ)

    def missed() -> str:
        what = "the checkpoint was not written" if request.is_reached else "no step or batch ended"
        return f"{what} within {seconds:g} s of a signal"

    late = _ending(seconds, EXIT_REQUEUE, missed, tell)
    at_once = _ending(AT_ONCE, EXIT_INTERRUPTED, lambda: "interrupted", tell)

    def watch() -> None:
        heard = 0
        while numbers := hearing.recv(64):
            for number in filter(STOP_SIGNALS.__contains__, numbers):
                heard += 1
                request.ask(_code(number))
                if heard == 1:
                    name = signal.Signals(number).name
                    again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
                    tell(f"{name}: stopping and saving after this step{again}")
                with contextlib.suppress(RuntimeError):  # it runs already
                    if number != signal.SIGINT:
                        late.start()
                    elif heard > 1:
                        at_once.start()

    thread = threading.Thread(target=watch, daemon=True, name="redco-signals")
    thread.start()
    previous = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        told.close()
        thread.join()
        hearing.close()
        late.cancel()
        at_once.cancel()


def _ending(seconds: float, code: int, why: Callable[[], str], tell: Callable[[str], None]) -> threading.Timer:
    """Ends this process so many seconds after its start, and the others for the same reason."""

    def end() -> None:
        reason = why()
        tell(f"{reason}: ending without saving; the last checkpoint remains")
        connection = current_connection()
        if connection is not None:
            connection.leave(peaceful=False, code=code, reason=reason)
        end_now(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    return timer
