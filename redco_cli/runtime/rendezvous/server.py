"""Process 0's side of the meeting of all processes: who has come, whether they agree, and messages among them.

Everyone, process 0 included, connects to the server and says who it is. When all are there and agree, the server lets
them go, and stays: it gathers values, leads the agreement on where to stop (see `stopping.signals`), and tells
everybody when one has left or is gone. When they disagree, or some are missing at the end of the time, it tells
everyone why. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redco_cli.errors import EXIT_FAILED
from redco_cli.runtime.peers.wire import SILENT, Message, Wire

_LINGER = 10.0  # seconds in which those still to come may hear of a contradiction that is already known
_SHOWN = 3


@dataclass(frozen=True)
class Refusal:
    """Why the processes cannot begin, what to do about it, and the exit code of each."""

    problem: str
    remedy: str
    code: int = EXIT_FAILED


class RendezvousServer:
    """Listens, in threads that end with the process."""

    def __init__(self, listener: socket.socket, processes: int, seconds: float) -> None:
        """Begins to listen.

        Args:
            listener: bound.
            processes: how many are to come.
            seconds: in which they must have come.
        """
        self._listener, self._processes, self._seconds = listener, processes, seconds
        self._lock = threading.RLock()
        self._come: list[tuple[Message, Wire]] = []
        self._decided = False
        self._found: Refusal | None = None
        self._gathering: dict[str, dict[int, Any]] = {}
        self._frozen: dict[int, int] | None = None
        self._gone: set[int] = set()
        self._deadline = math.inf
        self._hurry(seconds)
        threading.Thread(target=self._accept, daemon=True, name="redco-rendezvous").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Wire(connection),), daemon=True).start()

    def _serve(self, wire: Wire) -> None:
        """One process, from its first word to the end of its connection."""
        try:
            hello = wire.receive(10)
        except TimeoutError:
            hello = None
        if hello is None or hello.get("op") != "hello":
            wire.close()
            return
        with self._lock:
            if self._decided:
                late = Refusal(
                    "the run has begun, or given up, without this process", "was one started twice? give each its id"
                )
                wire.send(op="refused", **asdict(late))
                wire.close()
                return
            self._come.append((hello, wire))
            self._hurry(float(hello["seconds"]))
            self._decide()
        how = "is gone: it was killed, or crashed"
        try:
            for message in wire.messages(self._seconds):
                with self._lock:
                    self._handle(hello, message)
        except TimeoutError:
            how = SILENT.format(seconds=self._seconds)
        with self._lock:
            if not self._decided:
                self._come.remove((hello, wire))
            elif hello["process"] not in self._gone:
                self._gone.add(hello["process"])
                self._tell_all(op="lost", reason=f"process {hello['process']} ({hello['at']}) {how}")
        wire.close()

    def _hurry(self, seconds: float) -> None:
        """Decides in so many seconds, or before: the first to come waits no longer than it was told to."""
        deadline = time.monotonic() + seconds
        if deadline < self._deadline and not self._decided:
            self._deadline = deadline
            timer = threading.Timer(seconds, self._decide, kwargs={"late": True})
            timer.daemon = True
            timer.start()

    def _decide(self, late: bool = False) -> None:
        """Lets everyone go, or tells why not, as soon as it is known."""
        with self._lock:
            if self._decided:
                return
            hellos = [hello for hello, _ in self._come]
            # One who has said why, and gone, is in the way all the same: others may have left for it.
            found = self._found = self._found or stopped(hellos) or contradiction(hellos, self._processes)
            missing, starts = self._missing(), {(hello["process"], hello["at"]) for hello in hellos}
            if late and found is None:
                names = ", ".join(map(str, missing))
                found = Refusal(
                    f"process{'es' if len(missing) > 1 else ''} {names} of {self._processes} did not connect within "
                    f"{self._seconds:g} s",
                    "look at what these print, or whether they were started; REDCO_TIMEOUT=SECONDS waits longer",
                )
            if found is None and not missing:
                self._end()
                self._tell_all(op="go")
                for _, wire in self._come:
                    wire.start_heartbeat()
            elif found is not None and (late or len(starts) >= self._processes):
                self._end()
                self._gone = set(range(self._processes))
                self._tell_all(op="refused", **asdict(found))
            elif found is not None:
                self._hurry(min(_LINGER, self._seconds / 2))

    def _end(self) -> None:
        """Nobody else is let in."""
        self._decided = True
        self._come.sort(key=lambda one: int(one[0]["process"]))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _missing(self) -> list[int]:
        come = {hello["process"] for hello, _ in self._come}
        return [process for process in range(self._processes) if process not in come]

    def _tell_all(self, **message: Any) -> None:
        for _, wire in reversed(self._come):  # process 0, which may end when it has heard, last
            wire.send(**message)

    def _handle(self, hello: Message, message: Message) -> None:
        op, process = message.get("op"), int(hello["process"])
        if op == "gather":
            values = self._gathering.setdefault(message["name"], {})
            values[process] = message["value"]
            if len(values) == self._processes:
                del self._gathering[message["name"]]
                self._tell_all(op="gathered", name=message["name"], values=[values[p] for p in sorted(values)])
        elif op == "stop" and self._frozen is None:
            self._frozen = {}
            self._tell_all(op="freeze", code=message["code"], process=process)
        elif op == "frozen" and self._frozen is not None:
            self._frozen[process] = message["point"]
            if len(self._frozen) == self._processes:
                self._tell_all(op="stop_at", point=max(self._frozen.values()))
        elif op == "leave" and not self._decided:
            hello["stopped"] = message
            self._decide()
        elif op == "leave":
            self._gone.add(process)
            self._tell_all(**{**message, "op": "left", "process": process})


def stopped(hellos: Sequence[Message]) -> Refusal | None:
    """That one was asked to stop before all had come; None when none was."""
    for hello in hellos:
        if "stopped" in hello:
            reason, code = hello["stopped"]["reason"], hello["stopped"]["code"]
            problem = f"process {hello['process']} ({hello['at']}) ended before all had connected: {reason}"
            return Refusal(problem, "run the same command to continue", code)
    return None


def contradiction(hellos: Sequence[Message], processes: int) -> Refusal | None:
    """What those who have come disagree about; None when they agree.

    Args:
        hellos: what each said.
        processes: how many process 0 expects.
    """
    seen: dict[int, Message] = {}
    for hello in hellos:
        process = hello["process"]
        if hello["processes"] != processes:
            problem = f"process {process} ({hello['at']}) is one of {hello['processes']} processes, process 0 one of "
            return Refusal(f"{problem}{processes}", "start all processes with the same count")
        if process in seen:
            problem = f"process {process} was started twice: {seen[process]['at']} and {hello['at']}"
            return Refusal(problem, f"give each process its own id, from 0 to {processes - 1}")
        seen[process] = hello
    if len(seen) < processes:
        return None
    first = seen[0]
    wrong = [
        f"{name} is {_text(first['facts'].get(name))} on process 0, but {_text(hello['facts'].get(name))} on process "
        f"{process}"
        for process, hello in sorted(seen.items())
        for name in _differing(first["facts"], hello["facts"])
    ]
    if not wrong:
        return None
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    remedy = "start all with one recipe and one installation"
    return Refusal(f"the processes differ: {', '.join(wrong[:_SHOWN])}{more}", remedy)


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The facts that are not the same; what one of them does not know is no difference."""
    unknown = {name for facts in (first, other) for name, value in facts.items() if name == "devices" and value is None}
    return [name for name in {**first, **other} if name not in unknown and first.get(name) != other.get(name)]


def _text(value: object) -> str:
    return "not there" if value is None else f"{value:.40}" if isinstance(value, str) else str(value)
