"""Messages between the processes of a run: JSON over TCP, each behind its length and before its MAC. Imports no JAX.

A MAC is made with a key of this connection and direction, and covers how many messages came before: none can be forged,
repeated, left out, or sent back to where it is from. A message has a time in which the whole of it must come.

The kernel probes silent connections: a peer whose machine is gone, or cannot be reached, is noticed within a minute;
one whose process ended is noticed at once. A process says that it is alive, so that one that is frozen is noticed too.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from redco_cli.runtime.peers.messages import (
    FIRST,
    LARGEST,
    TO_PROCESS,
    TO_SERVER,
    Message,
    ProtocolError,
    decode,
    encode,
)

SILENT = "has not been heard of for {seconds:g} s: it is stopped or frozen, or its machine is"
"""What is said of a process that is there, but does not beat."""
_BEAT, _BEATS = 2.0, 5  # seconds between two, and how many may be missed
_SENDING = 60.0  # seconds in which a message must have left; the kernel gives up on a peer before
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 45_000}
_LENGTH, _MAC, _CHUNK = 4, 32, 2**18


class Wire:
    """One end of a connection whose ends have proved themselves. Any thread may send; one receives.

    Attributes:
        largest: bytes of a message that is taken; process 0 takes little before all have met.
    """

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes], *, is_server: bool) -> None:
        """Takes over a connection.

        Args:
            connection: after the handshake.
            keys: for messages to the server, and to the process.
            is_server: which of the two ends this is.
        """
        self.largest = FIRST if is_server else LARGEST
        self._socket, self._table = connection, TO_SERVER if is_server else TO_PROCESS
        self._to_here, self._from_here = keys if is_server else (keys[1], keys[0])
        self._sending = threading.Lock()
        self._sent = self._received = 0
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name):  # Linux has them all
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: Any) -> bool:
        """Sends a message; False when nobody is there any more.

        Raises:
            ProtocolError: nobody would take it.
        """
        return self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> bool:
        """Sends what `encode` made, perhaps for several."""
        with self._sending:
            tag = _mac(self._from_here, self._sent, payload)
            self._sent += 1
            try:
                send_all(self._socket, len(payload).to_bytes(_LENGTH) + payload + tag, time.monotonic() + _SENDING)
            except OSError:  # a part of it may have left: nothing that follows could be read
                self._end()
                return False
        return True

    def start_heartbeat(self) -> None:
        """From now on says every two seconds that this process is alive; in a thread."""

        def beating() -> None:
            while self.send(op="alive"):
                time.sleep(_BEAT)

        threading.Thread(target=beating, daemon=True, name="redco-beat").start()

    def receive(self, seconds: float) -> Message | None:
        """The next message; None when the other end is closed.

        Raises:
            TimeoutError: the whole of it has not come within `seconds`.
            ProtocolError: what came is none; nothing more can be read.
        """
        deadline = time.monotonic() + seconds
        header = receive_exactly(self._socket, _LENGTH, deadline)
        if header is None:
            return None
        length = int.from_bytes(header)
        if length > self.largest:
            raise ProtocolError(f"{length} bytes, where at most {self.largest} are taken")
        body = receive_exactly(self._socket, length + _MAC, deadline)
        if body is None:
            return None
        payload = body[:length]
        if not hmac.compare_digest(_mac(self._to_here, self._received, payload), body[length:]):
            raise ProtocolError("forged, repeated, or not in its place")
        self._received += 1
        return decode(payload, self._table)

    def messages(self, seconds: float) -> Iterator[Message]:
        """What comes, until the other end is closed.

        Args:
            seconds: of silence after which the other end, which beats, is taken for dead; some beats at least.

        Raises:
            TimeoutError: it is.
            ProtocolError: what came is no message.
        """
        while (message := self.receive(max(seconds, _BEATS * _BEAT))) is not None:
            yield message

    def close(self) -> None:
        """Ends the connection in both directions; a thread that receives comes back."""
        self._end()
        self._socket.close()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes | None:
    """So many bytes of a socket that does not block; None when it ends before.

    Args:
        connection: is read here only.
        count: how many bytes.
        deadline: for all of them, by `time.monotonic()`.

    Raises:
        TimeoutError: they have not come by then.
    """
    found = bytearray()
    while len(found) < count:
        try:
            _wait(connection, select.POLLIN, deadline)
            data = connection.recv(min(count - len(found), _CHUNK))
        except BlockingIOError:
            continue
        except TimeoutError as error:
            if error.errno is None:
                raise
            return None  # the kernel gave up on the peer
        except OSError:
            return None
        if not data:
            return None
        found += data
    return bytes(found)


def send_all(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Sends all of some bytes by a socket that does not block.

    Args:
        connection: is written to here only.
        data: the bytes.
        deadline: by `time.monotonic()`.

    Raises:
        OSError: nobody is there any more, or nobody takes them.
    """
    rest = memoryview(data)
    while rest:
        _wait(connection, select.POLLOUT, deadline)
        with contextlib.suppress(BlockingIOError):
            rest = rest[connection.send(rest[:_CHUNK]) :]


def _wait(connection: socket.socket, event: int, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:  # asked before the socket is: one that always has another byte would never be late
        raise TimeoutError
    descriptor = connection.fileno()
    if descriptor < 0:
        raise OSError("closed")
    poll = select.poll()
    poll.register(descriptor, event)
    poll.poll(math.ceil(min(left, 3600) * 1000))


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + payload, "sha256")
