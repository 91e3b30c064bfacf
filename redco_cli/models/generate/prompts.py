"""Prompts that are being continued, and what reads them.

Shapes: B batch, M beams, R rows: B, or B * M; P length of the prompts, N of the outputs, S of the sources,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from redco_cli.models.generate.scores import is_end, processed_scores
from redco_cli.models.generate.settings import GenerationSettings
from redco_cli.models.generate.stops import Stops

Array = Any
Cache = Any
"""What a reader keeps of the tokens it has read: a pytree whose arrays have a dim of rows, apart from scalars."""


class Reader(Protocol):
    """A model as generation sees it: it reads tokens, and says how likely each of the vocabulary is next."""

    @property
    def row_dim(self) -> int:
        """Which dim of the arrays in its cache is that of rows."""

    def begin(self, prompts: Prompts) -> tuple[Array, Cache]:
        """Reads the prompts.

        Returns:
            Logits of the first token [R, V], and a cache with room for all outputs but their last token.
        """

    def go_on(self, prompts: Prompts, tokens: Array, cache: Cache, step: Array) -> tuple[Array, Cache]:
        """Reads `tokens` [R], number `step` of the outputs, to the logits of the next [R, V]."""


@dataclass(frozen=True)
class Prompts:
    """Prompts that are being continued.

    Attributes:
        reader: the model.
        settings: how tokens are chosen.
        ids: prompts [R, P], with their padding on the left; of an encoder-decoder, what its decoder starts with.
        mask: [R, P], bool.
        wanted: which rows are continued at all [R], bool; the others get padding.
        source: ids that an encoder reads [R, S], or the prompts of a decoder without one; None where it reads no text.
        stops: what ends outputs besides tokens; None for nothing.
        context: what else the reader wants for each row, such as an encoder's output: a pytree of arrays [R, ...].
    """

    reader: Reader
    settings: GenerationSettings
    ids: Array
    mask: Array
    wanted: Array
    source: Array | None
    stops: Stops | None = None
    context: Any = None

    def begin(self) -> tuple[Array, Cache]:
        """Reads the prompts; see `Reader`. Logits are float32."""
        logits, cache = self.reader.begin(self)
        return logits.astype(jnp.float32), cache

    def go_on(self, tokens: Array, cache: Cache, step: Array) -> tuple[Array, Cache]:
        """Reads the next tokens; see `Reader`. Logits are float32."""
        logits, cache = self.reader.go_on(self, tokens, cache, step)
        return logits.astype(jnp.float32), cache

    def processed_scores(self, scores: Array, outputs: Array, step: Array) -> Array:
        """Scores [R, V] of token number `step` behind the `outputs` [R, N] so far; see `processed_scores`."""
        history = jnp.concatenate([self.ids, outputs], axis=1)
        return processed_scores(scores, self.settings, history, self.source, step, self.ids.shape[1])

    def started(self) -> Array | None:
        """States [R] of the stop strings behind the prompts; None where there are none."""
        return None if self.stops is None else self.stops.read(self.ids)

    def ended(self, tokens: Array, states: Array | None) -> tuple[Array, Array | None]:
        """Which `tokens` end their outputs, and the states of the stop strings after them; all of one shape."""
        ends = is_end(tokens, self.settings)
        if self.stops is None:
            return ends, None
        states, found = self.stops.step(states, tokens)
        return ends | found, states

    def times(self, count: int) -> Prompts:
        """Each row so many times, one after the other."""
        if count == 1:
            return self
        rows = (self.ids, self.mask, self.wanted, self.source, self.context)
        rows = jax.tree.map(lambda array: repeated(array, count, axis=0), rows)
        ids, mask, wanted, source, context = rows
        return replace(self, ids=ids, mask=mask, wanted=wanted, source=source, context=context)

    def cache_rows(self, cache: Cache, change: Callable[[Array, int], Array]) -> Cache:
        """A cache with its rows changed: `change` gets each array that has rows, and the dim in which it has them."""
        return jax.tree.map(lambda array: change(array, self.reader.row_dim) if jnp.ndim(array) else array, cache)


def repeated(array: Array, times: int, *, axis: int) -> Array:
    """Each element along an axis so many times in a row."""
    shape = array.shape
    wide = jnp.broadcast_to(jnp.expand_dims(array, axis + 1), (*shape[: axis + 1], times, *shape[axis + 1 :]))
    return wide.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def moved_right(ids: Array, mask: Array) -> tuple[Array, Array]:
    """Prompts and mask [B, P] with the padding that was behind a prompt before it."""
    length = mask.shape[1]
    behind = jnp.argmax(mask[:, ::-1], axis=1)
    source = (jnp.arange(length) - behind[:, None]) % length
    return jnp.take_along_axis(ids, source, axis=1), jnp.take_along_axis(mask, source, axis=1)
