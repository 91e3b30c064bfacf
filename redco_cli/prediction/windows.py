"""Prompts of like length in a batch: examples are sorted within windows of a few batches.

Predictions leave in the order of the examples once their window is done, so a window is what a kill can cost. Which
examples share a batch follows from those of the window alone: wherever a prediction is continued, it is the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from redco_cli.data.collate import Collate, measured
from redco_cli.data.encoded.buckets import Buckets, prompt_lengths
from redco_cli.data.loader import fetch
from redco_cli.data.places import place_of
from redco_cli.encoding.collate import bound_measure
from redco_cli.job import Job
from redco_cli.plugin.contract import Example

BATCHES = 8
"""Batches of a window: nearly all that sorting can save, for little work to lose."""


class Windows:
    """How examples are arranged in batches.

    Attributes:
        size: examples of a window.
    """

    def __init__(self, job: Job, examples: Sequence[Example], batch_size: int) -> None:
        """Reads nothing yet.

        Args:
            job: the job; prompts are sorted where its plugin has an `encode_fn`, by lengths of its recipe.
            examples: to be predicted.
            batch_size: examples of a batch over all processes.
        """
        data = job.recipe.data
        self._lengths: tuple[int, ...] = (data.max_length,)
        if job.plugin.encode_fn is not None and isinstance(data.buckets, tuple):
            self._lengths = tuple(sorted({*data.buckets, data.max_length}))
        elif job.plugin.encode_fn is not None and data.buckets == "auto" and job.plugin.build_model is None:
            self._lengths = prompt_lengths(data.max_length)
        self.size = batch_size * (BATCHES if len(self._lengths) > 1 else 1)
        self._examples, self._collate = examples, job.collate("predict")
        self._measure = bound_measure(job.plugin, job.context("predict")) if len(self._lengths) > 1 else None
        self._known: dict[int, tuple[list[int], Buckets]] = {}
        self._lock = threading.Lock()

    def arrange(self, places: range) -> tuple[Sequence[int], Collate]:
        """The examples of a batch, and what makes it of them.

        Args:
            places: of the batch among all examples; none beyond the window of the first.

        Raises:
            DataError, PluginError: a prompt cannot be encoded.
        """
        indices, length = self.batch(places)
        return indices, functools.partial(self._collate, length=length)

    def batch(self, places: range) -> tuple[Sequence[int], int]:
        """The indices of the examples that come to these places, and what they are padded to; see `arrange`."""
        if self._measure is None:
            return places, self._lengths[-1]
        number = places.start // self.size
        with self._lock:  # several threads read ahead in one window
            if number not in self._known:
                self._known[number] = self._sorted(number, self._measure)
            order, buckets = self._known[number]
        first = number * self.size
        chosen = order[places.start - first : places.stop - first]
        return [first + one for one in chosen], buckets.of(chosen)

    def _sorted(self, number: int, measure: Callable[[Any], list[int]]) -> tuple[list[int], Buckets]:
        first = number * self.size
        indices = range(first, min(first + self.size, len(self._examples)))
        part = fetch(self._examples, indices)
        lengths = measured(measure, part, lambda row: place_of(self._examples, indices[row]))
        buckets = Buckets(self._lengths, np.array(lengths, np.int64))
        return buckets.by_length().tolist(), buckets

    def ends(self, places: range) -> bool:
        """Whether the window ends with these places; it is then forgotten."""
        if places.stop % self.size and places.stop < len(self._examples):
            return False
        self._known.pop(places.start // self.size, None)
        return True
