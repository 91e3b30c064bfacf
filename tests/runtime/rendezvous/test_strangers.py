"""Whoever comes to the port of a meeting and does not belong to it disturbs nobody, and learns nothing."""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redco_cli.errors import RedcoError
from redco_cli.runtime.peers.connection import Connection
from redco_cli.runtime.peers.handshake import MAGIC, introduce
from redco_cli.runtime.peers.messages import LARGEST
from redco_cli.runtime.rendezvous import gate, server
from redco_cli.runtime.rendezvous.client import meet
from redco_cli.runtime.stopping.signals import EarlyStop
from tests.runtime.multiprocess.processes import free_port
from tests.runtime.rendezvous.strangers import WORDS, Strangers, reach, tapped
from tests.runtime.rendezvous.test_rendezvous import FACTS, SECRET, cluster, hello, meeting


def close(found):
    assert all(isinstance(link, Connection) for link in found), found
    for link in found:
        link.close()


def overheard():
    """All that an honest process says until it has met another."""
    port = free_port()
    with tapped(port + 1) as (way, there, _):
        found, _ = meeting([cluster(0, 2, port), cluster(1, 2, way - 1)])
        close(found)
    assert there.startswith(MAGIC)
    return bytes(there)


def all_of(connection):
    """What comes until the other end closes, or resets, a connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1000):
            found += data
    return found


def gathering(found):
    """Whether processes that have met can gather a value."""
    for link in found:
        link.listen(lambda _end: None)
    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(lambda link: link.gather("x", link.process), found))


def test_processes_meet_whoever_else_comes():
    seed = random.SystemRandom().randrange(10**6)
    port, recorded = free_port(), overheard()
    with Strangers(port + 1, seed, recorded) as strangers:
        found, seconds = meeting([cluster(process, 3, port) for process in range(3)], late={0: 0.1, 2: 1.5}, seconds=20)
        values = gathering(found)
    close(found)
    assert values == [[0, 1, 2]] * 3
    assert seconds < 10, seed
    assert min(strangers.came.values()) > 1, strangers.came


def test_what_one_said_on_another_connection_is_worth_nothing_here():
    port, recorded = free_port(), overheard()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meeting, [cluster(0, 2, port)], 0.4)
        with reach(port + 1) as replaying:
            replaying.sendall(recorded)
            answer = all_of(replaying)
        ((text,), _) = first.result()
    assert answer.startswith(MAGIC)
    assert answer[48:] in (b"", bytes(33))  # the verdict, and no proof
    assert (
        "process 1 of 2 did not connect within 0.4 s; somebody with another REDCO_SECRET, or without one, was" in text
    )


def test_one_with_another_secret_is_told_and_the_others_meet():
    port = free_port()

    def come(process, secret):
        try:
            return meet(cluster(process, 2, port), FACTS, 5, EarlyStop(), secret)
        except RedcoError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(come, 0, SECRET)
        began = time.monotonic()
        for secret, named in ((SECRET[::-1], "another REDCO_SECRET than"), (b"", "no REDCO_SECRET, unlike")):
            assert come(1, secret) == (
                f"process 1 of 2, coordinator localhost:{port} (REDCO variables): this process has {named} what "
                f"listens at localhost:{port + 1}\n  -> give all processes of the run one REDCO_SECRET"
            )
        assert time.monotonic() - began < 3
        second = pool.submit(come, 1, SECRET)
        close([first.result(), second.result()])


def test_a_value_that_differs_does_not_travel():
    """Neither its name does; each side names it from its own copy."""
    port, keys = free_port(), ("recipe plugin.options.url", "recipe plugin.options.api_key")
    known = {1: FACTS | dict(zip(keys, ("http://one.example", "sk-12345"), strict=True))}
    known[0] = FACTS | dict(zip(keys, ("http://nought.example", "sk-67890"), strict=True))
    with tapped(port + 1) as (way, there, back):
        found, _ = meeting([cluster(0, 2, port), cluster(1, 2, way - 1)], known=known)
    assert f"{keys[0]} is http://nought.example here, but not on process 1" in found[0]
    assert f"{keys[0]} is http://one.example here, but not on process 0" in found[1]
    for text in found:
        assert f"{keys[1]} is a value that is not shown here" in text
        assert "sk-" not in text
    passed = bytes(there + back)
    assert b'"op":"compare"' in passed
    assert b'"op":"differs"' in passed
    for word in (b"example", b"sk-", b"options", b"api_key"):
        assert word not in passed


@pytest.mark.slow
def test_a_recipe_of_more_than_a_mebibyte_meets_and_its_differences_are_named():
    labels = {f"recipe model.config.id2label.{n}": f"label {n}: " + "long " * 20 for n in range(10_000)}
    assert sum(map(len, [*labels, *labels.values()])) > 2**20
    port = free_port()
    found, _ = meeting([cluster(process, 2, port) for process in range(2)], 20, known={0: labels, 1: dict(labels)})
    close(found)
    port, changed = free_port(), labels | {"recipe model.config.id2label.77": "another"}
    found, _ = meeting([cluster(process, 2, port) for process in range(2)], 20, known={0: labels, 1: changed})
    assert "id2label.77 is another here, but not on process 0" in found[1]
    assert "id2label.77 is label 77: long" in found[0]


def test_a_hundred_processes_meet_at_once():
    port = free_port()
    found, seconds = meeting([cluster(process, 100, port) for process in range(100)], seconds=60)
    assert {len(values) for values in gathering(found)} == {100}
    close(found)
    assert seconds < 30


def test_late_comers_hear_why_the_others_gave_up(monkeypatch):
    monkeypatch.setattr(server, "_LINGER", 30.0)
    port = free_port()
    clusters = [cluster(0, 4, port), cluster(1, 3, port), cluster(2, 4, port), cluster(3, 4, port)]
    found, seconds = meeting(clusters, seconds=60, late={2: 0.5, 3: 1.0})
    for text in found:
        assert "process 1 (" in text
        assert "is one of 3 processes, process 0 one of 4\n  -> start all processes with the same count" in text
    assert seconds < 20  # all have heard: nobody is waited for


def test_a_late_comer_without_the_secret_hears_nothing(monkeypatch):
    monkeypatch.setattr(server, "_LINGER", 0.6)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meeting, [cluster(0, 3, port), cluster(1, 2, port)], 20)
        time.sleep(0.3)
        with reach(port + 1) as stranger:
            stranger.sendall(WORDS[2])
            assert all_of(stranger) == b""
        assert all("is one of 2 processes" in text for text in first.result()[0])


@pytest.mark.parametrize(
    "message",
    [
        {"op": "hello"},
        {"op": "alive"},
        {"op": "gather", "name": "x", "value": "y" * 60_000},
        hello(5, 2, 5) | {"seconds": 1e6},
        hello(1, 2, 5) | {"facts": None},
        hello(1, 2, 5) | {"more": 1},
    ],
)
def test_what_a_process_may_not_say_first_ends_its_connection_only(message):
    """As of a process of this run gone wrong: it has the secret."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        wrong = introduce(reach(port + 1), SECRET, time.monotonic() + 5)
        wrong.send(**message)
        assert wrong.receive(5) is None
        wrong.close()
        second = pool.submit(meet, cluster(1, 2, port), FACTS, 5, EarlyStop(), SECRET)
        close([first.result(), second.result()])


def test_nothing_is_kept_before_all_have_met():
    """A process that has come and sends values meanwhile is cut off, and may come again."""
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, cluster(0, 3, port), FACTS, 5, EarlyStop(), SECRET)
        early = introduce(reach(port + 1), SECRET, time.monotonic() + 5)
        early.send(**hello(1, 3, 5))
        early.send(op="gather", name="x", value=1)
        assert early.receive(5) is None
        early.close()
        others = [pool.submit(meet, cluster(process, 3, port), FACTS, 5, EarlyStop(), SECRET) for process in (1, 2)]
        close([one.result() for one in (first, *others)])


def test_a_process_that_sends_nonsense_after_the_meeting_is_named():
    port, ends, told = free_port(), [], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        mad = introduce(reach(port + 1), SECRET, time.monotonic() + 5)
        mad.send(**hello(1, 2, 5))
        link = first.result()
    link.listen(lambda end: (ends.append(end), told.set()))
    mad.send_encoded(b'{"op":"explode"}')
    assert told.wait(10)
    link.close()
    mad.close()
    assert ends[0].reason == "process 1 (far) sent what is no message of redco: no message that is known"


def test_a_value_that_is_too_large_for_all_is_refused_where_it_is_from():
    port = free_port()
    found, _ = meeting([cluster(process, 2, port) for process in range(2)])
    big, nan = "x" * (LARGEST // 2), float("nan")
    with pytest.raises(
        RedcoError, match=r"the value of process 0 for 'x' has \d+ bytes; all together may have 67108864"
    ):
        found[0].gather("x", big)
    with pytest.raises(RedcoError, match=r"the value of process 1 for 'x' cannot be sent: Out of range float values"):
        found[1].gather("x", nan)
    assert gathering(found) == [[0, 1]] * 2
    close(found)


def test_idle_connections_end_after_seconds(monkeypatch):
    monkeypatch.setattr(gate, "_SECONDS", 0.3)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        silent = [reach(port + 1) for _ in range(3)]
        silent[1].sendall(MAGIC)
        for connection in silent:
            connection.settimeout(3)
            assert connection.recv(10) == b""
            connection.close()
        second = pool.submit(meet, cluster(1, 2, port), FACTS, 5, EarlyStop(), SECRET)
        close([first.result(), second.result()])


def test_who_has_not_proved_itself_makes_room(monkeypatch):
    monkeypatch.setattr(gate, "_WAITING", 4)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        idle = [reach(port + 1) for _ in range(50)]
        second = pool.submit(meet, cluster(1, 2, port), FACTS, 5, EarlyStop(), SECRET)
        close([first.result(), second.result()])
    for connection in idle:
        connection.close()


POOR = """
import resource, sys, threading
from redco_cli.runtime.peers.cluster import Cluster
from redco_cli.runtime.rendezvous.client import meet
from redco_cli.runtime.stopping.signals import EarlyStop
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print("ready", flush=True)
link = meet(Cluster("x", f"localhost:{sys.argv[1]}", 2, 0, None), {"jax": "1"}, 20, EarlyStop(), b"0123456789abcdef")
link.listen(print)
print(link.gather("x", 0), flush=True)
"""


def test_a_process_that_runs_out_of_descriptors_goes_on_listening():
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", POOR, str(port)], stdout=subprocess.PIPE, text=True) as poor:
        assert poor.stdout.readline() == "ready\n"
        idle = [reach(port + 1) for _ in range(150)]
        link = meet(cluster(1, 2, port), {"jax": "1"}, 10, EarlyStop(), SECRET)
        link.listen(lambda _end: None)
        assert link.gather("x", 1) == [0, 1]
        assert poor.stdout.readline() == "[0, 1]\n"
        link.close()
        poor.wait(10)
    for connection in idle:
        connection.close()


def test_an_error_of_accepting_ends_nothing():
    class Failing(socket.socket):
        failures = 5

        def accept(self):
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    listener = Failing(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    entered = threading.Event()
    wires = []
    door = gate.Gate(listener, SECRET, 2, lambda wire: (wires.append(wire), entered.set()))
    door.open()
    link = introduce(reach(listener.getsockname()[1]), SECRET, time.monotonic() + 10)
    assert entered.wait(10)
    for wire in (link, *wires):
        wire.close()
    door.close()


def test_only_the_address_that_is_needed_is_listened_at():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        reach(port + 1).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port + 1), 5)
        second = pool.submit(meet, cluster(1, 2, port), FACTS, 5, EarlyStop(), SECRET)
        close([first.result(), second.result()])
    deadline = time.monotonic() + 5
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):  # and when all have met, nowhere
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port + 1), 5).close()
    assert time.monotonic() < deadline
