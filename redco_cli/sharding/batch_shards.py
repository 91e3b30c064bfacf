"""How many devices a batch is split over, for code that sums over examples inside a loop.

Under the compiler's automatic partitioning such a sum crosses devices in every iteration. Code that keeps one partial
sum per shard of the batch, and adds them up behind the loop, crosses once; but it has to know how many shards there
are. Whoever traces a function for a mesh says so here, and where nobody does there is one: the result is the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

OF_EACH_SHARD = "redco: of each shard of the batch"
"""Name of an array of which each shard of the batch gets one."""


@dataclass
class BatchShards:
    """A batch that is split over devices.

    Attributes:
        count: number of devices with examples of their own.
        consulted: whether what was traced depends on it.
    """

    count: int
    consulted: bool = False


_BATCH_SHARDS: ContextVar[BatchShards | None] = ContextVar("batch_shards", default=None)


@contextlib.contextmanager
def batch_sharded(count: int) -> Iterator[BatchShards]:
    """What is traced in this context is for a batch that is split over so many devices."""
    shards = BatchShards(count)
    token = _BATCH_SHARDS.set(shards)
    try:
        yield shards
    finally:
        _BATCH_SHARDS.reset(token)


def is_batch_sharded() -> bool:
    """Whether anybody has said so of what is traced now."""
    return _BATCH_SHARDS.get() is not None


def partial_sums(examples: int) -> int:
    """How many groups of neighbouring examples to sum apart in a loop: one per shard, where that divides `examples`.

    >>> with batch_sharded(8):
    ...     partial_sums(32), partial_sums(12)
    (8, 4)
    >>> partial_sums(32)
    1
    """
    shards = _BATCH_SHARDS.get()
    if shards is None:
        return 1
    shards.consulted = True
    return math.gcd(examples, shards.count)


def for_each_shard(x: Any, count: int) -> Any:
    """One array [count, ...] for each group of examples of `partial_sums`, all the same as `x` [...].

    Its gradient is that of each group, apart; where `x` is a parameter, each device scatters its own at once.
    """
    return jax.lax.broadcast(checkpoint_name(x, OF_EACH_SHARD), (count,))
