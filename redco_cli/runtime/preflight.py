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
from collections.abc import Mapping
from typing import Any

from redco_cli.errors import RedcoError
from redco_cli.runtime.cluster import Cluster
from redco_cli.runtime.hub import Hub
from redco_cli.runtime.link import Link
from redco_cli.runtime.wire import Wire

_RETRY, _PATIENCE = 0.3, 5.0  # seconds between two attempts, and beyond the time-out for the hub to say what is wrong
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


def meet(cluster: Cluster, known: Mapping[str, Any], seconds: float) -> Link:
    """Waits until all processes have come and agree.

    Args:
        cluster: who they are.
        known: what must be the same on all.
        seconds: in which they must have come.

    Returns:
        The connection to them, which does not listen yet.

    Raises:
        RedcoError: an address that does not resolve, nobody there, processes that are missing, doubled, or differ.
    """
    deadline, where = time.monotonic() + seconds, str(cluster)
    if cluster.process == 0:
        _open_hub(cluster, seconds)
    connection = _connect(cluster, deadline, seconds)
    wire = Wire(connection)
    at = f"{socket.gethostname()}, process id {os.getpid()}"
    left = max(deadline - time.monotonic(), 0.0)
    wire.send(op="hello", process=cluster.process, processes=cluster.processes, at=at, seconds=left, facts=dict(known))
    try:
        message = wire.receive(left + _PATIENCE) or {}
    except TimeoutError:
        message = {}
    if message.get("op") != "go":
        wire.close()
    if message.get("op") == "refused":
        raise RedcoError(where, message["problem"], message["remedy"])
    if message.get("op") != "go":
        problem = f"what answers at {cluster.host}:{cluster.port + 1} ended the meeting, or is no redco"
        raise RedcoError(where, problem, "look at what process 0 printed, or choose another port")
    return Link(wire, cluster.process, cluster.processes, cluster.coordinator)


def _open_hub(cluster: Cluster, seconds: float) -> None:
    """Opens the hub, unless the port is taken: if by another process 0, that one tells."""
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
    Hub(listener, cluster.processes, seconds)


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
