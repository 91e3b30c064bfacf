"""All processes meet before JAX starts, where a wrong count or a missing process would hang instead of fail.

They meet at the port after the coordinator's. What is wrong is said on each within the time-out. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redco_cli.errors import EXIT_INTERRUPTED, RedcoError
from redco_cli.runtime.peers.cluster import Cluster
from redco_cli.runtime.peers.connection import Connection
from redco_cli.runtime.peers.wire import Message, Wire
from redco_cli.runtime.rendezvous.server import RendezvousServer
from redco_cli.runtime.stopping.signals import AT_ONCE, EarlyStop

_RETRY = 0.3  # seconds between two attempts
_PATIENCE = 5.0  # seconds beyond the time-out for the server to say what is wrong
_LAST_WORDS = 12.0  # seconds in which a process that was asked to stop lets the others know: the server lingers
VERSIONED = ("redco", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
"""Packages of which all processes must have the same version."""


def facts(cluster: Cluster, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all processes: versions, devices of a process, every value of the recipe."""
    versions = {name: importlib.metadata.version(name) for name in VERSIONED}
    return {
        "python": platform.python_version(),
        **versions,
        "devices": cluster.local_devices,
        **{f"recipe {key}": value for key, value in _flat(recipe).items()},
    }


def meet(cluster: Cluster, known: Mapping[str, Any], seconds: float, early: EarlyStop) -> Connection:
    """Waits until all processes have come and agree.

    Args:
        cluster: who they are.
        known: what must be the same on all.
        seconds: in which they must have come, and of silence after which one is taken for dead.
        early: learns how to tell those that are there of a signal.

    Returns:
        The connection to them, which does not listen yet.

    Raises:
        RedcoError: an address that does not resolve, nobody there, processes that are missing, doubled, or differ; one
            that was asked to stop.
    """
    deadline = time.monotonic() + seconds
    come: list[Wire] = []
    early.tell = lambda reason, code: _excuse(cluster, come, reason, code)
    if cluster.process == 0:
        _open_server(cluster, seconds)
    wire = _come(cluster, known, deadline, seconds)
    come.append(wire)
    message = _answer(wire, max(deadline - time.monotonic(), 0.0) + _PATIENCE)
    if message.get("op") == "go":
        return Connection(wire, cluster.process, cluster.processes, cluster.coordinator, seconds)
    wire.close()
    if message.get("op") == "refused":
        refused = RedcoError(str(cluster), message["problem"], message["remedy"])
        refused.exit_code = message["code"]
        raise refused
    problem = f"what listens at {cluster.host}:{cluster.port + 1} closed the connection, or is not redco"
    raise RedcoError(str(cluster), problem, "look at what process 0 printed, or choose another port")


def _come(cluster: Cluster, known: Mapping[str, Any], deadline: float, seconds: float, **more: Any) -> Wire:
    """Says hello to the server, and more."""
    wire = Wire(_connect(cluster, deadline, seconds))
    at = f"{socket.gethostname()}, process id {os.getpid()}"
    left = max(deadline - time.monotonic(), 0.0)
    hello = {"process": cluster.process, "processes": cluster.processes, "at": at, "seconds": left, **more}
    wire.send(op="hello", facts=dict(known), **hello)
    wire.start_heartbeat()
    return wire


def _excuse(cluster: Cluster, come: Sequence[Wire], reason: str, code: int) -> None:
    """Tells the server, perhaps not reached yet, that this process was asked to stop; time for all to hear of it."""
    stopped, seconds = {"code": code, "reason": reason}, AT_ONCE if code == EXIT_INTERRUPTED else _LAST_WORDS
    if come:
        come[0].send(op="leave", peaceful=False, **stopped)
        time.sleep(seconds)  # in which this process ends by what the server answers
        return
    with contextlib.suppress(RedcoError):
        _answer(_come(cluster, {}, time.monotonic() + seconds, seconds, stopped=stopped), seconds)


def _answer(wire: Wire, seconds: float) -> Message:
    """What the server says; nothing when it does not, or what is there is none."""
    try:
        return wire.receive(seconds) or {}
    except TimeoutError:
        return {}


def _open_server(cluster: Cluster, seconds: float) -> None:
    """Opens the server, unless the port is taken: if by another process 0, that one tells."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", cluster.port + 1), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        with contextlib.suppress(OSError):
            socket.create_connection((cluster.host, cluster.port + 1), 5).close()
            return
        problem = f"port {cluster.port + 1} cannot be listened at: {error.strerror or error}"
        raise RedcoError(str(cluster), problem, "choose another port: REDCO_COORDINATOR=host:port") from None
    RendezvousServer(listener, cluster.processes, seconds)


def _connect(cluster: Cluster, deadline: float, seconds: float) -> socket.socket:
    """Tries until somebody listens; a name may also begin to resolve only when its host is up."""
    reason = "nobody answered"
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((cluster.host, cluster.port + 1), min(5.0, deadline - time.monotonic()))
        except socket.gaierror as error:
            reason = f"{cluster.host} does not resolve ({error.strerror})"
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or error).lower()
        time.sleep(_RETRY)
    problem = f"process 0 could not be reached at {cluster.host}:{cluster.port + 1} within {seconds:g} s: {reason}"
    remedy = "check the address and port, that process 0 runs, and firewalls: this port and the one before it are used"
    raise RedcoError(str(cluster), problem, remedy)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
