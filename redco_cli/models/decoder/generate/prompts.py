"""Prompts that are being continued: read at once, then one token of every row at a time.

A text starts at position 0 whatever padding is before it.

Shapes: B batch, M beams, R rows: B, or B * M; P length of the prompts, N of the outputs, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from redco_cli.models.decoder.cache import KVCache
from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.decoder.generate.sampling import GenerationSettings, processed_scores
from redco_cli.plugin.contract import Params

Array = Any


@dataclass(frozen=True)
class Prompts:
    """Prompts that are being continued.

    Attributes:
        module: the decoder.
        settings: how tokens are chosen.
        params: of the decoder.
        ids: prompts [R, P], with their padding on the left.
        mask: [R, P], bool.
    """

    module: Decoder
    settings: GenerationSettings
    params: Params
    ids: Array
    mask: Array

    def begin(self) -> tuple[Array, KVCache]:
        """Reads the prompts.

        Returns:
            Logits of the first token [R, V], and a cache with room for all outputs but their last token.
        """
        positions = jnp.maximum(jnp.cumsum(self.mask, axis=1, dtype=jnp.int32) - 1, 0)
        length = self.ids.shape[1] + self.settings.max_new_tokens - 1
        hidden, cache = self._apply("prefill", self.ids, self.mask, length, positions=positions)
        return self._logits(hidden), cache

    def go_on(self, tokens: Array, cache: KVCache, step: Array) -> tuple[Array, KVCache]:
        """Reads `tokens` [R], number `step` of the outputs, to the logits of the next [R, V]."""
        positions = self.mask.sum(axis=1, dtype=jnp.int32) + step
        mask = jnp.pad(self.mask, ((0, 0), (0, self.settings.max_new_tokens - 1)), constant_values=True)
        hidden, cache = self._apply("decode", tokens[:, None], cache, mask, positions=positions[:, None])
        return self._logits(hidden), cache

    def processed_scores(self, scores: Array, outputs: Array, step: Array) -> Array:
        """Scores [R, V] of token number `step` behind the `outputs` [R, N] so far; see `processed_scores`."""
        history = jnp.concatenate([self.ids, outputs], axis=1)
        real = jnp.broadcast_to(jnp.arange(self.settings.max_new_tokens) < step, outputs.shape)
        real = jnp.concatenate([self.mask, real], axis=1)
        return processed_scores(scores, self.settings, history, real, step, self.ids.shape[1])

    def in_beams(self) -> Prompts:
        """Each row M times, one after the other."""
        ids, mask = (repeated(array, self.settings.beams, axis=0) for array in (self.ids, self.mask))
        return Prompts(self.module, self.settings, self.params, ids, mask)

    def _logits(self, hidden: Array) -> Array:
        logits: Array = self._apply("logits", hidden[:, -1])
        return logits.astype(jnp.float32)

    def _apply(self, method: str, *inputs: Any, **named: Any) -> Any:
        return self.module.apply({"params": self.params}, *inputs, **named, method=method)


def repeated(array: Array, times: int, *, axis: int) -> Array:
    """Each element along an axis so many times in a row."""
    shape = array.shape
    wide = jnp.broadcast_to(jnp.expand_dims(array, axis + 1), (*shape[: axis + 1], times, *shape[axis + 1 :]))
    return wide.reshape(*shape[:axis], -1, *shape[axis + 1 :])
