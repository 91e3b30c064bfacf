"""The generation loop: greedy search, sampling or beam search, a token of every row at a time.

The loop ends when every row has ended. Shapes are those of the longest output, so that a program is compiled once for
all prompts of a shape.

Shapes: B batch, D outputs of each prompt, R rows: B, or B * D; N length of the outputs, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.models.generate.prompts import Prompts
from redco_cli.models.generate.scores import filtered_scores
from redco_cli.models.generate.search import NO_TOKEN, beam_search

Array = Any


def outputs_of(prompts: Prompts, rng: Any) -> Any:
    """Token ids [B, N]: the outputs alone, padded after their end. Traced by JAX.

    Args:
        prompts: what is continued, and how.
        rng: key for sampling; None is enough for anything else.

    Returns:
        The ids; with several samples [B, D, N]. Where log-probabilities are wanted, a dict: `ids`; `log_probs` of the
        same shape, of each token given all before it, by the model's logits as they are, before any setting changes
        them, 0 behind the end; `lengths`, how many tokens there are up to the end.
    """
    settings, batch = prompts.settings, prompts.ids.shape[0]
    if settings.beams > 1:
        texts = beam_search(prompts)
    else:
        texts = _one_token_at_a_time(prompts.times(settings.samples), rng)
        texts = {name: array.reshape(batch, settings.samples, -1) for name, array in texts.items()}
    if settings.samples == 1:
        texts = {name: array[:, 0] for name, array in texts.items()}
    if not settings.log_probs:
        return texts["ids"]
    real = texts["log_probs"] < NO_TOKEN
    return {"ids": texts["ids"], "log_probs": jnp.where(real, texts["log_probs"], 0.0), "lengths": real.sum(axis=-1)}


def _one_token_at_a_time(prompts: Prompts, rng: Any) -> dict[str, Array]:
    """`ids` [R, N], the likeliest each time or drawn with the key `rng`, and where they are wanted `log_probs`."""
    settings, rows = prompts.settings, prompts.ids.shape[0]

    def choose(logits: Array, step: Array, texts: Any, ended: Array, states: Any) -> tuple[Any, ...]:
        scores = prompts.processed_scores(logits, texts["ids"], step)
        if settings.sample:
            tokens = jax.random.categorical(jax.random.fold_in(rng, step), filtered_scores(scores, settings))
        else:
            tokens = jnp.argmax(scores, axis=-1)
        tokens = jnp.where(ended, settings.pad, tokens).astype(jnp.int32)
        new = {"ids": tokens}
        if settings.log_probs:
            new["log_probs"] = jnp.where(ended, NO_TOKEN, _of(jax.nn.log_softmax(logits, axis=-1), tokens))
        texts = {
            name: jax.lax.dynamic_update_slice_in_dim(texts[name], array[:, None], step, axis=1)
            for name, array in new.items()
        }
        ends, states = prompts.ended(tokens, states)
        return tokens, texts, ended | ends, states

    def unfinished(state: tuple[Any, ...]) -> Array:
        step, _, _, ended, *_ = state
        return (step < settings.max_new_tokens) & ~ended.all()

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, tokens, texts, ended, states, cache = state
        logits, cache = prompts.go_on(tokens, cache, step - 1)
        return step + 1, *choose(logits, step, texts, ended, states), cache

    logits, cache = prompts.begin()
    texts = {"ids": jnp.full((rows, settings.max_new_tokens), settings.pad, jnp.int32)}
    if settings.log_probs:
        texts["log_probs"] = jnp.full((rows, settings.max_new_tokens), NO_TOKEN, jnp.float32)
    first = choose(logits, jnp.int32(0), texts, ~prompts.wanted, prompts.started())
    said: dict[str, Array] = jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[2]
    return said


def _of(scores: Array, tokens: Array) -> Array:
    """Of scores [R, V] those of tokens [R]."""
    return jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
