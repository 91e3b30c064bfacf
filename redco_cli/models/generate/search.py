"""Beam search, as PyTorch's transformers search.

Shapes: B batch, M beams, R rows: B * M; N length of the outputs, V vocabulary, C candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_cli.models.generate.prompts import Prompts, repeated

Array = Any
_NEVER = -1.0e9
"""Added to the score of what must not be chosen, so that among such the better one still comes first."""
NO_TOKEN = 1.0
"""Stands where there is no token for its log-probability, which is never above 0."""


class _Beams(NamedTuple):
    """The state of a beam search.

    Attributes:
        texts: of the beams that go on: `ids` [B, M, N], and where they are wanted `log_probs` [B, M, N].
        states: theirs of the stop strings [B, M]; None where there are none.
        scores: their log-probabilities [B, M], best first.
        ended: the best texts that have ended, as `texts`.
        ended_scores: theirs, divided by the power of their lengths [B, M], best first.
        filled: which of `ended` there are [B, M].
        hopeful: whether a row's beams may still become better than its ended ones [B].
        stuck: whether no beam can go on.
    """

    texts: dict[str, Array]
    states: Array | None
    scores: Array
    ended: dict[str, Array]
    ended_scores: Array
    filled: Array
    hopeful: Array
    stuck: Array


def beam_search(prompts: Prompts) -> dict[str, Array]:
    """The likeliest outputs found by M beams a row, as PyTorch's transformers search.

    Returns:
        As many of each row as samples are wanted, best first: `ids` [B, D, N], and where they are wanted `log_probs`.
    """
    settings = prompts.settings
    batch, beams = prompts.ids.shape[0], settings.beams
    logits, cache = prompts.begin()
    start = _start(prompts)
    prompts = prompts.times(beams)
    cache = prompts.cache_rows(cache, lambda array, dim: repeated(array, beams, axis=dim))

    def select(state: _Beams, logits: Array, step: Array) -> tuple[_Beams, Array, Array]:
        raw = jax.nn.log_softmax(logits, axis=-1)
        scores = prompts.processed_scores(raw, state.texts["ids"].reshape(batch * beams, -1), step)
        scores = jax.nn.log_softmax(scores, axis=-1) if settings.renormalize else scores
        return _selected(prompts, state, scores.reshape(batch, beams, -1), raw.reshape(batch, beams, -1), step)

    def unfinished(carry: tuple[Any, ...]) -> Array:
        step, state, *_ = carry
        enough = state.filled.all() if settings.early_stopping is True else False
        return (step < settings.max_new_tokens) & state.hopeful.any() & ~state.stuck & jnp.logical_not(enough)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, state, tokens, parents, cache = carry
        cache = prompts.cache_rows(cache, lambda array, dim: _of_parents(array, parents, dim))
        logits, cache = prompts.go_on(tokens.reshape(-1), cache, step - 1)
        return step + 1, *select(state, logits, step), cache

    first = select(start, repeated(logits, beams, axis=0), jnp.int32(0))
    last = jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[1]
    return {name: array[:, : settings.samples] for name, array in last.ended.items()}


def _start(prompts: Prompts) -> _Beams:
    """The state before the first token."""
    settings, batch = prompts.settings, prompts.ids.shape[0]
    shape = (batch, settings.beams)
    texts = {"ids": jnp.full((*shape, settings.max_new_tokens), settings.pad, jnp.int32)}
    if settings.log_probs:
        texts["log_probs"] = jnp.full((*shape, settings.max_new_tokens), NO_TOKEN, jnp.float32)
    one = jnp.where(jnp.arange(settings.beams) == 0, 0.0, _NEVER)  # the others would find the same
    states = prompts.started()
    states = None if states is None else repeated(states, settings.beams, axis=0).reshape(shape)
    nothing, empty = jnp.full(shape, _NEVER), jnp.zeros(shape, bool)
    return _Beams(texts, states, jnp.broadcast_to(one, shape), texts, nothing, empty, prompts.wanted, jnp.array(False))


def _selected(prompts: Prompts, state: _Beams, scores: Array, raw: Array, step: Array) -> tuple[_Beams, Array, Array]:
    """The state after token number `step`, the beams' tokens [B, M] and the beams that they continue [B, M].

    Enough candidates are kept for M of them to go on when all others end.

    Args:
        prompts: what is continued, and how; each row M times.
        state: before.
        scores: of every token behind every beam [B, M, V].
        raw: their log-probabilities as the model says them [B, M, V].
        step: index of the token.
    """
    settings = prompts.settings
    batch, beams, vocabulary = scores.shape
    count = max(2, 1 + len(settings.ends)) * beams
    scores, places = jax.lax.top_k((scores + state.scores[..., None]).reshape(batch, -1), count)
    parents, tokens = places // vocabulary, (places % vocabulary).astype(jnp.int32)
    new = {"ids": tokens}
    if settings.log_probs:
        new["log_probs"] = jnp.take_along_axis(raw.reshape(batch, -1), places, axis=1)
    texts = {
        name: jax.lax.dynamic_update_slice_in_dim(array, new[name][..., None], step, axis=2)
        for name, array in _chosen(state.texts, parents).items()
    }
    ends, states = prompts.ended(tokens, _chosen(state.states, parents))
    ends = ends | (step == settings.max_new_tokens - 1)

    going, best = jax.lax.top_k(jnp.where(ends, scores + _NEVER, scores), beams)
    ended, ended_scores, filled = _ended(prompts, state, texts, scores, ends, step)
    never = settings.early_stopping == "never" and settings.length_penalty > 0
    longest = jnp.asarray(settings.max_new_tokens if never else step + 1, jnp.float32)
    worst = jnp.where(filled, ended_scores.min(axis=1, keepdims=True), _NEVER)
    hopeful = state.hopeful & (going[:, :1] / longest**settings.length_penalty > worst).any(axis=1)
    after = _Beams(_chosen(texts, best), _chosen(states, best), going, ended, ended_scores, filled, hopeful, ends.all())
    return after, _chosen(tokens, best), _chosen(parents, best)


def _ended(
    prompts: Prompts, state: _Beams, texts: dict[str, Array], scores: Array, ends: Array, step: Array
) -> tuple[dict[str, Array], Array, Array]:
    """`ended`, `ended_scores` and `filled` after candidates that ended took their places.

    Args:
        prompts: what is continued, and how.
        state: before.
        texts: of the candidates [B, C, N], best first; only the first M may end.
        scores: their log-probabilities [B, C].
        ends: which of them end [B, C].
        step: index of their last token.
    """
    settings = prompts.settings
    ends = ends & (jnp.arange(ends.shape[1]) < settings.beams)
    closed = ~state.hopeful[:, None]
    if settings.early_stopping is True:
        closed = closed | state.filled.all(axis=1, keepdims=True)
    scores = scores / (step + 1).astype(jnp.float32) ** settings.length_penalty
    scores = scores + jnp.where(closed, _NEVER, 0.0) + jnp.where(ends, 0.0, _NEVER)
    ended_scores, best = jax.lax.top_k(jnp.concatenate([state.ended_scores, scores], axis=1), settings.beams)
    ended = jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), state.ended, texts)
    filled = jnp.concatenate([state.filled, ends], axis=1)
    return _chosen(ended, best), ended_scores, _chosen(filled, best)


def _chosen(arrays: Any, which: Array) -> Any:
    """Of arrays [B, C, ...] the elements [B, M] of each row that `which` says."""
    return jax.tree.map(
        lambda array: jnp.take_along_axis(array, which.reshape(*which.shape, *(1,) * (array.ndim - 2)), axis=1), arrays
    )


def _of_parents(array: Array, parents: Array, dim: int) -> Array:
    """What a cache holds of beams' rows, B * M along a dim, for the beams that they go on from [B, M]."""
    shape = array.shape
    rows = jnp.moveaxis(array.reshape(*shape[:dim], *parents.shape, *shape[dim + 1 :]), (dim, dim + 1), (0, 1))
    chosen = jax.vmap(lambda row, parent: row[parent])(rows, parents)
    return jnp.moveaxis(chosen, (0, 1), (dim, dim + 1)).reshape(shape)
