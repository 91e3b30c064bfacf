"""The port at which process 0 listens: who proves to know the secret comes in, all others cost little and end soon.

One thread serves all who have not proved themselves, and waits for none of them. There are only so many of them at a
time, each for seconds: when another comes, the one that has been here longest goes. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from redco_cli.runtime.peers.handshake import Admission, HandshakeError, OtherSecretError
from redco_cli.runtime.peers.wire import Wire

_SECONDS = 5.0  # in which one that has come must have proved itself
_WAITING = 64  # that have not, besides two for each process
_AT_ONCE = 32  # accepted between two looks at those that are there
_TICK, _PAUSE = 0.2, 0.1


@dataclass
class _Arrival:
    """A connection that has not proved itself."""

    connection: socket.socket
    admission: Admission
    deadline: float


class Gate:
    """Listens, in a thread that ends with the process.

    Attributes:
        turned_away: how many had another secret.
    """

    def __init__(self, listener: socket.socket, secret: bytes, processes: int, enter: Callable[[Wire], None]) -> None:
        """Lets nobody in yet.

        Args:
            listener: bound.
            secret: of the run; empty for none.
            processes: how many are to come.
            enter: takes each that has proved itself, and does not wait.
        """
        self.turned_away = 0
        self._listener, self._secret, self._enter = listener, secret, enter
        self._most = _WAITING + 2 * processes
        self._waiting: dict[socket.socket, _Arrival] = {}  # the one that has been here longest comes first
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def open(self) -> None:
        """Begins to let in."""
        threading.Thread(target=self._run, daemon=True, name="redco-gate").start()

    def close(self) -> None:
        """Soon listens no more."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._look()
            except OSError:  # nothing ends it but `close`
                time.sleep(_PAUSE)
        for arrival in list(self._waiting.values()):
            self._drop(arrival)
        self._selector.close()
        self._listener.close()

    def _look(self) -> None:
        """Whoever says something, then whoever comes, then whoever has been here too long."""
        is_called = False
        for key, _ in self._selector.select(_TICK):
            if key.fileobj is self._listener:
                is_called = True
            elif isinstance(key.data, _Arrival):
                self._hear(key.data)
        if is_called:
            self._accept()
        now = time.monotonic()
        for arrival in list(self._waiting.values()):
            if arrival.deadline > now:
                break
            self._drop(arrival)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left, or no memory: there will be again
                self._make_room(max(len(self._waiting) // 2, 1))
                return
            if len(self._waiting) >= self._most:
                self._make_room(1)
            connection.setblocking(False)
            arrival = _Arrival(connection, Admission(self._secret), time.monotonic() + _SECONDS)
            self._waiting[connection] = arrival
            self._selector.register(connection, selectors.EVENT_READ, arrival)

    def _hear(self, arrival: _Arrival) -> None:
        """What comes of one of them: all that it says fits into the buffers of the kernel, and so does the answer."""
        try:
            data = arrival.connection.recv(arrival.admission.wanted)
            if not data:
                raise HandshakeError("it closed the connection")
            answer = arrival.admission.feed(data)
            if answer:
                arrival.connection.send(answer)
        except BlockingIOError:
            return
        except OtherSecretError as refused:
            self.turned_away += 1
            with contextlib.suppress(OSError):
                arrival.connection.send(refused.args[0])
            self._drop(arrival)
            return
        except (OSError, HandshakeError):
            self._drop(arrival)
            return
        if arrival.admission.keys is not None:
            self._forget(arrival)
            try:
                wire = Wire(arrival.connection, arrival.admission.keys, is_server=True)
            except OSError:  # gone already
                arrival.connection.close()
            else:
                self._enter(wire)

    def _forget(self, arrival: _Arrival) -> None:
        with contextlib.suppress(KeyError):  # not there where registering failed
            self._selector.unregister(arrival.connection)
        del self._waiting[arrival.connection]

    def _drop(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        arrival.connection.close()

    def _make_room(self, count: int) -> None:
        """So many of those that have been here longest go; where there is none, others must end what they hold."""
        if not self._waiting:
            time.sleep(_PAUSE)
        for arrival in list(self._waiting.values())[:count]:
            self._drop(arrival)
