"""The meeting of all processes before JAX starts, in threads: every failure is named on each, and none hangs."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redco_cli.errors import RedcoError
from redco_cli.runtime.peers import wire
from redco_cli.runtime.peers.cluster import Cluster
from redco_cli.runtime.peers.connection import Connection
from redco_cli.runtime.peers.handshake import introduce
from redco_cli.runtime.rendezvous import server
from redco_cli.runtime.rendezvous.client import meet
from redco_cli.runtime.rendezvous.facts import digests, facts
from redco_cli.runtime.stopping.signals import EarlyStop, StopRequest
from tests.runtime.multiprocess.processes import ended, free_port
from tests.runtime.peers.ends import admit

FACTS = {"jax": "1", "devices": 2}
SECRET = b"0123456789abcdef"


def cluster(process, processes, port, host="localhost"):
    return Cluster("REDCO variables", f"{host}:{port}", processes, process, None)


def hello(process, processes, seconds):
    """What a process at another host says first."""
    mine = digests(FACTS, SECRET)
    who = {"process": process, "processes": processes, "at": "far", "seconds": seconds, "stopped": None, "code": 0}
    return {"op": "hello", **who, "facts": mine.whole, "devices": mine.devices}


def meeting(clusters, seconds=3.0, known=None, late=None):
    """What each process comes to: a link, or the text of its error; and how long all took."""

    def come(number):
        time.sleep((late or {}).get(number, 0))
        try:
            return meet(clusters[number], (known or {}).get(number, FACTS), seconds, EarlyStop(), SECRET)
        except RedcoError as error:
            return str(error)

    began = time.monotonic()
    with ThreadPoolExecutor(len(clusters)) as pool:
        found = list(pool.map(come, range(len(clusters))))
    return found, time.monotonic() - began


@pytest.fixture
def links():
    """Links of so many processes that have met."""
    opened = []

    def join(processes):
        port = free_port()
        found, _ = meeting([cluster(process, processes, port) for process in range(processes)])
        assert all(isinstance(link, Connection) for link in found), found
        opened.extend(found)
        return found

    yield join
    for link in opened:
        link.close()


@pytest.fixture
def knock():
    """A connection to process 0, which may still be about to listen, in place of a process; ends with the test."""
    opened = []

    def connect(port):
        deadline = time.monotonic() + 30
        while True:
            try:
                connection = socket.create_connection(("localhost", port + 1))
                opened.append(introduce(connection, SECRET, deadline))
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            else:
                return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("late", [{}, {0: 1.0}, {2: 1.0}])
def test_processes_meet_in_any_order(late):
    port = free_port()
    found, seconds = meeting([cluster(process, 3, port) for process in range(3)], late=late)
    assert [link.process for link in found] == [0, 1, 2]
    assert seconds < 3
    for link in found:
        link.close()


def test_a_missing_process_is_named_on_each():
    port = free_port()
    found, seconds = meeting([cluster(process, 4, port) for process in (0, 2)], seconds=1)
    assert 0.9 < seconds < 10
    for process, text in zip((0, 2), found, strict=True):
        assert text == (
            f"process {process} of 4, coordinator localhost:{port} (REDCO variables): "
            "processes 1, 3 of 4 did not connect within 1 s\n"
            "  -> look at what these print, or whether they were started; REDCO_TIMEOUT=SECONDS waits longer"
        )


@pytest.mark.slow
def test_a_process_started_twice_is_named_on_each():
    port = free_port()
    found, _ = meeting([cluster(process, 3, port) for process in (0, 1, 1)])
    me = f"{socket.gethostname()}, process id {os.getpid()}"
    for text in found:
        assert f"process 1 was started twice: {me} and {me}\n  -> give each process its own id, from 0 to 2" in text


def test_two_first_processes_are_named_on_each(monkeypatch):
    monkeypatch.setattr(server, "_LINGER", 1.0)
    port = free_port()
    found, seconds = meeting([cluster(process, 3, port) for process in (0, 0, 1)], seconds=30)
    assert seconds < 15
    assert all("process 0 was started twice" in text for text in found)


def test_another_count_is_named_on_each():
    port = free_port()
    found, _ = meeting([cluster(0, 2, port), cluster(1, 3, port)])
    for text in found:
        assert "is one of 3 processes, process 0 one of 2\n  -> start all processes with the same count" in text


def test_what_differs_is_named_on_each():
    port = free_port()
    known = {1: {"jax": "2", "devices": 4, "recipe seed": 3}}
    found, _ = meeting([cluster(process, 2, port) for process in range(2)], known=known)
    remedy = "\n  -> start all with one recipe and one installation"
    here = "the processes differ: jax is 1 here, but not on process 1, devices is 2 here, but not on process 1, "
    assert found[0].endswith(f"{here}process 1 has a key that is not there on this process{remedy}")
    there = "the processes differ: jax is 2 here, but not on process 0, devices is 4 here, but not on process 0, "
    assert found[1].endswith(f"{there}recipe seed is 3 here, but not on process 0{remedy}")


def test_devices_that_one_does_not_know_of_are_no_difference():
    port = free_port()
    found, _ = meeting([cluster(process, 2, port) for process in range(2)], known={1: {"jax": "1", "devices": None}})
    assert all(isinstance(link, Connection) for link in found)
    for link in found:
        link.close()


@pytest.mark.slow
def test_a_wrong_port_is_named_within_the_time_out():
    port, wrong = free_port(), free_port()
    found, seconds = meeting([cluster(0, 2, port), cluster(1, 2, wrong)], seconds=1)
    assert seconds < 10
    assert "process 1 of 2 did not connect within 1 s" in found[0]
    reason = f"process 0 could not be reached at localhost:{wrong + 1} within 1 s: connection refused"
    assert reason in found[1]


def test_an_address_that_does_not_resolve_is_named():
    found, seconds = meeting([cluster(1, 2, 8476, host="no-such-host.invalid")], seconds=1)
    assert seconds < 10
    assert "within 1 s: no-such-host.invalid does not resolve" in found[0]


def test_a_stranger_at_the_port_is_no_process():
    with socket.create_server(("localhost", 0)) as stranger:
        port = stranger.getsockname()[1] - 1
        threading.Thread(target=lambda: stranger.accept()[0].close()).start()
        found, _ = meeting([cluster(1, 2, port)], seconds=1)
    assert f"what listens at localhost:{port + 1} closed the connection, or is not redco" in found[0]


def test_a_stranger_that_calls_does_not_disturb(knock):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        knock(port).close()  # it listens
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b""):
            with socket.create_connection(("localhost", port + 1)) as stranger:
                stranger.sendall(words)
        second = pool.submit(meet, cluster(1, 2, port), FACTS, 5, EarlyStop(), SECRET)
        for link in (first.result(), second.result()):
            link.close()


MEETS = """
import sys
from redco_cli.errors import RedcoError
from redco_cli.runtime.peers.cluster import Cluster
from redco_cli.runtime.rendezvous.client import meet
from redco_cli.runtime.stopping.signals import stop_at_once
process, processes, port = map(int, sys.argv[1:])
try:
    with stop_at_once(print) as early:
        print("ready", flush=True)
        sys.stdin.readline()
        meet(Cluster("REDCO variables", f"localhost:{port}", processes, process, None), {"jax": "1"}, 60, early, b"")
except RedcoError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("stopped", [*(pytest.param(one, marks=pytest.mark.slow) for one in (0, 1)), 2])
def test_a_process_that_is_asked_to_stop_before_all_have_met_ends_all(stopped):
    """Whether it has come or not; those that come soon after hear of it too."""
    port = free_port()

    def begin(process):
        command = [sys.executable, "-c", MEETS, str(process), "4", str(port)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def come(*processes):
        for process in processes:
            children[process].stdin.write("\n")
            children[process].stdin.flush()
        time.sleep(0.5)

    children = [begin(process) for process in range(4)]
    for child in children:  # so that none comes too late because it was long in starting
        assert child.stdout.readline() == "ready\n"
    come(2)
    if stopped == 2:  # process 0, which knows the others, is not there yet
        children[2].terminate()
    come(0, 1)
    if stopped != 2:
        children[stopped].terminate()
        time.sleep(0.5)
    come(3)
    ends = ended(children, 60)
    assert [end.code for end in ends] == [75] * 4, ends
    for process, end in enumerate(ends):
        assert end.out.endswith("\n  -> run the same command to continue\n")
        ended_early = f"process {stopped} ({socket.gethostname()}, process id "
        by_itself = "SIGTERM: stopped by a signal; nothing was to be saved"
        assert ended_early in end.out or (process == stopped and end.out.startswith(by_itself))


def test_what_ends_the_meeting_is_told_to_those_who_come_when_who_said_it_is_gone(knock, monkeypatch):
    monkeypatch.setattr(server, "_LINGER", 1.0)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meeting, [cluster(0, 3, port)], 30)
        leaving = knock(port)
        leaving.send(**hello(1, 3, 20))
        leaving.send(op="leave", peaceful=False, code=130, reason="SIGINT")
        time.sleep(0.2)
        leaving.close()
        ((text,), seconds) = first.result()
    assert seconds < 15
    assert text.endswith(
        "process 1 (far) ended before all had connected: SIGINT\n  -> run the same command to continue"
    )


def test_who_comes_when_all_have_met_is_refused_and_disturbs_nobody(knock):
    port = free_port()
    early = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 5, EarlyStop(), SECRET)
        late = knock(port)  # let in, but says nothing yet
        second = pool.submit(meet, cluster(1, 2, port), FACTS, 5, EarlyStop(), SECRET)
        early += [first.result(), second.result()]
    late.send(**hello(1, 2, 5))
    refused = late.receive(20)
    late.close()
    assert refused["problem"] == "the run has begun without this process"
    assert ends_of(early, 1) == []


@pytest.fixture
def quick_beats(monkeypatch):
    """Who is silent for half a second is dead."""
    monkeypatch.setattr(wire, "_BEAT", 0.1)


def ends_of(links, seconds):
    """Why links end, of those that do in so many seconds."""
    ends, told = [], threading.Event()
    for link in links:
        link.listen(lambda end: (ends.append(end), told.set()))
    told.wait(seconds)
    found = list(ends)
    for link in links:
        link.close()
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("quick_beats")
def test_a_process_that_is_frozen_is_taken_for_dead(knock):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, cluster(0, 2, port), FACTS, 2, EarlyStop(), SECRET)
        frozen = knock(port)
        frozen.send(**hello(1, 2, 2))
        (end,) = ends_of([first.result()], 20)
    assert frozen.receive(20) == {"op": "go"}
    frozen.close()
    assert end.reason == "process 1 (far) has not been heard of for 2 s: it is stopped or frozen, or its machine is"
    assert end.exit_code == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_beats")
def test_process_0_that_is_frozen_is_taken_for_dead():
    with socket.create_server(("localhost", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1] - 1
        other = pool.submit(meet, cluster(1, 2, port), FACTS, 2, EarlyStop(), SECRET)
        frozen = admit(listener.accept()[0], SECRET)
        assert frozen.receive(20)["op"] == "hello"
        frozen.send(op="go")
        (end,) = ends_of([other.result()], 20)
        frozen.close()
    assert end.reason == "process 0 has not been heard of for 2 s: it is stopped or frozen, or its machine is"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_beats")
def test_processes_that_have_nothing_to_say_are_alive():
    port = free_port()
    links, _ = meeting([cluster(process, 2, port) for process in range(2)], seconds=1.5)
    assert ends_of(links, 3) == []


def test_facts_hold_every_value_of_the_recipe():
    found = facts(cluster(0, 2, 1), {"train": {"steps": 10, "freeze": ["a"]}, "seed": 0})
    assert {"recipe train.steps": 10, "recipe train.freeze": ["a"], "recipe seed": 0}.items() <= found.items()
    assert {"python", "jax", "redco"} <= found.keys()


def test_values_are_gathered_in_order(links):
    joined = links(3)
    for link in joined:
        link.listen(lambda _end: None)
    with ThreadPoolExecutor(3) as pool:
        for round_ in range(20):
            found = list(pool.map(lambda link, r=round_: link.gather("x", [link.process, r]), joined))
            assert found == [[[0, round_], [1, round_], [2, round_]]] * 3


def test_a_process_that_is_gone_ends_the_others(links):
    joined, ends = links(3), [None] * 3
    told = threading.Barrier(3)

    def end(process, found):
        ends[process] = found
        told.wait(10)

    for process in (0, 2):
        joined[process].listen(lambda found, process=process: end(process, found))
    joined[1].close()
    told.wait(10)
    for process in (0, 2):
        assert ends[process].reason.startswith("process 1 (")
        assert ends[process].reason.endswith("is gone: it was killed, or crashed")
        assert ends[process].exit_code == 1
        with pytest.raises(RedcoError, match="is gone"):
            joined[process].gather("x", 0)


def test_a_process_that_leaves_with_a_reason_tells_it(links):
    joined, ends = links(2), []
    told = threading.Event()
    joined[0].listen(lambda found: (ends.append(found), told.set()))
    joined[1].listen(lambda _end: None)
    joined[1].leave(peaceful=False, code=75, reason="SIGTERM: stopped")
    assert told.wait(10)
    assert (ends[0].reason, ends[0].exit_code) == ("process 1 ended: SIGTERM: stopped", 75)


@pytest.mark.parametrize("asking", [(0,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("ahead", [0, 2])
def test_all_stop_at_one_point(links, asking, ahead):
    """Process `ahead` runs as fast as it can, the others with pauses: as hosts do between two waits for a device."""
    joined = links(3)
    requests = [StopRequest(link) for link in joined]
    for link in joined:
        link.listen(lambda _end: None)

    def steps(process):
        for step in range(10**6):
            if process in asking and step == 20 + process:
                requests[process].ask(130)
            if requests[process].due():
                return step
            time.sleep(0.001 if process == ahead else 0.003)
        return None

    with ThreadPoolExecutor(3) as pool:
        stopped = list(pool.map(steps, range(3)))
    assert len(set(stopped)) == 1
    assert stopped[0] >= 20
    assert [request.exit_code for request in requests] == [130] * 3


def test_a_stop_that_is_asked_before_a_process_can_stop_is_not_lost(links):
    joined = links(2)
    for link in joined:
        link.listen(lambda _end: None)
    early = StopRequest(joined[0])
    early.ask(75)
    deadline = time.monotonic() + 5
    while joined[1].stop_at is None and time.monotonic() < deadline:
        time.sleep(0.01)
    late = StopRequest(joined[1])
    assert early.due()
    assert late.due()
    assert (early.exit_code, late.exit_code) == (75, 75)


def test_a_process_alone_stops_where_it_is_asked():
    request = StopRequest()
    assert not request.due()
    request.ask(75)
    assert request.due()
    assert request.exit_code == 75
