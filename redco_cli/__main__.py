"""`redco`, and `python -m redco_cli`: from the first line on, a signal that asks for an end gets its exit code."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_BLOCKED = (*_HEARD, signal.SIGINT)
_REQUEUE, _INTERRUPTED = 75, 130  # as in `errors`: importing it takes time in which a signal would not be heard


def hear_early() -> None:
    """Makes what asks for an end end this process with the code for it, until somebody with more to lose hears it.

    Not a SIGHUP that is ignored: that is what `nohup` is for.
    """
    for number in _HEARD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)  # `redco launch` blocks them until now
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_ignore)  # the first to be registered is the last to be called
    from redco_cli.launch.orphan import stop_with_launcher  # only now: what it imports takes time

    stop_with_launcher()


def main() -> None:
    """The entry point."""
    if "train" in sys.argv:
        _take_large_pages()
    try:
        hear_early()
        from redco_cli.cli import main as run
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        os._exit(_INTERRUPTED)
    run()


def _take_large_pages() -> None:
    """Signals wait meanwhile: until `hear_early` of the process that begins anew, or of this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    from redco_cli.runtime.platforms import begin_again_with_large_pages

    begin_again_with_large_pages()


def _ignore() -> None:
    """An interpreter that ends forgets its handlers first: a signal would undo the exit code of a finished run."""
    for number in _HEARD:
        signal.signal(number, signal.SIG_IGN)


def _forget() -> None:
    for number in _HEARD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os.write(2, f"{signal.Signals(number).name}: nothing was to be saved\n".encode())
    os._exit(_REQUEUE)


if __name__ == "__main__":
    main()
