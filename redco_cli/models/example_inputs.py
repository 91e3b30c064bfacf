"""Inputs that every model takes, made up: to trace its program, or to compare two sets of its parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.models.config.tasks import TO_SEQUENCE
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.flax.limits import sequence_limit
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.own_module import ModuleModel
from redco_cli.plugin.contract import Params

_TOKENS = 16


AnyModel = HfFlaxModel | DecoderModel | ModuleModel
"""Named, or a plugin's own."""


def example_inputs(model: AnyModel, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch of `rows` examples, the same each time, by the names of the model's inputs.

    Whole numbers for a plugin's own model are 0 and 1: nobody says how many it knows.
    """
    rng = np.random.default_rng(0)
    if isinstance(model, ModuleModel):
        return {name: _made_up((rows, *one.shape[1:]), one.dtype, rng) for name, one in model.example.items()}
    config, task = model.config, model.task
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    if task in ("image_classification", "vision_to_sequence", "clip"):
        inputs["pixel_values"] = rng.normal(size=(rows, *_image(config))).astype(np.float32)
    if config.model_type == "whisper":
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        inputs["input_features"] = rng.normal(size=shape).astype(np.float32)
    elif task == "speech_to_sequence":
        inputs["inputs"] = rng.normal(size=(rows, 1600)).astype(np.float32)
    if not inputs or task == "clip":
        inputs["input_ids"] = _tokens(model, "input_ids", rows, rng)
    if task in TO_SEQUENCE:
        inputs["decoder_input_ids"] = _tokens(model, "decoder_input_ids", rows, rng)
    return inputs


def example_loss(model: AnyModel, params: Params, inputs: Any) -> Any:
    """A scalar that depends on all parameters: the loss of the next token for a decoder, else the mean square of what
    the head gives.
    """
    if isinstance(model, DecoderModel) and model.task == "causal_lm":
        ids = inputs["input_ids"]
        loss = model.next_token_loss(params, ids, labels=ids)
        return loss.sum / loss.weight
    outputs = model(params, **inputs)
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum((jnp.square(leaf.astype(jnp.float32)).mean() for leaf in arrays), jnp.float32(0))


def _made_up(shape: tuple[int, ...], dtype: Any, rng: Any) -> np.ndarray[Any, Any]:
    floating = jnp.issubdtype(dtype, jnp.floating)
    values: np.ndarray[Any, Any] = rng.normal(size=shape) if floating else rng.integers(0, 2, shape)
    return values.astype(dtype)


def _tokens(model: HfFlaxModel | DecoderModel, name: str, rows: int, rng: Any) -> np.ndarray[Any, Any]:
    """Random tokens; each row ends with the end token, which some heads look for."""
    part = "decoder" if name.startswith("decoder") else "encoder"
    config = getattr(model.config, part, None) or getattr(model.config, "text_config", None) or model.config
    limit = sequence_limit(model.config, name)
    length = _TOKENS if limit is None else min(_TOKENS, limit[0])
    ids: np.ndarray[Any, Any] = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    end = config.eos_token_id
    if isinstance(end, int) and 0 <= end < config.vocab_size:
        ids[ids == end] = (end + 1) % config.vocab_size
        ids[:, -1] = end
    return ids


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    inner = getattr(config, "encoder", None) or getattr(config, "vision_config", None) or config
    size = getattr(inner, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return inner.num_channels, height, width
