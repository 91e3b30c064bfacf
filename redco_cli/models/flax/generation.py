"""Generation by the Flax classes of transformers: the decoder's search and settings, around their encode and decode.

Their own `generate` is not used: it prefers finished beams at the end, and ignores most settings without a word.

Shapes: B batch, P length of the prompts, N of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from redco_cli.errors import MissingKeyError, ModelError
from redco_cli.models.bounds import Rows, check_call
from redco_cli.models.config.tasks import GENERATING, TO_SEQUENCE
from redco_cli.models.flax.limits import check_inputs, check_length
from redco_cli.models.flax.reading import FlaxReader, encoded
from redco_cli.models.flax.whisper import SETTINGS, Start, read_start
from redco_cli.models.generate.engine import outputs_of
from redco_cli.models.generate.prompts import Prompts, moved_right
from redco_cli.models.generate.settings import GenerationSettings, read_settings
from redco_cli.models.generate.stops import Stops, stops_of
from redco_cli.plugin.contract import Params

Array = Any

_NO_CACHE = frozenset({"bert", "electra", "roberta", "roberta-prelayernorm", "xlm-roberta", "big_bird"})
"""Causal models whose Flax class keeps a cache only as part of an encoder-decoder, and fails alone."""
_MAIN_INPUTS = {"causal_lm": "input_ids", "seq2seq": "input_ids", "vision_to_sequence": "pixel_values"}


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
    def rows(self) -> Mapping[str, Rows]:
        """Name of an input to the rows that there are for its values."""

    @property
    def flax(self) -> Any:
        """The transformers model, without parameters."""


def generate(
    model: Generator, params: Params, inputs: Any, attention_mask: Any, rng: Any, settings: Mapping[str, Any]
) -> Any:
    """Token ids [B, N], or more; see `HfFlaxModel.generate`."""
    _check_model(model)
    main = _MAIN_INPUTS.get(model.task, "input_features" if model.config.model_type == "whisper" else "inputs")
    _check_shapes(main, jnp.shape(inputs), attention_mask, model.where)
    check_call(model.rows, {main: inputs} if main == "input_ids" else {}, model.where)
    start, settings = _start(model, settings)
    prompt = jnp.shape(inputs)[1] if start is None else len(start.tokens)
    read = read_settings(model.generation_config, settings, prompt=prompt, where=model.where)
    name = "input_ids" if start is None else "decoder_input_ids"
    check_length(model.config, name, prompt + read.max_new_tokens, model.where)
    check_inputs(model.config, {main: inputs} if start is not None else {}, model.where)
    if read.sample and rng is None:
        raise MissingKeyError(
            model.where, "sampling needs a key", "pass rng= to ctx.model.generate, as predict_fn got it"
        )
    key = rng if read.sample else None
    stops = stops_of(read.stops, settings.get("tokenizer"), model.where)
    return _outputs(params, inputs, attention_mask, key, stops, model=model, settings=read, start=start)


@partial(jax.jit, static_argnames=("model", "settings", "start"))
def _outputs(
    params: Params,
    inputs: Array,
    mask: Array | None,
    rng: Any,
    stops: Stops | None,
    *,
    model: Generator,
    settings: GenerationSettings,
    start: Start | None,
) -> Any:
    """What `outputs_of` returns, compiled once for equal shapes and settings; see `generate`.

    Args:
        params: as `init` returns them.
        inputs: what the encoder reads, or without one the prompts [B, P].
        mask: [B, L], or None.
        rng: key for sampling, or None.
        stops: what ends outputs besides tokens.
        model: the model.
        settings: how tokens are chosen.
        start: what a decoder starts with that has an encoder; None without one.
    """
    reader = FlaxReader(model.flax, params)
    batch = inputs.shape[0]
    mask = None if mask is None else jnp.asarray(mask, jnp.int32)
    wanted = jnp.ones(batch, bool) if mask is None else mask.astype(bool).any(axis=1)
    if start is None:
        real = jnp.ones(inputs.shape, bool) if mask is None else mask.astype(bool)
        ids, real = moved_right(jnp.asarray(inputs, jnp.int32), real)
        return outputs_of(Prompts(reader, settings, ids, real, wanted, ids, stops), rng)
    hidden, encoder_mask = encoded(model.flax, params, inputs, mask)
    ids = start.ids(model.flax, params, hidden)
    source = jnp.asarray(inputs, jnp.int32) if model.task == "seq2seq" else None
    context = (hidden, encoder_mask)
    return outputs_of(Prompts(reader, settings, ids, jnp.ones_like(ids, bool), wanted, source, stops, context), rng)


def _check_model(model: Generator) -> None:
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


def _check_shapes(main: str, shape: tuple[int, ...], mask: Any, where: str) -> None:
    if main == "input_ids" and (len(shape) != 2 or 0 in shape):
        raise ModelError(where, f"{main} have shape {list(shape)}", "give them the shape [B, L]")
    if mask is not None and len(shape) == 2 and jnp.shape(mask) != shape:
        raise ModelError(
            where,
            f"attention_mask has shape {list(jnp.shape(mask))}, but {main} {list(shape)}",
            "give them the same shape",
        )


def _start(model: Generator, settings: Mapping[str, Any]) -> tuple[Start | None, Mapping[str, Any]]:
    """What the decoder of an encoder-decoder starts with, and the settings that are left to be read."""
    if model.task not in TO_SEQUENCE:
        return None, settings
    config = model.generation_config
    first = settings.get("decoder_start_token_id")
    for other in (config.decoder_start_token_id, settings.get("bos_token_id"), config.bos_token_id):
        first = other if first is None else first
    if first is None:
        problem = "the generation config has no decoder_start_token_id"
        raise ModelError(model.where, problem, "add it to the model's config")
    if isinstance(first, list | tuple):
        problem = "the generation setting decoder_start_token_id is a list"
        raise ModelError(model.where, problem, "name one id: rows of a batch may not start differently")
    if model.config.model_type != "whisper":
        return Start((int(first),)), settings
    others = {name: value for name, value in settings.items() if name not in SETTINGS}
    return read_start(model.config, config, int(first), settings, model.where), others
