"""Whoever comes to a port and is no process of the run: what they do there, and what passes through a connection."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

from redco_cli.runtime.peers.handshake import MAGIC

OLD_HELLO = {"op": "hello", "process": 1, "processes": 2, "at": "x", "seconds": 0.1, "facts": {}}
"""As processes said it before they had a secret; it ended the run."""
WORDS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    b'{"op":"hello"}\n',
    json.dumps(OLD_HELLO).encode() + b"\n",
    b"[" * 50_000 + b"\n",
    b"x" * 10**6,
    bytes(1000),
    b"\xff" * 1000,
    MAGIC,
    MAGIC + b"n" * 32,
    MAGIC + b"n" * 32 + b"p" * 32 + b"\0\0\0\x0e" + b'{"op":"hello"}' + b"m" * 32,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"t" * 500,
    b"",
]


class Strangers:
    """Threads that trouble a port until the context ends.

    Attributes:
        came: how often one of each kind was connected.
    """

    def __init__(self, port: int, seed: int, recorded: bytes = b"") -> None:
        """Not there yet.

        Args:
            port: where the processes meet.
            seed: of what they do.
            recorded: what an honest process said on another connection.
        """
        self.came = dict.fromkeys(("talk", "noise", "idle", "drip", "replay"), 0)
        self._port, self._dice, self._recorded = port, random.Random(seed), recorded
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in self.came]

    def __enter__(self) -> "Strangers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, kind: str) -> None:
        act: Callable[[socket.socket], None] = getattr(self, f"_{kind}")
        held: list[socket.socket] = []
        while not self._over.is_set():
            try:
                connection = socket.create_connection(("127.0.0.1", self._port), 0.5)
            except OSError:
                self._over.wait(0.02)
                continue
            self.came[kind] += 1
            held.append(connection)
            with contextlib.suppress(OSError):
                act(connection)
            self._over.wait(0.002)
            while len(held) > (300 if kind == "idle" else 0):
                held.pop(0).close()
        for connection in held:
            connection.close()

    def _talk(self, connection: socket.socket) -> None:
        connection.sendall(self._dice.choice(WORDS))
        connection.settimeout(0.05)
        connection.recv(1000)

    def _noise(self, connection: socket.socket) -> None:
        connection.sendall(MAGIC[: self._dice.randrange(len(MAGIC))] + self._dice.randbytes(self._dice.randrange(5000)))

    def _idle(self, _connection: socket.socket) -> None:
        pass

    def _drip(self, connection: socket.socket) -> None:
        for byte in MAGIC + bytes(64):
            if self._over.wait(0.05):
                return
            connection.sendall(bytes([byte]))

    def _replay(self, connection: socket.socket) -> None:
        connection.sendall(self._recorded)
        connection.settimeout(0.05)
        connection.recv(1000)


@contextlib.contextmanager
def tapped(port: int) -> Iterator[tuple[int, bytearray, bytearray]]:
    """A port that leads to another, with what passes: to that port, and back."""
    there, back = bytearray(), bytearray()
    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                record.extend(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = reach(port)
                opened.extend((near, far))
                for source, target, record in ((near, far, there), (far, near, back)):
                    threads.append(threading.Thread(target=pump, args=(source, target, record)))
                    threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield listener.getsockname()[1], there, back
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for connection in opened:
                connection.close()


def reach(port: int, seconds: float = 20) -> socket.socket:
    """A connection to a port where somebody may still be about to listen."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
