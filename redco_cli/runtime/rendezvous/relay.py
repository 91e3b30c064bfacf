"""A relay to the coordinator of JAX, which ends a process by a stack trace when the coordinator's connection closes.

JAX's client connects to the relay, on this machine, and the relay to the coordinator. When the coordinator is gone the
client's connection stays open, silent: until JAX's heartbeat misses it, after minutes, there is time to say what
happened and to end properly. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from redco_cli.runtime.peers.addresses import reached_address

_CHUNK = 2**16
_PAUSE = 0.1  # seconds


def open_relay(host: str, port: int) -> str:
    """Relays connections to `host:port`, in threads that end with the process; returns the address to connect to."""
    listener, coordinator = socket.create_server(("127.0.0.1", 0)), (reached_address(host), port)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:  # no descriptor is left: there will be again
                time.sleep(_PAUSE)
                continue
            try:
                far = socket.create_connection(coordinator, 10)
            except OSError:  # not up yet: JAX tries again
                near.close()
                continue
            far.settimeout(None)
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=_pump, args=(far, near, False), daemon=True).start()

    threading.Thread(target=accept, daemon=True, name="redco-relay").start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _pump(source: socket.socket, target: socket.socket, tell_the_end: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    if tell_the_end:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
