"""How fast a run goes: examples and tokens per second, waiting for input, and how much of it is padding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Rates:
    """The speed of one window.

    Attributes:
        tokens_per_second: None where tokens are not counted.
        examples_per_second: nan, like all rates, for a window that took no time.
        input_wait: share of the time spent waiting for the next batch, from 0 to 1.
        seconds: length of the window.
        padding: share of the positions computed that hold no token, from 0 to 1; None where tokens are not counted.
    """

    tokens_per_second: float | None
    examples_per_second: float
    input_wait: float
    seconds: float
    padding: float | None = None


class Meter:
    """Measures speed over the window between two calls of `read`.

    JAX computes after a call has returned: what `paused` leaves out begins when the steps before it have ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._is_paused = False
        self._reset()

    def _reset(self) -> None:
        self._began = self._clock()
        self._examples = 0
        self._tokens: float | None = None
        self._positions = 0
        self._excluded = self._waited = 0.0

    def add(self, examples: int, tokens: float | None = None, positions: int = 0) -> None:
        """Counts the examples of one step and, where tokens are counted, its tokens and the positions they stand in."""
        self._examples += examples
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens
            self._positions += positions

    @contextmanager
    def paused(self, pending: Any = None) -> Iterator[None]:
        """Leaves out the time within: compilation, evaluation, checkpoints. May be nested.

        Args:
            pending: arrays that devices are still at, waited for first: that is time of the steps.
        """
        if self._is_paused:
            yield
            return
        jax.block_until_ready(pending)
        self._is_paused, began = True, self._clock()
        try:
            yield
        finally:
            self._is_paused = False
            self._excluded += self._clock() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time within as waiting for input."""
        began = self._clock()
        try:
            yield
        finally:
            if not self._is_paused:
                self._waited += self._clock() - began

    def read(self) -> Rates:
        """The speed since the last call (at first: since the start), and begins the next window."""
        seconds = self._clock() - self._began - self._excluded
        tokens, examples, waited = self._tokens, self._examples, self._waited
        padding = None if tokens is None or not self._positions else 1 - tokens / self._positions
        self._reset()
        if seconds <= 0:
            return Rates(None if tokens is None else math.nan, math.nan, math.nan, 0.0, padding)
        speed = None if tokens is None else tokens / seconds
        return Rates(speed, examples / seconds, waited / seconds, seconds, padding)
