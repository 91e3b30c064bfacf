"""All processes meet before JAX starts, where a wrong count or a missing process would hang instead of fail.

They meet at the port after the coordinator's. What is wrong is said on each within the time-out. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redco_cli.errors import EXIT_INTERRUPTED, RedcoError
from redco_cli.runtime.peers.addresses import listening_address, reached_address
from redco_cli.runtime.peers.cluster import Cluster
from redco_cli.runtime.peers.connection import Connection
from redco_cli.runtime.peers.handshake import HandshakeError, OtherSecretError, UnansweredError, introduce
from redco_cli.runtime.peers.messages import MOST_SECONDS, Message, ProtocolError, readable
from redco_cli.runtime.peers.wire import Wire
from redco_cli.runtime.rendezvous.facts import differences, differing, digests
from redco_cli.runtime.rendezvous.server import RendezvousServer
from redco_cli.runtime.stopping.signals import AT_ONCE, EarlyStop

_RETRY = 0.3  # seconds between two attempts
_HANDSHAKE = 5.0  # seconds for one
_PATIENCE = 15.0  # seconds beyond the time-out for the server to say what is wrong: it waits for others to hear it
_LAST_WORDS = 12.0  # seconds in which a process that was asked to stop lets the others know: the server lingers


def meet(cluster: Cluster, known: Mapping[str, Any], seconds: float, early: EarlyStop, secret: bytes) -> Connection:
    """Waits until all processes have come and agree.

    Args:
        cluster: who they are.
        known: what must be the same on all; none of it leaves this process but as digests.
        seconds: in which they must have come, and of silence after which one is taken for dead.
        early: learns how to tell those that are there of a signal.
        secret: of the run, by which the processes know each other; empty for none.

    Returns:
        The connection to them, which does not listen yet.

    Raises:
        RedcoError: an address that does not resolve, nobody there, another secret, processes that are missing, doubled,
            or differ; one that was asked to stop.
    """
    deadline = time.monotonic() + seconds
    come: list[Wire] = []
    early.tell = lambda reason, code: _excuse(cluster, come, reason, code, secret)
    if cluster.process == 0:
        _open_server(cluster, known, seconds, secret)
    wire, message = _heard(cluster, known, deadline, seconds, secret, come)
    if message.get("op") == "compare":
        keys, more = differing(known, secret, message["facts"])
        wire.send(op="differs", keys=keys, more=more)
        message = _answer(wire, deadline + _PATIENCE)
    if message.get("op") == "go":
        return Connection(wire, cluster.process, cluster.processes, cluster.coordinator, seconds)
    wire.close()
    if message.get("op") == "refused":
        problem = message["problem"]
        if message["differing"]:
            problem = differences(known, secret, cluster.process, message["differing"])
        refused = RedcoError(str(cluster), problem, message["remedy"])
        refused.exit_code = message["code"]
        raise refused
    raise _no_process(cluster, "closed the connection, or is not redco")


def _no_process(cluster: Cluster, how: str) -> RedcoError:
    problem = f"what listens at {cluster.host}:{cluster.port + 1} {how}"
    return RedcoError(str(cluster), problem, "look at what process 0 printed, or choose another port")


def _heard(
    cluster: Cluster, known: Mapping[str, Any], deadline: float, seconds: float, secret: bytes, come: list[Wire]
) -> tuple[Wire, Message]:
    """Comes to the server until it answers, with nothing where what is there is none.

    A server that is overwhelmed, by strangers too, closes connections without a word: that is no reason to give up.

    Args:
        come: holds the connection by which this process has come.
    """
    is_back = False
    while True:
        wire = _come(cluster, known, deadline, seconds, secret, is_back=is_back)
        come.append(wire)
        try:
            message = wire.receive(max(deadline + _PATIENCE - time.monotonic(), 0.0))
        except (TimeoutError, ProtocolError):
            return wire, {}
        if message is not None:
            return wire, message
        come.clear()
        wire.close()
        is_back = True
        time.sleep(_RETRY)


def _come(
    cluster: Cluster,
    known: Mapping[str, Any],
    deadline: float,
    seconds: float,
    secret: bytes,
    stopped: str | None = None,
    code: int = 0,
    *,
    is_back: bool = False,
) -> Wire:
    """Says hello to the server, perhaps not for the first time, or that this process is about to end."""
    wire = _connect(cluster, deadline, seconds, secret, is_back=is_back)
    at = readable(f"{socket.gethostname()}, process id {os.getpid()}")
    left, mine = min(max(deadline - time.monotonic(), 0.0), MOST_SECONDS), digests(known, secret)
    who = {"process": cluster.process, "processes": cluster.processes, "at": at, "seconds": left}
    wire.send(op="hello", **who, facts=mine.whole, devices=mine.devices, stopped=stopped, code=code)
    wire.start_heartbeat()
    return wire


def _excuse(cluster: Cluster, come: Sequence[Wire], reason: str, code: int, secret: bytes) -> None:
    """Tells the server, perhaps not reached yet, that this process was asked to stop; time for all to hear of it."""
    seconds = AT_ONCE if code == EXIT_INTERRUPTED else _LAST_WORDS
    wire = next(iter(come), None)
    if wire is not None and wire.send(op="leave", peaceful=False, code=code, reason=readable(reason)):
        time.sleep(seconds)  # in which this process ends by what the server answers
        return
    deadline = time.monotonic() + seconds
    with contextlib.suppress(RedcoError):
        _answer(_come(cluster, {}, deadline, seconds, secret, readable(reason), code), deadline)


def _answer(wire: Wire, deadline: float) -> Message:
    """What the server says; nothing when it does not, or what is there is none."""
    try:
        return wire.receive(max(deadline - time.monotonic(), 0.0)) or {}
    except (TimeoutError, ProtocolError):
        return {}


def _open_server(cluster: Cluster, known: Mapping[str, Any], seconds: float, secret: bytes) -> None:
    """Opens the server, unless the port is taken: if by another process 0, that one tells."""
    address = listening_address(cluster.host)
    is_v6 = ":" in address or (not address and socket.has_dualstack_ipv6())
    try:
        listener = socket.create_server(
            (address, cluster.port + 1),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=is_v6 and not address,
        )
    except OSError as error:
        with contextlib.suppress(OSError):
            socket.create_connection((reached_address(cluster.host), cluster.port + 1), 5).close()
            return
        problem = f"port {cluster.port + 1} cannot be listened at: {error.strerror or error}"
        raise RedcoError(str(cluster), problem, "choose another port: REDCO_COORDINATOR=host:port") from None
    RendezvousServer(listener, cluster.processes, seconds, secret, digests(known, secret).table)


def _connect(cluster: Cluster, deadline: float, seconds: float, secret: bytes, *, is_back: bool) -> Wire:
    """Tries until process 0 listens and proves itself; a name may also begin to resolve only when its host is up.

    Where it has proved itself once and listens no more, it has ended.
    """
    reason, address = "nobody answered", f"{cluster.host}:{cluster.port + 1}"
    answered = is_back
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(
                (reached_address(cluster.host), cluster.port + 1), min(_HANDSHAKE, left)
            )
            return _introduced(cluster, connection, secret, min(deadline, time.monotonic() + _HANDSHAKE))
        except UnansweredError:
            answered = True
        except socket.gaierror as error:
            reason = f"{cluster.host} does not resolve ({error.strerror})"
        except (OSError, ValueError) as error:
            if is_back and isinstance(error, ConnectionRefusedError):
                raise _no_process(cluster, "closed the connection, and is there no more") from None
            reason = str(getattr(error, "strerror", None) or error).lower()
        time.sleep(_RETRY)
    if answered:
        raise _no_process(cluster, "closed the connection, or is not redco")
    problem = f"process 0 could not be reached at {address} within {seconds:g} s: {reason}"
    remedy = "check the address and port, that process 0 runs, and firewalls: this port and the one before it are used"
    raise RedcoError(str(cluster), problem, remedy)


def _introduced(cluster: Cluster, connection: socket.socket, secret: bytes, deadline: float) -> Wire:
    """What is connected, once both ends have proved themselves."""
    try:
        return introduce(connection, secret, deadline)
    except HandshakeError as error:
        connection.close()
        if isinstance(error, UnansweredError):
            raise
        if isinstance(error, OtherSecretError):
            mine = "has another REDCO_SECRET than" if secret else "has no REDCO_SECRET, unlike"
            problem = f"this process {mine} what listens at {cluster.host}:{cluster.port + 1}"
            raise RedcoError(str(cluster), problem, "give all processes of the run one REDCO_SECRET") from None
        raise _no_process(cluster, "is not redco, or another version of it") from None
