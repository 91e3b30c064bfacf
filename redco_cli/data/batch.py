"""What one batch is: which examples each process collates for it, and what `collate_fn` may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.errors import DataError, PluginError

PADDING = "is_padding_example"
"""The array [rows] of a batch that says which of its rows are no examples of it, where their number varies."""
LocalRows = Callable[[int], Sequence[int]]
"""From the size of a batch to the rows that this process holds and collates, ascending; `range` is all of them."""
_NARROWED: dict[type, Any] = {np.int64: np.int32, np.uint64: np.uint32, np.float64: np.float32}


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch of a step is cut.

    Micro-batch m is rows [m * micro, (m + 1) * micro) of the global batch, and a process collates the same rows of
    each: those of its devices. The global batch is the same however it is shared.

    Attributes:
        global_batch_size: examples per step, over all processes; a multiple of `micro_batch_size`.
        micro_batch_size: examples per micro-batch, over all processes.
        local_rows: the rows of a micro-batch that this process collates.
    """

    global_batch_size: int
    micro_batch_size: int
    local_rows: LocalRows = range

    def __post_init__(self) -> None:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(f"{self} does not divide evenly")

    @property
    def n_micro(self) -> int:
        """Micro-batches per global batch."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def share(self) -> int:
        """Rows of one micro-batch that this process collates."""
        return len(self.local_rows(self.micro_batch_size))

    def rows(self) -> list[int]:
        """The rows of the global batch that this process collates, one micro-batch after the other."""
        rows = self.local_rows(self.micro_batch_size)
        return [m * self.micro_batch_size + row for m in range(self.n_micro) for row in rows]


@dataclass(frozen=True)
class Slice:
    """The examples of one evaluation batch.

    Attributes:
        start: index of the first example.
        stop: index after the last one.
        sharded: whether the examples are split over the devices; else every device computes all of them.
    """

    start: int
    stop: int
    sharded: bool


def eval_slices(n: int, batch_size: int, shards: int) -> list[Slice]:
    """Cuts n examples into evaluation batches that hold every example exactly once, and nothing else.

    Full batches come first, then one smaller batch of as many examples as still divide over the shards, then the
    last few (fewer than `shards`) on every device alike. Filling up the last batch instead would need a mask, and
    the plugin's loss function would have to know of it.

    Args:
        n: how many examples there are.
        batch_size: examples per full batch over all shards; a multiple of `shards`.
        shards: how many parts a batch is split into.

    >>> eval_slices(11, 4, 2)  # doctest: +NORMALIZE_WHITESPACE
    [Slice(start=0, stop=4, sharded=True), Slice(start=4, stop=8, sharded=True),
     Slice(start=8, stop=10, sharded=True), Slice(start=10, stop=11, sharded=False)]
    """
    if batch_size % shards:
        raise ValueError(f"a batch of {batch_size} does not divide over {shards} shards")
    full = n - n % batch_size
    even = n - n % shards
    together = [Slice(start, start + batch_size, True) for start in range(0, full, batch_size)]
    if even > full:
        together.append(Slice(full, even, True))
    alone = batch_size // shards
    return together + [Slice(start, min(start + alone, n), False) for start in range(even, n, alone)]


def check_batch(batch: object, size: int, where: str) -> dict[str, np.ndarray]:
    """Proves that `batch` is a dict of numeric numpy arrays with leading dim `size`.

    Integers and floats of 64 bits are narrowed to 32, as JAX does, but a value that does not fit is refused.

    Args:
        batch: what `collate_fn` returned.
        size: how many examples it was given.
        where: the place of `collate_fn`.

    Raises:
        PluginError: it is something else.
        DataError: a value does not fit in 32 bits.
    """
    expected = f"return a dict of numpy arrays with leading dim {size}, one row for each of the {size} examples"
    if not isinstance(batch, Mapping):
        raise PluginError(where, f"returned {_described(batch)} instead of a dict", expected)
    if not batch:
        raise PluginError(where, "returned an empty dict", expected)
    return {key: _check_array(key, value, size, where, expected) for key, value in batch.items()}


def check_shapes(batch: object, where: str) -> dict[str, np.ndarray]:
    """`check_batch` of arrays that need not have as many rows as each other.

    They may be `jax.ShapeDtypeStruct`s: then they are zeros, without memory.
    """
    if not isinstance(batch, Mapping) or not batch:
        return check_batch(batch, 1, where)
    arrays = {
        key: np.broadcast_to(np.zeros((), one.dtype), one.shape) if isinstance(one, jax.ShapeDtypeStruct) else one
        for key, one in batch.items()
    }
    rows = {key: len(one) if np.ndim(one) else 1 for key, one in arrays.items()}
    return {key: check_batch({key: one}, rows[key], where)[key] for key, one in arrays.items()}


def _check_array(key: Any, value: Any, size: int, where: str, expected: str) -> np.ndarray:
    if not isinstance(key, str):
        raise PluginError(where, f"returned the key {key!r}, but keys are names", expected)
    if not isinstance(value, np.ndarray):
        raise PluginError(where, f"batch[{key!r}] is {_described(value)}, not a numpy array", expected)
    if not (value.dtype.kind in "biuf" or jnp.issubdtype(value.dtype, jnp.floating)):
        if value.dtype.kind == "c":
            problem = f"batch[{key!r}] is complex, which a batch is not"
            raise PluginError(where, problem, "give real and imaginary parts as two arrays")
        problem = f"batch[{key!r}] has dtype {value.dtype}, which no device can hold"
        raise PluginError(where, problem, "turn text into token ids, and rows of unequal length into one padded array")
    if value.ndim == 0 or value.shape[0] != size:
        raise PluginError(where, f"batch[{key!r}] has shape {value.shape}", expected)
    return _narrowed(key, value, where)


def _narrowed(key: str, value: np.ndarray, where: str) -> np.ndarray:
    target = _NARROWED.get(value.dtype.type)
    if target is None:
        return value
    limits: Any = np.finfo(target) if value.dtype.kind == "f" else np.iinfo(target)
    unfit = value[((value < limits.min) | (value > limits.max)) & np.isfinite(value)]
    if unfit.size:
        problem = f"batch[{key!r}] holds {unfit[0]}, which does not fit {np.dtype(target)}"
        raise DataError(where, problem, "scale the values, or drop what the model does not read")
    return value.astype(target)


def _described(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
