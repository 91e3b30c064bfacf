"""What settings of generation make of a model's scores, in the order of PyTorch's transformers.

Each function is one logits processor of transformers' `generation/logits_process.py`, and means what it means there:
padding in a prompt counts as tokens of it.

Shapes: R rows (of a batch, or beams of it), V vocabulary, W tokens of a row: its prompt, and room for the output;
S tokens of its source.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.models.generate.settings import GenerationSettings

Array = Any


def processed_scores(
    scores: Array, settings: GenerationSettings, history: Array, source: Array | None, step: Array, prompt: int
) -> Array:
    """Scores [R, V] as penalties, forced and forbidden tokens leave them: forbidden ones are -inf.

    Args:
        scores: logits, or log-probabilities of beams.
        settings: the settings.
        history: ids of the rows [R, W], padding included; those from `prompt + step` on are no tokens yet.
        source: ids that an encoder reads [R, S], or the prompts of a decoder without one; None where it reads no text.
        step: index of the next token in the output.
        prompt: length of the prompt with its padding, in tokens.
    """
    end = prompt + step
    scores = _penalised(scores, settings, history, source, end)
    scores = _without_repeats(scores, settings, history, source, end)
    for word in settings.bad_words:
        scores = _without_word(scores, word, history, end)
    if settings.min_new:
        scores = jnp.where(step < settings.min_new, _without(scores, settings.ends), scores)
    if settings.forced_first is not None:
        scores = jnp.where(step == 0, _only(scores, (settings.forced_first,)), scores)
    if settings.forced_last:
        scores = jnp.where(step == settings.max_new_tokens - 1, _only(scores, settings.forced_last), scores)
    scores = _without(scores, settings.suppressed)
    if settings.suppressed_first:
        begin = 0 if settings.forced_first is None else 1
        scores = jnp.where(step == begin, _without(scores, settings.suppressed_first), scores)
    return scores


def filtered_scores(scores: Array, settings: GenerationSettings) -> Array:
    """Scores [R, V] to draw from: divided by the temperature, those that are not drawn from -inf."""
    scores = scores / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, settings.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if settings.top_p < 1:
        ordered = jnp.sort(scores, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered, axis=-1)
        kept = (jnp.cumsum(shares, axis=-1) - shares < settings.top_p).at[:, 0].set(True)
        least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if settings.min_p > 0:
        shares = jax.nn.softmax(scores, axis=-1)
        scores = jnp.where(shares < settings.min_p * shares.max(axis=-1, keepdims=True), -jnp.inf, scores)
    return scores


def is_end(tokens: Array, settings: GenerationSettings) -> Array:
    """Whether each token ends its prompts."""
    return jnp.isin(tokens, jnp.array(settings.ends))


def _penalised(scores: Array, settings: GenerationSettings, history: Array, source: Array | None, end: Array) -> Array:
    """Scores of tokens that are in the source rewarded, of those that are in the text so far penalised."""
    if settings.source_reward != 1.0 and source is not None:
        rewarded = jnp.where(scores < 0, scores / settings.source_reward, scores * settings.source_reward)
        scores = jnp.where(_marked(source, jnp.ones_like(source, bool), scores.shape), rewarded, scores)
    if settings.repetition_penalty != 1.0:
        penalty = settings.repetition_penalty
        penalised = jnp.where(scores < 0, scores * penalty, scores / penalty)
        there = jnp.broadcast_to(jnp.arange(history.shape[1]) < end, history.shape)
        scores = jnp.where(_marked(history, there, scores.shape), penalised, scores)
    return scores


def _without_repeats(
    scores: Array, settings: GenerationSettings, history: Array, source: Array | None, end: Array
) -> Array:
    """Scores without the tokens that would repeat a sequence of the text so far, or of the source."""
    if 0 < settings.no_repeat_ngram <= history.shape[1]:
        repeats = _would_repeat(history, end, history, end, settings.no_repeat_ngram, scores.shape)
        scores = jnp.where(repeats, -jnp.inf, scores)
    length = settings.no_source_ngram
    if source is not None and 0 < length <= min(source.shape[1], history.shape[1]):
        repeats = _would_repeat(source, jnp.int32(source.shape[1]), history, end, length, scores.shape)
        scores = jnp.where(repeats, -jnp.inf, scores)
    return scores


def _without_word(scores: Array, word: tuple[int, ...], history: Array, end: Array) -> Array:
    """Scores without the last token of a sequence behind the others of it."""
    length = len(word) - 1
    if length >= history.shape[1]:
        return scores
    matches = jnp.ones(scores.shape[0], bool)
    if length:
        tail = jax.lax.dynamic_slice_in_dim(history, jnp.maximum(end - length, 0), length, axis=1)
        matches = (tail == jnp.array(word[:-1])).all(axis=1) & (end > length)
    return jnp.where(matches[:, None], _without(scores, word[-1:]), scores)


def _without(scores: Array, ids: tuple[int, ...]) -> Array:
    return scores.at[:, jnp.array(ids)].set(-jnp.inf) if ids else scores


def _only(scores: Array, ids: tuple[int, ...]) -> Array:
    return jnp.full_like(scores, -jnp.inf).at[:, jnp.array(ids)].set(0.0)


def _marked(ids: Array, which: Array, shape: tuple[int, ...]) -> Array:
    """Which tokens of the vocabulary are among the `ids` [R, N] that `which` [R, N] says: bool [R, V]."""
    rows = jnp.arange(shape[0])[:, None]
    return jnp.zeros(shape, bool).at[rows, ids].max(which)


def _would_repeat(
    text: Array, text_end: Array, history: Array, end: Array, length: int, shape: tuple[int, ...]
) -> Array:
    """Which tokens [R, V] behind the `end` tokens of `history` would repeat `length` tokens in a row of `text`.

    Args:
        text: where sequences are looked for [R, W or S].
        text_end: how many tokens of it there are.
        history: ids of the rows [R, W].
        end: how many of them there are.
        length: of the sequences.
        shape: of the scores.
    """
    places = text.shape[1] - length + 1
    tail = jax.lax.dynamic_slice_in_dim(history, jnp.maximum(end - length + 1, 0), max(length - 1, 1), axis=1)
    same = (jnp.arange(places) + length <= text_end) & (end >= length - 1)
    for index in range(length - 1):
        same = same & (text[:, index : index + places] == tail[:, index, None])
    followers = text[:, length - 1 :]
    return _marked(followers, jnp.broadcast_to(same, followers.shape), shape)
