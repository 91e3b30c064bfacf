"""Generation by the Flax classes of transformers: what they honour, what is refused, and the end ids they miss.

The classes take one end id where checkpoints name several, and ignore most settings of a generation config without
a word. Here several end ids work, and a setting that would be ignored is refused by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from redco_cli.errors import ModelError
from redco_cli.models.config.tasks import GENERATING, TO_SEQUENCE
from redco_cli.models.flax.limits import check_inputs, check_length
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import GenerationSection

_CHOOSING = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "num_beams", "length_penalty")
_FORCING = ("min_length", "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "no_repeat_ngram_size")
_SUPPRESSING = ("suppress_tokens", "begin_suppress_tokens")
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
HONOURED = frozenset({*_CHOOSING, "early_stopping", *_FORCING, *_SUPPRESSING, *_IDS})
"""Settings of a generation config that the Flax classes follow."""

_IGNORED = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "typical_p": 1.0,
    "min_p": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "min_new_tokens": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "exponential_decay_length_penalty": None,
    "num_return_sequences": 1,
}
"""Settings that the Flax classes ignore (or that would change what a row is), with the value that changes nothing."""

_NO_CACHE = frozenset({"bert", "electra", "roberta", "roberta-prelayernorm", "xlm-roberta", "big_bird"})
"""Causal models whose Flax class keeps a cache only as part of an encoder-decoder, and fails alone."""


class Generator(Protocol):
    """What generation needs of a model; see `HfFlaxModel`, which has it."""

    @property
    def config(self) -> Any:
        """The transformers config."""

    @property
    def generation_config(self) -> Any:
        """The transformers generation config; None when the class does not generate."""

    @property
    def task(self) -> str:
        """What the model is for."""

    @property
    def where(self) -> str:
        """The place in the recipe that asked for it."""

    @property
    def flax(self) -> Any:
        """The transformers model, without parameters."""


def generate(
    model: Generator, params: Params, inputs: Any, attention_mask: Any, rng: Any, settings: Mapping[str, Any]
) -> Any:
    """Token ids [B, N]; see `HfFlaxModel.generate`."""
    config = _generation_config(model, settings)
    prompt = 1 if model.task in TO_SEQUENCE else jnp.shape(inputs)[1]
    name = "decoder_input_ids" if model.task in TO_SEQUENCE else "input_ids"
    check_length(model.config, name, prompt + config.max_new_tokens, model.where)
    source = {"seq2seq": "input_ids", "vision_to_sequence": "pixel_values"}.get(model.task)
    check_inputs(model.config, {source: inputs} if source else {}, model.where)
    if config.do_sample and rng is None:
        raise ModelError(model.where, "sampling needs a key", "pass rng= to ctx.model.generate, as predict_fn got it")
    from transformers import FlaxLogitsProcessorList

    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = ends[0]
    processors = FlaxLogitsProcessorList([_OneEnd(ends, config.do_sample)] if len(ends) > 1 else [])
    extra = {} if attention_mask is None else {"attention_mask": attention_mask}
    if model.config.model_type == "encoder-decoder":
        extra["encoder_outputs"] = _encode_text(model, params, inputs, attention_mask)
    outputs = model.flax.generate(
        inputs, generation_config=config, prng_key=rng, params=params, logits_processor=processors, **extra
    )
    return outputs.sequences[:, prompt:]


def _encode_text(model: Generator, params: Params, input_ids: Any, attention_mask: Any) -> Any:
    """The encoder's outputs: `encode` of the class hands positions to BERT where it takes token types, and gets NaN."""
    mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
    return model.flax.module.apply(
        {"params": params},
        method=lambda module: module._get_encoder_module()(input_ids=input_ids, attention_mask=mask, return_dict=True),
    )


def _generation_config(model: Generator, settings: Mapping[str, Any]) -> Any:
    """The model's generation config with `settings` on top, checked."""
    if model.task not in GENERATING or model.generation_config is None:
        raise ModelError(
            model.where,
            f"a model for {model.task} does not generate",
            "choose model.task causal_lm, seq2seq, vision_to_sequence or speech_to_sequence",
        )
    if model.config.model_type in _NO_CACHE and model.task == "causal_lm":
        raise ModelError(
            model.where, f"{type(model.flax).__name__} does not generate", "choose a decoder such as llama or gpt2"
        )
    unknown = sorted(set(settings) - HONOURED)
    if unknown:
        raise ModelError(
            model.where, f"generation knows no setting {unknown[0]}", f"settings: {', '.join(sorted(HONOURED))}"
        )
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = config.max_new_tokens or GenerationSection().max_new_tokens
    config.update(**{key: value for key, value in settings.items() if value is not None})
    _refuse_ignored(config, model.where)
    if config.do_sample and config.num_beams > 1:
        raise ModelError(model.where, "sampling and beam search exclude each other here", "set num_beams: 1")
    if config.eos_token_id is None:
        raise ModelError(model.where, "the generation config has no eos_token_id", "add it to the model's config")
    if model.task in TO_SEQUENCE and config.decoder_start_token_id is None:
        raise ModelError(
            model.where, "the generation config has no decoder_start_token_id", "add it to the model's config"
        )
    _suppress_bad_words(config, model.where)
    return config


def _refuse_ignored(config: Any, where: str) -> None:
    for key, neutral in _IGNORED.items():
        value = getattr(config, key, neutral)
        if value is not None and value != neutral:
            raise ModelError(
                where,
                f"the generation setting {key}: {value} is not honoured by the Flax classes",
                "remove it from generation_config.json",
            )


def _suppress_bad_words(config: Any, where: str) -> None:
    """Single forbidden tokens are suppressed, which the Flax classes can; forbidden sequences they cannot."""
    for words in config.bad_words_ids or ():
        if len(words) > 1:
            raise ModelError(
                where,
                f"the generation setting bad_words_ids: {words} is not honoured by the Flax classes",
                "remove it from generation_config.json",
            )
        config.suppress_tokens = [*(config.suppress_tokens or ()), words[0]]


class _OneEnd:
    """A logits processor that makes several end tokens one: the first gets the score of all.

    When sampling that is their joint probability, else the best of them; the text ends exactly where it would have.
    """

    def __init__(self, ends: list[int], sampling: bool) -> None:
        self.ends, self.sampling = ends, sampling

    def __call__(self, input_ids: Any, scores: Any, cur_len: Any) -> Any:
        ends = scores[:, jnp.array(self.ends)]
        joint = jax.nn.logsumexp(ends, axis=-1) if self.sampling else ends.max(axis=-1)
        return scores.at[:, jnp.array(self.ends)].set(-jnp.inf).at[:, self.ends[0]].set(joint)
