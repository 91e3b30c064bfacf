"""What Whisper's decoder starts with: tokens for the language, the task, and whether there are time stamps.

As `WhisperGenerationMixin._retrieve_init_tokens` in PyTorch's transformers: a language that is not given is detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from redco_cli.errors import ModelError
from redco_cli.models.flax.reading import encoder_outputs
from redco_cli.plugin.contract import Params
from redco_cli.recipe.explain import did_you_mean

Array = Any
SETTINGS = ("language", "task")
"""Settings of generation that Whisper alone has."""
_UNKNOWN = -1
"""Stands for the token of a language that is to be detected."""
_THRESHOLDS = ("no_speech_threshold", "logprob_threshold", "compression_ratio_threshold", "prompt_ids")


@dataclass(frozen=True)
class Start:
    """What a decoder starts with.

    Attributes:
        tokens: ids; -1 for the language that is to be detected.
        languages: ids of the languages it may be, ascending.
    """

    tokens: tuple[int, ...]
    languages: tuple[int, ...] = ()

    def ids(self, flax: Any, params: Params, hidden: Array) -> Array:
        """Prompts [B, P] for what the encoder heard [B, S, E]."""
        ids = jnp.broadcast_to(jnp.array(self.tokens, jnp.int32), (hidden.shape[0], len(self.tokens)))
        if _UNKNOWN not in self.tokens:
            return ids
        logits = flax.decode(ids[:, :1], encoder_outputs(hidden), params=params, return_dict=True).logits[:, -1]
        known = jnp.array(self.languages, jnp.int32)
        found = known[jnp.argmax(logits[:, known], axis=-1)]
        return jnp.where(ids == _UNKNOWN, found[:, None], ids)


def read_start(config: Any, generation_config: Any, first: int, settings: Mapping[str, Any], where: str) -> Start:
    """What Whisper's decoder starts with.

    Args:
        config: the transformers config.
        generation_config: its generation config, with the ids of languages and tasks.
        first: the id of the first token.
        settings: `language` and `task` where they are given by name.
        where: place for errors.

    Raises:
        ModelError: a language or task that the model does not know, or a setting that is not followed.
    """
    _check(generation_config, where)
    language, task = (settings.get(name) or getattr(generation_config, name, None) for name in SETTINGS)
    _check_multilingual(generation_config, task, language, where)
    tokens: list[int | None] = [first]
    if task is None and language is None:
        tokens += _forced(config, generation_config, where)
    languages: Mapping[str, int] = getattr(generation_config, "lang_to_id", None) or {}
    second = None
    if language is not None:
        second = _language_id(language, languages, where)
    elif languages and (len(tokens) == 1 or tokens[1] is None):
        second = _UNKNOWN
    if second is not None:
        tokens[1:2] = [second]
    tokens += _task_tokens(generation_config, task, language, tokens, where)
    silent = getattr(generation_config, "no_timestamps_token_id", None)
    if silent is not None and tokens[-1] != silent:
        tokens.append(silent)
    return Start(tuple(token for token in tokens if token is not None), tuple(sorted(languages.values())))


def _check(generation_config: Any, where: str) -> None:
    for key in ("return_timestamps", *_THRESHOLDS):
        value = getattr(generation_config, key, None)
        if value is not None and value is not False:
            problem = f"the generation setting {key}: {value} is not honoured here"
            raise ModelError(where, problem, "remove it from generation_config.json")


def _check_multilingual(generation_config: Any, task: Any, language: Any, where: str) -> None:
    if getattr(generation_config, "is_multilingual", True) is False and (task or language):
        problem = f"this Whisper is English only, and takes no {'task' if task else 'language'}"
        raise ModelError(where, problem, "leave it out, or set is_multilingual: true in generation_config.json")


def _forced(config: Any, generation_config: Any, where: str) -> list[int | None]:
    """Tokens behind the first, of the older setting that says them one by one."""
    forced = getattr(generation_config, "forced_decoder_ids", None)
    forced = getattr(config, "forced_decoder_ids", None) if forced is None else forced
    if not forced or forced[0][0] != 1:
        return []
    if [place for place, _ in forced] != list(range(1, len(forced) + 1)):
        problem = f"the generation setting forced_decoder_ids: {forced} leaves places out"
        raise ModelError(where, problem, "name the tokens of the places 1, 2, ..., or remove it")
    return [token for _, token in forced]


def _language_id(language: Any, languages: Mapping[str, int], where: str) -> int:
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = str(language).lower()
    token = name if name in languages else f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"
    if token not in languages:
        known = [key.strip("<|>") for key in languages]
        raise ModelError(where, f"the model knows no language {language!r}", did_you_mean(name, known))
    return languages[token]


def _task_tokens(
    generation_config: Any, task: Any, language: Any, tokens: list[int | None], where: str
) -> list[int | None]:
    tasks: Mapping[str, int] = getattr(generation_config, "task_to_id", None) or {}
    if task is not None:
        if task not in tasks:
            raise ModelError(where, f"the model knows no task {task!r}", did_you_mean(str(task), list(tasks)))
        return [tasks[task]]
    if language is not None and tasks and not set(tasks.values()) & set(tokens):
        return [tasks["transcribe"]]
    return []
