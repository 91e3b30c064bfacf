"""What a process of `redco launch` does when its launcher dies: it stops as on SIGTERM, so that it saves.

Each process inherits one end of a pipe of which the launcher alone holds the other: however the launcher ends, the
kernel closes it. Each also inherits the ends that the launcher reads of what it prints: with these it takes the place
of its reader, or its next line would end it with EPIPE before it has saved.
"""

from __future__ import annotations

import os
import signal
import stat
import threading

LIFELINE = "REDCO_LAUNCHER"
"""The environment variable with the numbers of these three files; no further than to the processes of a launcher."""


def stop_with_launcher() -> None:
    """Watches the launcher from now on, where this process has one. Its own children inherit nothing of this."""
    given = os.environ.pop(LIFELINE, "").split(",")
    if not all(one.isdecimal() and _is_pipe(int(one)) for one in given):
        return
    lifeline, *printed = map(int, given)
    for one in (lifeline, *printed):
        os.set_inheritable(one, False)
    threading.Thread(target=_watch, args=(lifeline, printed), daemon=True, name="redco-launcher").start()


def _is_pipe(file: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(file).st_mode)
    except (OSError, OverflowError):
        return False


def _watch(lifeline: int, printed: list[int]) -> None:
    _read_on(lifeline)  # until nobody can write to it: nobody ever does
    for one in printed:
        threading.Thread(target=_read_on, args=(one,), daemon=True, name="redco-printed").start()
    os.kill(os.getpid(), signal.SIGTERM)


def _read_on(file: int) -> None:
    while os.read(file, 2**16):
        pass
