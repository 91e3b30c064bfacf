"""Inputs that every model takes, made up: to trace its program, to plan it, to compare two sets of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.errors import ModelError
from redco_cli.models.config.tasks import TO_SEQUENCE
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import AutoencoderModel, DiffusionModel, UNetModel
from redco_cli.models.flax.limits import sequence_limit
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.own_module import ModuleModel
from redco_cli.plugin.contract import Loss, Params
from redco_cli.plugin.parts import token_loss

_OF_IMAGES = frozenset({"image_classification", "vision_to_sequence", "clip"})
_TOKENS = 16
_SAMPLES = 10 * 16_000
"""Of a sound: ten seconds at 16 kHz."""
_PIXELS = 64
"""Height and width of an image, where the autoencoder was trained for larger ones."""
_PROMPT = 77
"""Tokens that the text encoders of Stable Diffusion pad a prompt to."""


AnyModel = HfFlaxModel | DecoderModel | DiffusionModel | ModuleModel
"""Named, or a plugin's own."""


def example_inputs(model: AnyModel, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch of `rows` examples, the same each time, by the names of the model's inputs.

    Whole numbers for a plugin's own model are 0 and 1: nobody says how many it knows.
    """
    rng = np.random.default_rng(0)
    if isinstance(model, ModuleModel):
        return {name: _made_up((rows, *one.shape[1:]), one.dtype, rng) for name, one in model.example.items()}
    if isinstance(model, DiffusionModel):
        return _example_images(model, rows, rng)
    config, task = model.config, model.task
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    if task in _OF_IMAGES:
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


def default_batch(model: Any, size: int, length: int) -> dict[str, Any]:
    """A training batch without values, as a plugin for the task of the model would give it.

    Args:
        model: a named one.
        size: examples.
        length: tokens in each, where it is made of tokens.
    """
    config, task = model.config, model.task
    if isinstance(model, DiffusionModel):
        return _images_batch(model, size)
    tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)
    if task in _OF_IMAGES:
        pixels = jax.ShapeDtypeStruct((size, *_image(config)), jnp.float32)
        if task == "clip":
            return {"pixel_values": pixels, "input_ids": tokens, "attention_mask": tokens}
        labels = tokens if task == "vision_to_sequence" else jax.ShapeDtypeStruct((size,), jnp.int32)
        return {"pixel_values": pixels, "labels": labels}
    if task == "speech_to_sequence" and config.model_type != "whisper":
        return {"inputs": jax.ShapeDtypeStruct((size, _SAMPLES), jnp.float32), "labels": tokens}
    if task == "speech_to_sequence":
        frames = 2 * config.max_source_positions
        features = jax.ShapeDtypeStruct((size, config.num_mel_bins, frames), jnp.float32)
        return {"input_features": features, "labels": tokens}
    labels = jax.ShapeDtypeStruct((size,), jnp.int32) if task == "sequence_classification" else tokens
    return {"input_ids": tokens, "attention_mask": tokens, "labels": labels}


def default_loss(model: Any, params: Params, batch: Mapping[str, Any], key: Any) -> Loss:
    """The usual loss of such a batch: cross-entropy of what the model's head gives; of images the squared error.

    Of images with their texts it is CLIP's (arXiv 2103.00020), which sees a batch as a whole.

    Args:
        model: a named one.
        params: its parameters.
        batch: as `default_batch` has it.
        key: for dropout.

    Raises:
        ModelError: the task has none.
    """
    if isinstance(model, DiffusionModel):
        return _images_loss(model, params, batch)
    if model.task == "causal_lm":
        found: Loss = model.next_token_loss(params, **batch, rng=key, train=True)
        return Loss(found.sum, found.weight)
    inputs = {name: leaf for name, leaf in batch.items() if name != "labels"}
    if model.task in TO_SEQUENCE:
        inputs["decoder_input_ids"] = model.decoder_inputs(batch["labels"])
    logits = model(params, **inputs, rng=key, train=True)
    if model.task == "clip":
        pairs = jnp.arange(batch["input_ids"].shape[0])
        ways = logits.logits_per_image, logits.logits_per_text
        images, texts = (token_loss(way, pairs) for way in ways)
        return Loss((images.sum + texts.sum) / 2, images.weight)
    if not hasattr(logits, "shape") or model.task == "text_encoder":
        problem = f"there is no default loss for the task {model.task}"
        raise ModelError(model.where, problem, "inspect a recipe, with the loss of its plugin")
    found = token_loss(logits, batch["labels"])
    return Loss(found.sum, found.weight)


def _example_images(model: DiffusionModel, rows: int, rng: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Latents of the size that a U-Net was trained for, at some time of a prompt; or small images."""
    if isinstance(model, AutoencoderModel):
        config = model.config
        side = min(config.sample_size, _PIXELS)
        return {"images": rng.uniform(-1, 1, (rows, side, side, config.in_channels)).astype(np.float32)}
    assert isinstance(model, UNetModel)
    c = model.config
    return {
        "latents": rng.normal(size=(rows, c.sample_size, c.sample_size, c.in_channels)).astype(np.float32),
        "timestep": rng.integers(0, 1000, rows).astype(np.int32),
        "states": rng.normal(size=(rows, _PROMPT, c.cross_attention_dim)).astype(np.float32),
    }


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


def _images_batch(model: DiffusionModel, size: int) -> dict[str, Any]:
    """Noisy latents at some time of a prompt, and what is to be predicted of them; for an autoencoder images."""
    side, rows = model.config.sample_size, jax.ShapeDtypeStruct((size,), jnp.int32)
    images = jax.ShapeDtypeStruct((size, side, side, model.config.in_channels), jnp.float32)
    if not isinstance(model, UNetModel):
        return {"images": images}
    states = jax.ShapeDtypeStruct((size, _PROMPT, model.config.cross_attention_dim), jnp.float32)
    target = jax.ShapeDtypeStruct((size, side, side, model.config.out_channels), jnp.float32)
    return {"latents": images, "timestep": rows, "states": states, "target": target}


def _images_loss(model: DiffusionModel, params: Params, batch: Mapping[str, Any]) -> Loss:
    """The mean squared error of what is predicted; of an autoencoder that of its images."""
    target = batch.get("target", batch.get("images"))
    found = model(params, **{name: leaf for name, leaf in batch.items() if name != "target"})
    error = jnp.square(found - target).mean((1, 2, 3))
    return Loss(error.sum(), error.size)
