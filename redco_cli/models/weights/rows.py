"""A checkpoint as if its vocabulary had rows for tokens that were added: each is the mean of those before them.

Nothing is written: a row is worked out when it is read, by whichever process reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from redco_cli.models.vocabulary import AddedTokens
from redco_cli.models.weights.files import Array, Checkpoint, Index

_AT_ONCE = 64 * 2**20
"""Bytes, in float64, of which the mean is added up at a time."""


def with_rows(checkpoint: Checkpoint, added: AddedTokens, vocabulary: Mapping[str, int]) -> Checkpoint:
    """The checkpoint with rows for added tokens.

    Args:
        checkpoint: as stored.
        added: which rows are theirs.
        vocabulary: stored tensors with a row for each token, to the dim that counts these. One with another number of
            rows than the model had stays as it is: it does not fit, which is for others to say.
    """
    dims = {name: dim for name, dim in vocabulary.items() if checkpoint.shapes[name][dim] == added.rows}
    shapes = {**checkpoint.shapes, **{name: _grown(checkpoint.shapes[name], dim, added) for name, dim in dims.items()}}

    @lru_cache(maxsize=8)  # embedding, head and their biases
    def mean(name: str) -> Array:
        return _mean(checkpoint, name, dims[name], added.first)

    def read(name: str, index: Index) -> Array:
        if name not in dims:
            return checkpoint.read(name, index)
        shape, dim = shapes[name], dims[name]
        box = [slice(*(index[at] if at < len(index) else slice(None)).indices(end)[:2]) for at, end in enumerate(shape)]
        start, stop = box[dim].start, box[dim].stop
        values = np.empty([one.stop - one.start for one in box], np.dtype(checkpoint.dtypes[name]))
        along = np.moveaxis(values, dim, 0)
        stored = min(stop, added.rows)
        if start < stored:
            part = checkpoint.read(name, (*box[:dim], slice(start, stored), *box[dim + 1 :]))
            along[: stored - start] = np.moveaxis(part, dim, 0)
        first, last = max(start, added.first), min(stop, added.stop)
        if first < last:
            rest = tuple(one for at, one in enumerate(box) if at != dim)
            along[first - start : last - start] = mean(name)[rest].astype(values.dtype)
        return values

    return replace(checkpoint, shapes=shapes, read=read)


def _grown(shape: tuple[int, ...], dim: int, added: AddedTokens) -> tuple[int, ...]:
    return (*shape[:dim], max(shape[dim], added.stop), *shape[dim + 1 :])


def _mean(checkpoint: Checkpoint, name: str, dim: int, count: int) -> Array:
    """The mean of the first rows of a tensor, in float64."""
    shape = checkpoint.shapes[name]
    rest = (*shape[:dim], *shape[dim + 1 :])
    step, total = max(1, _AT_ONCE // (8 * max(1, prod(rest)))), np.zeros(rest)
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        part = checkpoint.read(name, (*(slice(0, end) for end in shape[:dim]), rows))
        total += part.astype(np.float64).sum(dim)
    return total / count
