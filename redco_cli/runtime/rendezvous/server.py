"""Process 0's side of the meeting of all processes: who has come, whether they agree, and messages among them.

Everyone, process 0 included, connects to the server and says who it is. When all are there and agree, the server lets
them go, and stays: it gathers values, leads the agreement on where to stop (see `stopping.signals`), and tells
everybody when one has left or is gone. When they disagree, or some are missing at the end of the time, it tells
everyone why, and whoever else comes while process 0 is there. Imports no JAX.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redco_cli.runtime.peers.messages import LARGEST, MOST_SECONDS, Message, ProtocolError, encode, readable
from redco_cli.runtime.peers.wire import SILENT, Wire
from redco_cli.runtime.rendezvous import refusals
from redco_cli.runtime.rendezvous.gate import Gate
from redco_cli.runtime.rendezvous.refusals import Refusal

_LINGER = 10.0  # seconds in which those still to come may hear of a refusal
_HELLO = 10.0  # seconds in which one that was let in must say who it is
_COMPARING = 30.0  # seconds in which those that differ say in what
_SPARE = 16  # connections that are served, besides two for each process
_OPEN = 1000  # gathers that are begun, and lack a process


class RendezvousServer:
    """Serves, in threads that end with the process."""

    def __init__(
        self, listener: socket.socket, processes: int, seconds: float, secret: bytes, table: Mapping[str, str]
    ) -> None:
        """Begins to listen.

        Args:
            listener: bound.
            processes: how many are to come.
            seconds: in which they must have come.
            secret: of the run; empty for none.
            table: the facts of process 0; see `facts.Digests`.
        """
        self._processes, self._seconds, self._table = processes, seconds, table
        self._lock, self._counting = threading.RLock(), threading.Lock()
        self._come: list[tuple[Message, Wire]] = []
        self._served: dict[Wire, bool] = {}  # whether each has said hello; the one served longest comes first
        self._decided = self._is_released = False
        self._found: Refusal | None = None
        self._asked: list[int] = []
        self._differing: dict[int, tuple[int, Sequence[str], int]] = {}
        self._unheard: set[int] = set()
        self._gathering: dict[str, dict[int, Any]] = {}
        self._frozen: dict[int, int] | None = None
        self._gone: set[int] = set()
        self._deadline = math.inf
        self._gate = Gate(listener, secret, processes, self._enter)
        self._hurry(min(seconds, MOST_SECONDS))
        self._gate.open()

    def _enter(self, wire: Wire) -> None:
        """Serves one that has proved itself, in a thread; one that goes without an answer comes again.

        Without a secret everyone proves itself: who says nothing, and has been here longest, makes room.
        """
        with self._counting:
            goes = None
            if len(self._served) >= 2 * self._processes + _SPARE:
                goes = next((one for one, has_said in self._served.items() if not has_said), wire)
                self._served.pop(goes, None)
            if goes is not wire:
                self._served[wire] = False
        if goes is not None:
            goes.close()
        if goes is wire:
            return
        try:
            threading.Thread(target=self._serve, args=(wire,), daemon=True).start()
        except RuntimeError:  # no thread is to be had
            self._leave(wire)

    def _leave(self, wire: Wire) -> None:
        wire.close()
        with self._counting:
            self._served.pop(wire, None)

    def _serve(self, wire: Wire) -> None:
        """One process, from its first word to the end of its connection."""
        try:
            hello = wire.receive(_HELLO)
        except (TimeoutError, ProtocolError):
            hello = None
        is_one = hello is not None and hello["op"] == "hello" and hello["process"] < hello["processes"]
        with self._counting:
            is_one = is_one and wire in self._served  # else it has made room
            if is_one:
                self._served[wire] = True
        if hello is not None and is_one and self._is_welcome(hello, wire):
            how = self._attend(hello, wire)
            self._part(hello, wire, how)
        self._leave(wire)

    def _is_welcome(self, hello: Message, wire: Wire) -> bool:
        with self._lock:
            waits = self._found is not None and hello["process"] == 0 and not self._is_released
            if self._decided and not waits:
                self._tell_why_not(wire)
                self._unheard.discard(hello["process"])
                if self._found is not None and not self._unheard:
                    self._release()
                return False
            self._come.append((hello, wire))
            self._hurry(hello["seconds"])
            self._decide()
            return True

    def _attend(self, hello: Message, wire: Wire) -> str:
        """Hears one until the end; returns what is to be said of that."""
        try:
            for message in wire.messages(self._seconds):
                with self._lock:
                    self._handle(hello, message)
        except TimeoutError:
            return SILENT.format(seconds=self._seconds)
        except ProtocolError as error:
            return f"sent what is no message of redco: {error}"
        return "is gone: it was killed, or crashed"

    def _part(self, hello: Message, wire: Wire, how: str) -> None:
        with self._lock:
            if not self._decided:
                self._come.remove((hello, wire))
                if hello["process"] in self._asked:
                    self._differing.setdefault(hello["process"], (hello["process"], (), 0))
                    self._decide()
            elif hello["process"] not in self._gone:
                self._gone.add(hello["process"])
                self._tell_all(op="lost", reason=readable(f"process {hello['process']} ({hello['at']}) {how}"))

    def _hurry(self, seconds: float) -> None:
        """Decides in so many seconds, or before: the first to come waits no longer than it was told to."""
        deadline = time.monotonic() + seconds
        if deadline < self._deadline and not self._decided:
            self._deadline = deadline
            self._later(seconds, self._decide, late=True)

    @staticmethod
    def _later(seconds: float, call: Any, **named: Any) -> None:
        timer = threading.Timer(seconds, call, kwargs=named)
        timer.daemon = True
        timer.start()

    def _decide(self, late: bool = False) -> None:
        """Lets everyone go, or tells why not, as soon as it is known."""
        with self._lock:
            if self._decided:
                return
            hellos = [hello for hello, _ in self._come]
            found = refusals.stopped(hellos) or refusals.contradiction(hellos, self._processes)
            missing = self._missing()
            if found is None and late and missing:
                found = refusals.missing(missing, self._processes, self._seconds, self._gate.turned_away)
            apart = self._asked or ([] if found or missing else refusals.apart(hellos))
            if apart and found is None:
                self._compare(apart)
                if late or all(process in self._differing for process in apart):
                    found = refusals.difference([self._differing.get(process, (process, (), 0)) for process in apart])
            if found is not None:
                self._refuse(found, missing)
            elif not missing and not apart:
                self._begin()

    def _begin(self) -> None:
        self._decided = True
        self._gate.close()
        self._come.sort(key=lambda one: int(one[0]["process"]))
        for _, wire in self._come:
            wire.largest = LARGEST
        self._tell_all(op="go")
        for _, wire in self._come:
            wire.start_heartbeat()

    def _compare(self, apart: Sequence[int]) -> None:
        """Asks those that differ from process 0 in what, by its table."""
        if self._asked:
            return
        self._asked = list(apart)
        self._hurry(_COMPARING)
        try:
            payload = encode({"op": "compare", "facts": dict(self._table)})
        except ProtocolError:  # so many keys that none can be named
            self._differing = {process: (process, (), 0) for process in apart}
            return
        for hello, wire in self._come:
            if hello["process"] in apart:  # apart from the lock: it may be long, and nobody there to take it
                threading.Thread(target=wire.send_encoded, args=(payload,), daemon=True).start()

    def _refuse(self, found: Refusal, missing: Sequence[int]) -> None:
        """Tells all why not; process 0 last, so that it is there for those still to come."""
        self._decided, self._found = True, found
        self._gone = set(range(self._processes))
        self._unheard = set(missing) - {0}
        for hello, wire in self._come:
            if hello["process"] != 0:
                self._tell_why_not(wire)
        if self._unheard:
            self._later(min(_LINGER, self._seconds / 2), self._release)
        else:
            self._release()

    def _release(self) -> None:
        """Lets process 0 end, and the server with it."""
        with self._lock:
            if not self._is_released:
                self._is_released = True
                for hello, wire in self._come:
                    if hello["process"] == 0:
                        self._tell_why_not(wire)
                self._later(_LINGER, self._gate.close)

    def _tell_why_not(self, wire: Wire) -> None:
        found = self._found or refusals.TOO_LATE
        wire.send(op="refused", **{**asdict(found), "problem": readable(found.problem)})

    def _missing(self) -> list[int]:
        come = {hello["process"] for hello, _ in self._come}
        return [process for process in range(self._processes) if process not in come]

    def _tell_all(self, **message: Any) -> None:
        payload = encode(message)
        for _, wire in reversed(self._come):  # process 0, which may end when it has heard, last
            wire.send_encoded(payload)

    def _handle(self, hello: Message, message: Message) -> None:
        """One message, by what it asks for.

        Raises:
            ProtocolError: it does not belong here.
        """
        op, process = message["op"], int(hello["process"])
        if op == "alive" or self._found is not None:
            return
        if op == "leave" and not self._decided:
            hello.update(stopped=message["reason"], code=message["code"])
            self._decide()
        elif op == "differs" and process in self._asked:
            self._differing[process] = (process, message["keys"], message["more"])
            self._decide()
        elif op == "leave":
            self._gone.add(process)
            self._tell_all(**{**message, "op": "left", "process": process})
        elif not self._decided or op in ("hello", "differs"):
            raise ProtocolError(f"{op}, which does not belong here")
        elif op == "gather":
            self._gather(process, message["name"], message["value"])
        elif op == "stop" and self._frozen is None:
            self._frozen = {}
            self._tell_all(op="freeze", code=message["code"], process=process)
        elif op == "frozen" and self._frozen is not None:
            self._frozen[process] = message["point"]
            if len(self._frozen) == self._processes:
                self._tell_all(op="stop_at", point=max(self._frozen.values()))

    def _gather(self, process: int, name: str, value: Any) -> None:
        if len(self._gathering) >= _OPEN and name not in self._gathering:
            raise ProtocolError(f"the beginning of more than {_OPEN} values to gather")
        values = self._gathering.setdefault(name, {})
        values[process] = value
        if len(values) == self._processes:
            del self._gathering[name]
            self._tell_all(op="gathered", name=name, values=[values[p] for p in sorted(values)])
