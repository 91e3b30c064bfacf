"""The generation loop: greedy search, sampling or beam search, a token of every row at a time.

The loop ends when every row has ended. Shapes are those of the longest output, so that a program is compiled once for
all prompts of a shape.

Shapes: B batch, N length of the outputs, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.models.generate.prompts import Prompts
from redco_cli.models.generate.scores import filtered_scores, is_end
from redco_cli.models.generate.search import beam_search

Array = Any


def outputs_of(prompts: Prompts, rng: Any) -> Array:
    """Token ids [B, N]: the outputs alone, padded after their end. Traced by JAX.

    Args:
        prompts: what is continued, and how.
        rng: key for sampling; None is enough for anything else.
    """
    return beam_search(prompts) if prompts.settings.beams > 1 else _one_token_at_a_time(prompts, rng)


def _one_token_at_a_time(prompts: Prompts, rng: Any) -> Array:
    """Token ids [B, N]: the likeliest token each time, or one that is drawn with the key `rng`."""
    settings = prompts.settings

    def choose(logits: Array, step: Array, outputs: Array, ended: Array) -> tuple[Array, Array, Array]:
        scores = prompts.processed_scores(logits, outputs, step)
        if settings.sample:
            tokens = jax.random.categorical(jax.random.fold_in(rng, step), filtered_scores(scores, settings))
        else:
            tokens = jnp.argmax(scores, axis=-1)
        tokens = jnp.where(ended, settings.pad, tokens).astype(jnp.int32)
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, tokens[:, None], step, axis=1)
        return tokens, outputs, ended | is_end(tokens, settings)

    def unfinished(state: tuple[Any, ...]) -> Array:
        step, _, _, ended, _ = state
        return (step < settings.max_new_tokens) & ~ended.all()

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, tokens, outputs, ended, cache = state
        logits, cache = prompts.go_on(tokens, cache, step - 1)
        return step + 1, *choose(logits, step, outputs, ended), cache

    logits, cache = prompts.begin()
    outputs = jnp.full((prompts.ids.shape[0], settings.max_new_tokens), settings.pad, jnp.int32)
    first = choose(logits, jnp.int32(0), outputs, ~prompts.wanted)
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[2]
