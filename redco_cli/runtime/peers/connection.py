"""What a process has of the others once all have met: values gathered, a stop agreed on, and who is gone.

It stays beside JAX's own connections for the whole run, since those notice a dead process only after minutes, or end
the program with a stack trace. Imports no JAX.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redco_cli.errors import EXIT_FAILED, RedcoError
from redco_cli.runtime.peers.messages import LARGEST, Message, ProtocolError, encode, readable
from redco_cli.runtime.peers.wire import SILENT, Wire

_GRACE = 1.5  # seconds in which this process may end by itself, with a reason of its own


@dataclass(frozen=True)
class PeerFailure:
    """Why this run cannot go on: another process left, or is gone.

    Attributes:
        reason: for a person.
        exit_code: which this process ends with, too.
        is_said: whether that process said so: then this one may be about to come to the same by itself.
    """

    reason: str
    exit_code: int = EXIT_FAILED
    is_said: bool = False

    def error(self) -> RedcoError:
        """The reason as an error."""
        error = RedcoError("processes", self.reason, "look at what that process printed; the same command continues")
        error.exit_code = self.exit_code
        return error


class Connection:
    """The connection of this process to the rendezvous server, which process 0 runs.

    Attributes:
        process: which one this is.
        processes: how many there are.
        failure: why the run cannot go on; None while it can.
        frozen: the exit code that all were asked to stop with; None before.
        stop_at: the point at which all stop; None before it is agreed on.
        on_freeze: called with exit code and asking process; returns the first point that is not passed.
        on_stop: called with the point at which to stop.
    """

    def __init__(self, wire: Wire, process: int, processes: int, coordinator: str, patience: float) -> None:
        """Does not listen yet.

        Args:
            wire: connected to the server, which has let everyone go.
            process: which one this is.
            processes: how many there are.
            coordinator: where process 0 is, for errors.
            patience: seconds of silence after which it is taken for dead.
        """
        self.process, self.processes = process, processes
        self.failure: PeerFailure | None = None
        self.frozen: int | None = None
        self.stop_at: int | None = None
        self.on_freeze: Callable[[int, int], int] = lambda _code, _process: 0
        self.on_stop: Callable[[int], None] = lambda _point: None
        self._wire, self._coordinator, self._patience = wire, coordinator, patience
        self._changed = threading.Condition()
        self._gathered: dict[str, list[Any]] = {}
        self._calls: Counter[str] = Counter()
        self._leaving, self._heard = threading.Event(), threading.Event()

    def listen(self, give_up: Callable[[PeerFailure], None]) -> None:
        """Begins to listen, in a thread.

        Args:
            give_up: called when the run cannot go on and this process does not end by itself.
        """
        threading.Thread(target=self._listen, args=(give_up,), daemon=True, name="redco-connection").start()

    def gather(self, name: str, value: Any) -> list[Any]:
        """The value of every process, in their order. All must call it; the n-th calls with one name belong together.

        Args:
            name: what is gathered; calls in different threads need different names.
            value: JSON-able.

        Raises:
            RedcoError: a process is gone; or the value is too large to be sent to all, too deep, or has a number that
                is not finite.
        """
        self._check(name, value)
        with self._changed:
            number = self._calls[name]
            self._calls[name] += 1
        key = f"{name} {number}"
        self._wire.send(op="gather", name=key, value=value)  # where nobody is there, `_listen` finds out
        with self._changed:
            self._changed.wait_for(lambda: key in self._gathered or self.failure is not None)
            if key not in self._gathered:
                assert self.failure is not None
                raise self.failure.error()
            return self._gathered.pop(key)

    def _check(self, name: str, value: Any) -> None:
        """Refuses here what would be refused when the values of all are sent to each."""
        most, where = LARGEST // self.processes - 1024, f"the value of process {self.process} for {name!r}"
        try:
            size = len(encode({"values": [value]}))
        except ProtocolError as error:
            raise RedcoError("processes", f"{where} cannot be sent: {error}", "this is a defect of redco") from None
        if size > most:
            problem = f"{where} has {size} bytes; all together may have {LARGEST}, each of {self.processes} {most}"
            raise RedcoError("processes", problem, "use fewer processes")

    def request_stop(self, code: int) -> None:
        """Asks all processes to agree on where to stop; only the first of all requests counts."""
        self._wire.send(op="stop", code=code)

    def wait_for_failure(self, seconds: float) -> PeerFailure | None:
        """Why the run cannot go on, if that becomes known in so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
            return self.failure

    def leave(self, *, peaceful: bool, code: int = 0, reason: str = "") -> None:
        """Says good-bye: from now on, what happens to the others does not matter here.

        Args:
            peaceful: everyone leaves; else the others cannot go on.
            code: the exit code, which those who cannot go on take over.
            reason: why, for their users.
        """
        self._leaving.set()
        if self._wire.send(op="leave", peaceful=peaceful, code=code, reason=readable(reason)):
            self._heard.wait(_GRACE)  # process 0 must not end before it has told the others

    def close(self) -> None:
        """Ends the connection."""
        self._leaving.set()
        self._wire.close()

    def _listen(self, give_up: Callable[[PeerFailure], None]) -> None:
        end = None
        try:
            for message in self._wire.messages(self._patience):
                end = self._handle(message)
                if end is not None:
                    break
        except TimeoutError:
            end = PeerFailure(f"process 0 {SILENT.format(seconds=self._patience)}")
        except ProtocolError as error:
            end = PeerFailure(f"process 0 sent what is no message of redco: {error}")
        end = end or PeerFailure(f"process 0 is gone: its connection {self._coordinator} ended")
        self._heard.set()
        with self._changed:
            self.failure = end
            self._changed.notify_all()
        if not self._leaving.wait(_GRACE if end.is_said else 0):
            give_up(end)

    def _handle(self, message: Message) -> PeerFailure | None:
        op = message["op"]
        if op == "gathered":
            with self._changed:
                self._gathered[message["name"]] = message["values"]
                self._changed.notify_all()
        elif op == "freeze":
            self.frozen = message["code"]
            self._wire.send(op="frozen", point=self.on_freeze(message["code"], message["process"]))
        elif op == "stop_at":
            self.stop_at = message["point"]
            self.on_stop(message["point"])
        elif op == "lost":
            return PeerFailure(message["reason"])
        elif op == "left" and message["peaceful"]:
            self._leaving.set()  # all have come to the end
            if message["process"] == self.process:
                self._heard.set()
        elif op == "left" and message["process"] == self.process:
            self._heard.set()
        elif op == "left":
            return PeerFailure(
                f"process {message['process']} ended: {message['reason']}", message["code"], is_said=True
            )
        return None
