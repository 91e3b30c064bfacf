"""Beam search, as PyTorch's transformers search.

Shapes: B batch, M beams, R rows: B * M; N length of the outputs, V vocabulary, C candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_cli.models.generate.prompts import Prompts, repeated
from redco_cli.models.generate.scores import is_end
from redco_cli.models.generate.settings import GenerationSettings

Array = Any
_NEVER = -1.0e9
"""Added to the score of what must not be chosen, so that among such the better one still comes first."""


class _Beams(NamedTuple):
    """The state of a beam search.

    Attributes:
        outputs: of the beams that go on [B, M, N].
        scores: their log-probabilities [B, M], best first.
        ended: the best outputs that have ended [B, M, N].
        ended_scores: theirs, divided by the power of their lengths [B, M], best first.
        filled: which of `ended` there are [B, M].
        hopeful: whether a row's beams may still become better than its ended ones [B].
        stuck: whether no beam can go on.
    """

    outputs: Array
    scores: Array
    ended: Array
    ended_scores: Array
    filled: Array
    hopeful: Array
    stuck: Array


def beam_search(prompts: Prompts) -> Array:
    """Token ids [B, N] of the likeliest outputs found by M beams a row, as PyTorch's transformers search."""
    settings = prompts.settings
    batch, beams = prompts.ids.shape[0], settings.beams
    logits, cache = prompts.begin()
    hopeful = prompts.wanted
    prompts = prompts.in_beams()
    cache = prompts.cache_rows(cache, lambda array, dim: repeated(array, beams, axis=dim))

    def select(state: _Beams, logits: Array, step: Array) -> tuple[_Beams, Array, Array]:
        scores = jax.nn.log_softmax(logits, axis=-1)
        scores = prompts.processed_scores(scores, state.outputs.reshape(batch * beams, -1), step)
        scores = jax.nn.log_softmax(scores, axis=-1) if settings.renormalize else scores
        return _selected(state, scores.reshape(batch, beams, -1), step, settings)

    def unfinished(carry: tuple[Any, ...]) -> Array:
        step, state, *_ = carry
        enough = state.filled.all() if settings.early_stopping is True else False
        return (step < settings.max_new_tokens) & state.hopeful.any() & ~state.stuck & jnp.logical_not(enough)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, state, tokens, parents, cache = carry
        cache = prompts.cache_rows(cache, lambda array, dim: _of_parents(array, parents, dim))
        logits, cache = prompts.go_on(tokens.reshape(-1), cache, step - 1)
        return step + 1, *select(state, logits, step), cache

    outputs = jnp.full((batch, beams, settings.max_new_tokens), settings.pad, jnp.int32)
    one = jnp.where(jnp.arange(beams) == 0, 0.0, _NEVER)  # the others would find the same
    nothing = jnp.full((batch, beams), _NEVER)
    empty = jnp.zeros((batch, beams), bool)
    start = _Beams(outputs, jnp.broadcast_to(one, (batch, beams)), outputs, nothing, empty, hopeful, jnp.array(False))
    first = select(start, repeated(logits, beams, axis=0), jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[1].ended[:, 0]


def _selected(state: _Beams, scores: Array, step: Array, settings: GenerationSettings) -> tuple[_Beams, Array, Array]:
    """The state after token number `step`, the beams' tokens [B, M] and the beams that they continue [B, M].

    Enough candidates are kept for M of them to go on when all others end.

    Args:
        state: before.
        scores: log-probabilities of every token behind every beam [B, M, V].
        step: index of the token.
        settings: how tokens are chosen.
    """
    batch, beams, vocabulary = scores.shape
    count = max(2, 1 + len(settings.ends)) * beams
    scores, places = jax.lax.top_k((scores + state.scores[..., None]).reshape(batch, -1), count)
    parents, tokens = places // vocabulary, (places % vocabulary).astype(jnp.int32)
    outputs = jnp.take_along_axis(state.outputs, parents[..., None], axis=1)
    outputs = jax.lax.dynamic_update_slice_in_dim(outputs, tokens[..., None], step, axis=2)
    ends = is_end(tokens, settings) | (step == settings.max_new_tokens - 1)

    going, best = jax.lax.top_k(jnp.where(ends, scores + _NEVER, scores), beams)
    ended, ended_scores, filled = _ended(state, outputs, scores, ends, step, settings)
    never = settings.early_stopping == "never" and settings.length_penalty > 0
    longest = jnp.asarray(settings.max_new_tokens if never else step + 1, jnp.float32)
    worst = jnp.where(filled, ended_scores.min(axis=1, keepdims=True), _NEVER)
    hopeful = (going[:, :1] / longest**settings.length_penalty > worst).any(axis=1)
    after = _Beams(
        jnp.take_along_axis(outputs, best[..., None], axis=1),
        going,
        ended,
        ended_scores,
        filled,
        state.hopeful & hopeful,
        ends.all(),
    )
    return after, jnp.take_along_axis(tokens, best, axis=1), jnp.take_along_axis(parents, best, axis=1)


def _ended(
    state: _Beams, outputs: Array, scores: Array, ends: Array, step: Array, settings: GenerationSettings
) -> tuple[Array, Array, Array]:
    """`ended`, `ended_scores` and `filled` after candidates that ended took their places.

    Args:
        state: before.
        outputs: of the candidates [B, C, N], best first; only the first M may end.
        scores: their log-probabilities [B, C].
        ends: which of them end [B, C].
        step: index of their last token.
        settings: how tokens are chosen.
    """
    beams = settings.beams
    ends = ends & (jnp.arange(ends.shape[1]) < beams)
    closed = ~state.hopeful[:, None]
    if settings.early_stopping is True:
        closed = closed | state.filled.all(axis=1, keepdims=True)
    scores = scores / (step + 1).astype(jnp.float32) ** settings.length_penalty
    scores = scores + jnp.where(closed, _NEVER, 0.0) + jnp.where(ends, 0.0, _NEVER)
    ended_scores, best = jax.lax.top_k(jnp.concatenate([state.ended_scores, scores], axis=1), beams)
    ended = jnp.concatenate([state.ended, outputs], axis=1)
    filled = jnp.concatenate([state.filled, ends], axis=1)
    return (
        jnp.take_along_axis(ended, best[..., None], axis=1),
        ended_scores,
        jnp.take_along_axis(filled, best, axis=1),
    )


def _of_parents(array: Array, parents: Array, dim: int) -> Array:
    """What a cache holds of beams' rows, B * M along a dim, for the beams that they go on from [B, M]."""
    shape = array.shape
    rows = jnp.moveaxis(array.reshape(*shape[:dim], *parents.shape, *shape[dim + 1 :]), (dim, dim + 1), (0, 1))
    chosen = jax.vmap(lambda row, parent: row[parent])(rows, parents)
    return jnp.moveaxis(chosen, (0, 1), (dim, dim + 1)).reshape(shape)
