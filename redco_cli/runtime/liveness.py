"""Which process this is, in words that another can judge later: does it still run?

A number of a process alone says nothing: after a crash another process may have it, and in a container that was
restarted host and number are those of before. So a process also says when it began, and in which boot of the machine
and which namespace its number counts. Whoever shares those can ask the system; for everybody else it is unknown.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_OVER = frozenset("ZX")
"""States in /proc of a process that has ended, and that nobody has asked after yet."""


@dataclass(frozen=True)
class ProcessIdentity:
    """What tells a process from every other one, where the system says it.

    Attributes:
        host: name of the machine.
        pid: its number there.
        started: when it began, in the clock ticks of its boot; None where the system does not say.
        boot: which boot of the machine; None likewise.
        namespace: in which its number counts; None likewise.
    """

    host: str
    pid: int
    started: int | None
    boot: str | None
    namespace: str | None


def this_process() -> ProcessIdentity:
    """The process that asks."""
    boot = namespace = None
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip() or None
        namespace = os.readlink(_PROC / "self/ns/pid")
    pid = os.getpid()
    return ProcessIdentity(socket.gethostname(), pid, _state(pid)[1], boot, namespace)


def is_running(process: ProcessIdentity) -> bool | None:
    """Whether a process still runs; None where that cannot be known from here: it is of another machine or container.

    Stopped ones (SIGSTOP) run.
    """
    here = this_process()
    known = (process.host, process.boot, process.namespace)
    if known != (here.host, here.boot, here.namespace) or None in known:
        return None
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        pass  # somebody else's
    except (ProcessLookupError, OverflowError):
        return False
    state, started = _state(process.pid)
    return state not in _OVER and (started is None or started == process.started)


def _state(pid: int) -> tuple[str, int | None]:
    """The state of a process, and when it began, in clock ticks since the machine did."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return "", None
    fields = text.rpartition(")")[2].split()  # before it stands its name, which may hold anything
    return fields[0], int(fields[19])
