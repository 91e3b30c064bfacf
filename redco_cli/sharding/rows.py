"""How many devices share the rows of a batch, for code that sums over rows inside a loop.

Under the compiler's automatic partitioning such a sum crosses devices in every round. Code that keeps one sum per group
of rows, and adds the groups up behind the loop, crosses once; but it has to know how many groups there are. Whoever
traces a function for a mesh says so here, and where nobody does there is one group: the result is the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Sharing:
    """A batch whose rows are shared.

    Attributes:
        ways: number of devices with rows of their own.
        asked: whether what was traced depends on it.
    """

    ways: int
    asked: bool = False


_SHARING: ContextVar[Sharing | None] = ContextVar("sharing", default=None)


@contextlib.contextmanager
def rows_shared(ways: int) -> Iterator[Sharing]:
    """What is traced in this context is for a batch whose rows are shared by so many devices."""
    sharing = Sharing(ways)
    token = _SHARING.set(sharing)
    try:
        yield sharing
    finally:
        _SHARING.reset(token)


def row_groups(rows: int) -> int:
    """Groups of neighbouring rows to keep apart in a loop: as many as devices share them, where that divides `rows`.

    >>> with rows_shared(8):
    ...     row_groups(32), row_groups(12)
    (8, 4)
    >>> row_groups(32)
    1
    """
    sharing = _SHARING.get()
    if sharing is None:
        return 1
    sharing.asked = True
    return math.gcd(rows, sharing.ways)
