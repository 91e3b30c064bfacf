"""A server without a place for a process, or another program beside it at the port: neither ends an honest process."""

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redco_cli.errors import RedcoError
from redco_cli.runtime.peers.connection import Connection
from redco_cli.runtime.peers.handshake import HandshakeError, introduce
from redco_cli.runtime.rendezvous import server
from redco_cli.runtime.rendezvous.client import meet
from redco_cli.runtime.rendezvous.relay import open_relay
from redco_cli.runtime.stopping.signals import EarlyStop
from tests.runtime.multiprocess.processes import free_port
from tests.runtime.peers.ends import admit
from tests.runtime.rendezvous.strangers import reach
from tests.runtime.rendezvous.test_rendezvous import FACTS, SECRET, cluster, meeting


def come(process, port, seconds=10, secret=b""):
    return meet(cluster(process, 2, port), FACTS, seconds, EarlyStop(), secret)


def close(found):
    assert all(isinstance(link, Connection) for link in found), found
    for link in found:
        link.close()


def let_in(port):
    """A connection of somebody who speaks as a process does where there is no secret, and says nothing more."""
    return introduce(reach(port + 1), b"", time.monotonic() + 10)


def test_who_is_let_in_without_a_secret_and_says_nothing_makes_room():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(come, 0, port)
        idle = [let_in(port) for _ in range(2 * 2 + server._SPARE + 5)]
        assert idle[0].receive(5) is None  # the one that has been there longest
        began = time.monotonic()
        close([pool.submit(come, 1, port).result(), first.result()])
    assert time.monotonic() - began < 3
    for wire in idle:
        wire.close()


def test_a_process_comes_again_where_the_server_is_full(monkeypatch):
    monkeypatch.setattr(server, "_SPARE", -4)  # nobody has a place, process 0 neither
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(come, process, port) for process in range(2)]
        time.sleep(0.7)
        assert not any(one.done() for one in found)
        monkeypatch.setattr(server, "_SPARE", 16)
        close([one.result() for one in found])


def test_a_process_comes_again_where_the_server_has_no_thread(monkeypatch):
    class Poor:
        """`threading`, where the first two threads cannot be started."""

        refused = 0

        def __getattr__(self, name):
            return getattr(threading, name)

        def Thread(self, **given):
            if self.refused < 2:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            return threading.Thread(**given)

    monkeypatch.setattr(server, "threading", poor := Poor())
    port = free_port()
    found, _ = meeting([cluster(process, 2, port) for process in range(2)], seconds=10)
    assert poor.refused == 2
    close(found)


@contextlib.contextmanager
def served(act):
    """The port before one where somebody does something with each connection that has proved itself."""
    listener, wires = socket.create_server(("127.0.0.1", 0)), []

    def serve():
        with contextlib.suppress(OSError):
            while not wires or act(wires[-1], listener):
                wires.append(admit(listener.accept()[0], SECRET))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1] - 1
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (listener, *wires):
            connection.close()


def closes(wire, _listener):
    wire.receive(5)
    wire.close()
    return True


def ends(wire, listener):
    wire.receive(5)
    listener.close()
    wire.close()


def babbles(wire, _listener):
    wire.receive(5)
    wire.send_encoded(b"nonsense")


@pytest.mark.parametrize(
    ("act", "least", "how"),
    [
        (closes, 1.0, "closed the connection, or is not redco"),  # until the time is over
        (ends, 0.0, "closed the connection, and is there no more"),
        (babbles, 0.0, "closed the connection, or is not redco"),
    ],
)
def test_a_process_comes_again_only_as_long_as_that_may_help(act, least, how):
    began, seconds = time.monotonic(), 1.0 if act is closes else 30.0
    with served(act) as port, pytest.raises(RedcoError, match=f"what listens at localhost:{port + 1} {how}"):
        come(1, port, seconds, SECRET)
    assert least <= time.monotonic() - began < 10


@pytest.fixture
def both_families(monkeypatch):
    """`localhost` leads to `::1` first, where others listen; gives what opens a port there."""
    resolve = socket.getaddrinfo

    def resolved(host, port, *args, **named):
        if host == "localhost":
            return resolve("::1", port, *args, **named) + resolve("127.0.0.1", port, *args, **named)
        return resolve(host, port, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with contextlib.ExitStack() as opened:

        def listen(port):
            try:
                return opened.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6))
            except OSError:
                pytest.skip("no ::1 on this machine")

        yield listen


def test_what_else_listens_at_the_port_disturbs_nobody(both_families):
    port = free_port()
    both_families(port + 1)  # silent
    found, seconds = meeting([cluster(process, 2, port) for process in range(2)], seconds=20)
    close(found)
    assert seconds < 5


def test_nor_does_it_the_relay(both_families):
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        other = both_families(coordinator.getsockname()[1])
        host, _, port = open_relay("localhost", coordinator.getsockname()[1]).rpartition(":")
        coordinator.settimeout(5)
        with socket.create_connection((host, int(port)), 5) as near, coordinator.accept()[0] as far:
            far.sendall(b"right")
            assert near.recv(5) == b"right"
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.slow
def test_processes_without_a_secret_meet_in_a_crowd_that_is_let_in():
    """Trials with random offsets: the crowd comes without pause, and says nothing more."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"{seed=}")  # shown when it fails
    dice = random.Random(seed)
    for _ in range(20):
        port, over = free_port(), threading.Event()

        def crowd(port=port, over=over):
            held = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port + 1), 1)
                    try:
                        held.append(introduce(connection, b"", time.monotonic() + 1))
                    except (OSError, HandshakeError):
                        connection.close()
                while len(held) > 60:
                    held.pop(0).close()
                over.wait(0.001)
            for wire in held:
                wire.close()

        threads = [threading.Thread(target=crowd) for _ in range(3)]
        for thread in threads:
            thread.start()
        late = [dice.random() * 2 for _ in range(2)]

        def after(process, late=late, port=port):
            time.sleep(late[process])
            return come(process, port, 30)

        try:
            with ThreadPoolExecutor(2) as pool:
                close(list(pool.map(after, range(2))))
        finally:
            over.set()
            for thread in threads:
                thread.join()
