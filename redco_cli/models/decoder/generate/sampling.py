"""How a decoder chooses its next token: settings of generation read and checked, and what they make of the scores.

Every setting means what it means in PyTorch's transformers. One that is not followed is refused by its name.

Shapes: R rows (of a batch, or beams of it), V vocabulary, W tokens of a row: its prompt, and room for the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from redco_cli.errors import ModelError
from redco_cli.recipe.schema import GenerationSection

Array = Any


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of generation, checked; hashable, so that a program is compiled once for all calls that share them.

    Attributes:
        max_new_tokens: of the output.
        sample: draw tokens instead of taking the likeliest.
        temperature: divides the scores before drawing.
        top_k: draw among so many; 0 for all.
        top_p: draw among the likeliest that make up this probability.
        min_p: draw among those with this share of the largest probability; 0 for all.
        beams: of beam search; 1 for none.
        length_penalty: the power of the length that a beam's log-probability is divided by.
        early_stopping: whether a search ends with enough ended beams, or `never` before no other can be better.
        repetition_penalty: divides positive scores of tokens that are in the text, and multiplies negative ones.
        no_repeat_ngram: length of sequences that must not occur twice; 0 for none.
        min_new: tokens before the end may come.
        suppressed: ids that never come.
        suppressed_first: ids that do not come first, or second behind a forced first token.
        forced_first: the first token; None for free.
        forced_last: ids one of which the last token is; empty for free.
        ends: ids that end the prompts.
        pad: what follows the end.
    """

    max_new_tokens: int
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    repetition_penalty: float
    no_repeat_ngram: int
    min_new: int
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    forced_first: int | None
    forced_last: tuple[int, ...]
    ends: tuple[int, ...]
    pad: int


_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
_FORCING = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda value: value >= 1, "an integer of 1 or more"),
    "min_new_tokens": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "min_length": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "num_beams": (int, lambda value: value >= 1, "an integer of 1 or more"),
    "top_k": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "no_repeat_ngram_size": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "temperature": (float, lambda value: value > 0, "a number above 0"),
    "top_p": (float, lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (float, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "length_penalty": (float, lambda value: True, "a number"),
    "repetition_penalty": (float, lambda value: value > 0, "a number above 0"),
}
HONOURED = frozenset({*_RANGES, *_IDS, *_FORCING, "do_sample", "early_stopping"})
"""Settings of a generation config that the decoder follows."""

_REFUSED: dict[str, Any] = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "dola_layers": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "exponential_decay_length_penalty": None,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "watermarking_config": None,
    "stop_strings": None,
    "max_time": None,
    "num_return_sequences": 1,
}
"""Settings that are not followed, with the value that changes nothing."""


def read_settings(config: Any, overrides: Mapping[str, Any], *, prompt: int, where: str) -> GenerationSettings:
    """A generation config with `overrides` on top.

    Args:
        config: the transformers generation config.
        overrides: settings by name; None leaves one to the config.
        prompt: length of the prompt with its padding, in tokens.
        where: place for errors.

    Raises:
        ModelError: a setting that is unknown, not followed, or out of its range, or one that is missing.
    """
    unknown = sorted(set(overrides) - HONOURED)
    if unknown:
        raise ModelError(where, f"generation knows no setting {unknown[0]}", f"settings: {', '.join(sorted(HONOURED))}")
    given: dict[str, Any] = {name: getattr(config, name, None) for name in HONOURED}
    given |= {name: value for name, value in overrides.items() if value is not None}
    given = {name: value for name, value in given.items() if value is not None}
    _check(config, given, where)
    ends = _ids(given["eos_token_id"])
    floor = given.get("min_length", 0) - prompt
    return GenerationSettings(
        max_new_tokens=given.get("max_new_tokens", GenerationSection().max_new_tokens),
        sample=bool(given.get("do_sample", False)),
        temperature=float(given.get("temperature", 1.0)),
        top_k=given.get("top_k", 0),
        top_p=float(given.get("top_p", 1.0)),
        min_p=float(given.get("min_p", 0.0)),
        beams=given.get("num_beams", 1),
        length_penalty=float(given.get("length_penalty", 1.0)),
        early_stopping=given.get("early_stopping", False),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
        no_repeat_ngram=given.get("no_repeat_ngram_size", 0),
        min_new=max(given.get("min_new_tokens", 0), floor, 0),
        suppressed=_ids(given.get("suppress_tokens", ())) + _bad_words(config, where),
        suppressed_first=_ids(given.get("begin_suppress_tokens", ())),
        forced_first=given.get("forced_bos_token_id") if prompt == 1 else None,
        forced_last=_ids(given.get("forced_eos_token_id", ())),
        ends=ends,
        pad=int(given.get("pad_token_id", ends[0])),
    )


def processed_scores(
    scores: Array, settings: GenerationSettings, history: Array, real: Array, step: Array, prompt: int
) -> Array:
    """Scores [R, V] as penalties, forced and forbidden tokens leave them: forbidden ones are -inf.

    Args:
        scores: logits, or log-probabilities of beams.
        settings: the settings.
        history: ids of the rows [R, W]; those from `prompt + step` on are no tokens yet.
        real: which of them are tokens, and no padding [R, W].
        step: index of the next token in the output.
        prompt: length of the prompt with its padding, in tokens.
    """
    if settings.repetition_penalty != 1.0:
        penalty = settings.repetition_penalty
        penalised = jnp.where(scores < 0, scores * penalty, scores / penalty)
        scores = jnp.where(_marked(history, real, scores.shape), penalised, scores)
    if 0 < settings.no_repeat_ngram <= history.shape[1]:
        repeats = _would_repeat(history, settings.no_repeat_ngram, prompt + step, scores.shape)
        scores = jnp.where(repeats, -jnp.inf, scores)
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


def _check(config: Any, given: Mapping[str, Any], where: str) -> None:
    for key, neutral in _REFUSED.items():
        value = getattr(config, key, None)
        if value is not None and value != neutral:
            raise ModelError(
                where,
                f"the generation setting {key}: {value} is not honoured by the decoder",
                "remove it from generation_config.json",
            )
    for key, (kind, fits, range_) in _RANGES.items():
        value = given.get(key, 1)
        if not isinstance(value, (int, kind)) or not fits(value):
            raise ModelError(where, f"the generation setting {key} is {value!r}", f"it must be {range_}")
    if given.get("early_stopping", False) not in (True, False, "never"):
        raise ModelError(
            where,
            f"the generation setting early_stopping is {given['early_stopping']!r}",
            "it must be true, false or never",
        )
    if given.get("do_sample") and given.get("num_beams", 1) > 1:
        raise ModelError(where, "sampling and beam search exclude each other here", "set num_beams: 1")
    if given.get("eos_token_id") is None:
        raise ModelError(where, "the generation config has no eos_token_id", "add it to the model's config")


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(int(one) for one in value) if isinstance(value, list | tuple) else (int(value),)


def _bad_words(config: Any, where: str) -> tuple[int, ...]:
    """Single forbidden tokens."""
    words = getattr(config, "bad_words_ids", None) or ()
    for word in words:
        if len(word) > 1:
            raise ModelError(
                where,
                f"the generation setting bad_words_ids: {word} is not honoured by the decoder",
                "remove it from generation_config.json",
            )
    return tuple(int(word[0]) for word in words)


def is_end(tokens: Array, settings: GenerationSettings) -> Array:
    """Whether each token ends its prompts."""
    return jnp.isin(tokens, jnp.array(settings.ends))


def _without(scores: Array, ids: tuple[int, ...]) -> Array:
    return scores.at[:, jnp.array(ids)].set(-jnp.inf) if ids else scores


def _only(scores: Array, ids: tuple[int, ...]) -> Array:
    return jnp.full_like(scores, -jnp.inf).at[:, jnp.array(ids)].set(0.0)


def _marked(ids: Array, which: Array, shape: tuple[int, ...]) -> Array:
    """Which tokens of the vocabulary are among the `ids` [R, N] that `which` [R, N] says: bool [R, V]."""
    rows = jnp.arange(shape[0])[:, None]
    return jnp.zeros(shape, bool).at[rows, ids].max(which)


def _would_repeat(history: Array, length: int, end: Array, shape: tuple[int, ...]) -> Array:
    """Which tokens [R, V] would make the last `length` tokens of a row, of which `end` are there, occur twice."""
    places = history.shape[1] - length + 1
    tail = jax.lax.dynamic_slice_in_dim(history, jnp.maximum(end - length + 1, 0), max(length - 1, 1), axis=1)
    same = jnp.arange(places) + length <= end
    for index in range(length - 1):
        same = same & (history[:, index : index + places] == tail[:, index, None])
    followers = history[:, length - 1 :]
    return _marked(followers, jnp.broadcast_to(same, followers.shape), shape)
