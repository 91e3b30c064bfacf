"""Both ends of a connection between processes of a run, for tests."""

import socket
import time

from redco_cli.runtime.peers.handshake import Admission
from redco_cli.runtime.peers.wire import Wire, receive_exactly, send_all


def admit(connection: socket.socket, secret: bytes) -> Wire:
    """The server's end, as the gate makes it; waits until the other end has proved itself."""
    connection.setblocking(False)
    admission, deadline = Admission(secret), time.monotonic() + 20
    while admission.keys is None:
        data = receive_exactly(connection, admission.wanted, deadline)
        assert data is not None
        send_all(connection, admission.feed(data), deadline)
    return Wire(connection, admission.keys, is_server=True)
