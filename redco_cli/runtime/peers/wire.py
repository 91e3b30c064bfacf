"""Messages between the processes of a run: JSON lines over TCP. Imports no JAX.

The kernel probes silent connections: a peer whose machine is gone, or cannot be reached, is noticed within a minute;
one whose process ended is noticed at once. A process says that it is alive, so that one that is frozen is noticed too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
SILENT = "has not been heard of for {seconds:g} s: it is stopped or frozen, or its machine is"
"""What is said of a process that is there, but does not beat."""
LARGEST = 2**20
"""Bytes of a message: whatever sends more is no process of redco."""
_BEAT, _BEATS = 2.0, 5  # seconds between two, and how many may be missed
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 45_000}


class Wire:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._sending = threading.Lock()
        self._receiving = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):  # Linux has them all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: Any) -> bool:
        """Sends a message; False when nobody is there any more."""
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return False
        return True

    def start_heartbeat(self) -> None:
        """From now on says every two seconds that this process is alive; in a thread."""

        def beating() -> None:
            while self.send(op="alive"):
                time.sleep(_BEAT)

        threading.Thread(target=beating, daemon=True, name="redco-beat").start()

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None when the other end is closed, or speaks something else.

        Raises:
            TimeoutError: none came within `seconds`.
        """
        self._socket.settimeout(seconds)
        try:
            message = json.loads(self._file.readline(LARGEST) or b"null")
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
        return message if isinstance(message, dict) else None

    def messages(self, seconds: float) -> Iterator[Message]:
        """What comes, until the other end is closed.

        Args:
            seconds: of silence after which the other end, which beats, is taken for dead; some beats at least.

        Raises:
            TimeoutError: it is.
        """
        self._receiving = True
        try:
            while (message := self.receive(max(seconds, _BEATS * _BEAT))) is not None:
                yield message
        finally:
            self._file.close()

    def close(self) -> None:
        """Ends the connection in both directions; a thread that receives comes back."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if not self._receiving:
            self._file.close()
