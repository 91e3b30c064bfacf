"""Settings of generation, read from a generation config and checked.

Every setting means what it means in PyTorch's transformers. One that is not followed is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from redco_cli.errors import ModelError
from redco_cli.recipe.schema import GenerationSection


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
        renormalize: make scores of beams log-probabilities again when tokens were forbidden.
        repetition_penalty: divides positive scores of tokens that are in the text, and multiplies negative ones.
        source_reward: multiplies positive scores of tokens that are in the source, and divides negative ones.
        no_repeat_ngram: length of sequences that must not occur twice; 0 for none.
        no_source_ngram: length of sequences of the source that must not occur; 0 for none.
        bad_words: sequences of ids that never come.
        min_new: tokens before the end may come.
        suppressed: ids that never come.
        suppressed_first: ids that do not come first, or second behind a forced first token.
        forced_first: the first token; None for free.
        forced_last: ids one of which the last token is; empty for free.
        samples: outputs for each prompt.
        log_probs: whether the log-probabilities of the tokens are wanted.
        stops: texts that end an output.
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
    renormalize: bool
    repetition_penalty: float
    source_reward: float
    no_repeat_ngram: int
    no_source_ngram: int
    bad_words: tuple[tuple[int, ...], ...]
    min_new: int
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    forced_first: int | None
    forced_last: tuple[int, ...]
    samples: int
    log_probs: bool
    stops: tuple[str, ...]
    ends: tuple[int, ...]
    pad: int


_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
_FORCING = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda value: value >= 1, "an integer of 1 or more"),
    "min_new_tokens": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "min_length": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "num_samples": (int, lambda value: value >= 1, "an integer of 1 or more"),
    "num_beams": (int, lambda value: value >= 1, "an integer of 1 or more"),
    "top_k": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "no_repeat_ngram_size": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "encoder_no_repeat_ngram_size": (int, lambda value: value >= 0, "an integer of 0 or more"),
    "temperature": (float, lambda value: value > 0, "a number above 0"),
    "top_p": (float, lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (float, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "length_penalty": (float, lambda value: True, "a number"),
    "repetition_penalty": (float, lambda value: value > 0, "a number above 0"),
    "encoder_repetition_penalty": (float, lambda value: value > 0, "a number above 0"),
}
_SWITCHES = ("do_sample", "early_stopping", "bad_words_ids", "renormalize_logits", "stop_strings", "log_probs")
HONOURED = frozenset({*_RANGES, *_IDS, *_FORCING, *_SWITCHES})
"""Settings of a generation config that are followed."""

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
    "remove_invalid_values": False,
    "token_healing": False,
    "watermarking_config": None,
    "max_time": None,
    "num_return_sequences": 1,
}
"""Settings that are not followed, with the value that changes nothing."""


def read_settings(config: Any, overrides: Mapping[str, Any], *, prompt: int, where: str) -> GenerationSettings:
    """A generation config with `overrides` on top.

    Args:
        config: the transformers generation config.
        overrides: settings by name; None leaves one to the config. `tokenizer` is none of them, but may be there.
        prompt: length of the prompt with its padding, in tokens.
        where: place for errors.

    Raises:
        ModelError: a setting that is unknown, not followed, or out of its range, or one that is missing.
    """
    unknown = sorted(set(overrides) - HONOURED - {"tokenizer"})
    if unknown:
        raise ModelError(where, f"generation knows no setting {unknown[0]}", f"settings: {', '.join(sorted(HONOURED))}")
    given: dict[str, Any] = {name: getattr(config, name, None) for name in HONOURED}
    given |= {name: value for name, value in overrides.items() if value is not None}
    given = {name: value for name, value in given.items() if value is not None}
    _check(config, given, where)
    ends = _ids(given["eos_token_id"])
    single_ends = {(end,) for end in ends}
    floor = given.get("min_length", 0) - prompt
    forced_first = given.get("forced_bos_token_id") if prompt == 1 else None
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
        renormalize=bool(given.get("renormalize_logits", False)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
        source_reward=float(given.get("encoder_repetition_penalty", 1.0)),
        no_repeat_ngram=given.get("no_repeat_ngram_size", 0),
        no_source_ngram=given.get("encoder_no_repeat_ngram_size", 0),
        bad_words=tuple(_ids(word) for word in given.get("bad_words_ids", ()) if _ids(word) not in single_ends),
        min_new=given["min_new_tokens"] if "min_new_tokens" in given else max(floor, 0),
        suppressed=_ids(given.get("suppress_tokens", ())),
        suppressed_first=_ids(given.get("begin_suppress_tokens", ())),
        forced_first=forced_first,
        forced_last=_ids(given.get("forced_eos_token_id", ())),
        samples=given.get("num_samples", 1),
        log_probs=bool(given.get("log_probs", False)),
        stops=_strings(given.get("stop_strings", ()), where),
        ends=ends,
        pad=int(given.get("pad_token_id", ends[0])),
    )


def _check(config: Any, given: Mapping[str, Any], where: str) -> None:
    for key, neutral in _REFUSED.items():
        value = getattr(config, key, None)
        if value is not None and value != neutral:
            raise ModelError(
                where,
                f"the generation setting {key}: {value} is not honoured here",
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
    samples, beams = given.get("num_samples", 1), given.get("num_beams", 1)
    if samples > 1 and not given.get("do_sample") and samples > beams:
        problem = f"num_samples is {samples}, but there is one likeliest output, and {beams} beams"
        raise ModelError(where, problem, f"set do_sample: true, or num_beams: {samples}")
    if given.get("encoder_repetition_penalty", 1.0) != 1.0 and given.get("num_beams", 1) > 1:
        problem = "encoder_repetition_penalty and beam search exclude each other: PyTorch applies it to some beams only"
        raise ModelError(where, problem, "set num_beams: 1, or leave encoder_repetition_penalty out")
    if given.get("eos_token_id") is None:
        raise ModelError(where, "the generation config has no eos_token_id", "add it to the model's config")


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(int(one) for one in value) if isinstance(value, list | tuple) else (int(value),)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(string, str) and string for string in strings):
        problem = f"the generation setting stop_strings is {value!r}"
        raise ModelError(where, problem, "it must be a list of texts that are not empty")
    return strings
