"""The other processes of this run, for whoever must do something once, or the same as they do. Imports no JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from redco_cli.runtime.peers.connection import Link

_joined: list[Link] = []


def link() -> Link | None:
    """The connection to the other processes; None for a process alone."""
    return _joined[-1] if _joined else None


def process() -> int:
    """Which process this is, from 0."""
    return _joined[-1].process if _joined else 0


def is_first() -> bool:
    """Whether this process writes what is written once, and speaks for all."""
    return process() == 0


def gathered(name: str, value: Any = None) -> list[Any]:
    """The JSON-able value of every process, in their order, once all have called it; see `Link.gather`."""
    connection = link()
    return [value] if connection is None else connection.gather(name, value)


@contextlib.contextmanager
def linked(connection: Link) -> Iterator[None]:
    """Makes a connection the one of this process."""
    _joined.append(connection)
    try:
        yield
    finally:
        _joined.remove(connection)
