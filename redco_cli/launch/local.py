"""Several processes of one command on this machine, for development: `redco launch`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import FrameType

from redco_cli.errors import UsageError
from redco_cli.launch.orphan import LIFELINE
from redco_cli.launch.output import pass_on
from redco_cli.runtime.peers.addresses import listening_address
from redco_cli.runtime.peers.cluster import COORDINATOR, PROCESS, PROCESSES
from redco_cli.runtime.peers.secret import SECRET, new_secret
from redco_cli.runtime.platforms import simulate_devices
from redco_cli.runtime.stopping.handlers import is_ignored

COMMANDS = ("train", "eval", "predict")
"""What can be done by several processes."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PATIENCE = (20.0, 10.0)  # seconds for the others to end by themselves after a failure, and once they are asked to
_LOOK = 0.05
_PROGRAM = ("-m", "redco_cli")


def check_command(command: Sequence[str]) -> None:
    """Refuses what several processes cannot do.

    Raises:
        UsageError: naming what they can.
    """
    if not command or command[0] not in COMMANDS:
        given = f"{command[0]} is not for several processes" if command else "no command is given"
        raise UsageError("launch", given, "such as: redco launch --processes 2 -- train recipe.yaml")


def launch(command: Sequence[str], processes: int, devices: int | None) -> int:
    """Runs `redco COMMAND...` as several processes until all have ended; signals go to each of them.

    When one fails, the others are given time to say why they end, and are then ended. A signal is kept until all are
    started, and by each of them until it can hear it. When this process itself is killed, they stop and save.

    Args:
        command: such as `["train", "recipe.yaml"]`.
        processes: how many.
        devices: CPU devices of each; None for what it finds.

    Returns:
        The exit code of the first that failed, 128 + n for one ended by signal n; 0 when none did.

    Raises:
        UsageError: the command is not for several processes.
    """
    check_command(command)
    if devices is not None:
        simulate_devices(devices)
    shared = {**os.environ, COORDINATOR: f"localhost:{_free_port()}", PROCESSES: str(processes)}
    shared.setdefault(SECRET, new_secret())
    started: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    heard: deque[int] = deque()
    lifeline = os.pipe()  # the second end is inherited by none: `launch.orphan` notices when it is closed

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)  # no more: it may come while a child is started and not yet in the list

    previous = {number: signal.signal(number, hear) for number in _FORWARDED if not is_ignored(number)}
    try:
        for process in range(processes):
            child, printed = _start(command, {**shared, PROCESS: str(process)}, lifeline[0])
            started.append(child)
            readers += _reading(printed, process)
        code = _wait(started, heard)
    finally:
        for child in started:
            if child.poll() is None:
                child.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
        for end in lifeline:
            os.close(end)
    for reader in readers:
        reader.join(timeout=5)
    return code


def _start(
    command: Sequence[str], environ: dict[str, str], lifeline: int
) -> tuple[subprocess.Popen[bytes], tuple[int, int]]:
    """A process that hears no signal until it lets them through: `redco_cli.__main__.hear_early` does.

    A process inherits which signals are blocked, so one that comes before its handlers are set stays pending until they
    are, instead of ending it by Python's default with no word and another exit code.

    Returns:
        The process, and where to read its standard output and error.
    """
    (output, printed), (errors, complained) = os.pipe(), os.pipe()
    inherited = (lifeline, output, errors)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        child = subprocess.Popen(  # noqa: S603 - this program itself
            [sys.executable, *_PROGRAM, *command],
            env={**environ, LIFELINE: ",".join(map(str, inherited))},
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=complained,
            start_new_session=True,  # a terminal's Ctrl-C would reach them a second time
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(printed)
        os.close(complained)
    return child, (output, errors)


def _wait(children: Sequence[subprocess.Popen[bytes]], heard: deque[int]) -> int:
    """Until all have ended: by themselves, after a signal heard and passed on, or some time after the first failure."""
    code, failed_at, asked = 0, 0.0, False
    while any(child.poll() is None for child in children):
        while heard:
            number = heard.popleft()
            for child in children:
                child.send_signal(number)  # none to one that has ended
        time.sleep(_LOOK)
        failed = next((child.returncode for child in children if child.poll()), None)
        if failed is None:
            continue
        if not failed_at:
            code, failed_at = failed, time.monotonic()
        waited = time.monotonic() - failed_at
        for child in children:
            if child.poll() is None and waited > sum(_PATIENCE):
                child.kill()
            elif child.poll() is None and waited > _PATIENCE[0] and not asked:
                child.terminate()
        asked = asked or waited > _PATIENCE[0]
    code = code or next((child.returncode for child in children if child.returncode), 0)
    return code if code >= 0 else 128 - code


def _reading(printed: tuple[int, int], process: int) -> list[threading.Thread]:
    """Threads that pass on what a process prints on standard output and error."""
    pairs = zip(printed, (sys.stdout, sys.stderr), strict=True)
    threads = [threading.Thread(target=pass_on, args=(*pair, process), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def _free_port() -> int:
    """A port that is free, and the one after it too, where process 0 will listen."""
    at = listening_address("localhost")
    family = socket.AF_INET6 if ":" in at else socket.AF_INET
    while True:
        with socket.socket(family) as first, socket.socket(family) as second:
            first.bind((at, 0))
            port = int(first.getsockname()[1])
            try:
                second.bind((at, port + 1))
            except (OSError, OverflowError):
                continue
            return port
