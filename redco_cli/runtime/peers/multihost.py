"""The other processes of this run, for whoever must do something once, or the same as they do. Imports no JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from redco_cli.runtime.peers.connection import Connection

_joined: list[Connection] = []


def current_connection() -> Connection | None:
    """The connection to the other processes; None for a process alone."""
    return _joined[-1] if _joined else None


def process_index() -> int:
    """Which process this is, from 0."""
    return _joined[-1].process if _joined else 0


def is_main_process() -> bool:
    """Whether this process writes what is written once, and speaks for all."""
    return process_index() == 0


def process_allgather(name: str, value: Any = None) -> list[Any]:
    """The JSON-able value of every process, in their order, once all have called it; see `Connection.gather`."""
    connection = current_connection()
    return [value] if connection is None else connection.gather(name, value)


@contextlib.contextmanager
def connected(connection: Connection) -> Iterator[None]:
    """Makes a connection the one of this process."""
    _joined.append(connection)
    try:
        yield
    finally:
        _joined.remove(connection)
