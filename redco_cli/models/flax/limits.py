"""How large the inputs of a model may be, checked while its program is traced, when shapes are known.

A Flax class that is given a longer sequence than it has positions for clamps the lookup or fails deep inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from redco_cli.errors import ModelError

OFFSET_POSITIONS = frozenset({"roberta", "roberta-prelayernorm", "xlm-roberta"})
"""Types whose positions are counted from pad_token_id + 1 in a table of `max_position_embeddings`."""


def check_inputs(config: Any, arguments: Mapping[str, Any], where: str) -> None:
    """Checks the shapes of named inputs.

    Args:
        config: the transformers config.
        arguments: input name to array (or tracer).
        where: place for errors.

    Raises:
        ModelError: a sequence is longer than the model's positions, or an image is not of the model's size.
    """
    for name in ("input_ids", "decoder_input_ids"):
        if arguments.get(name) is not None:
            check_length(config, name, jnp.shape(arguments[name])[-1], where)
    if arguments.get("pixel_values") is not None:
        _check_image(config, jnp.shape(arguments["pixel_values"]), where)
    if arguments.get("input_features") is not None and config.model_type == "whisper":
        _check_spectrogram(config, jnp.shape(arguments["input_features"]), where)
    if arguments.get("inputs") is not None and config.model_type == "speech-encoder-decoder":
        _check_sound(config.encoder, jnp.shape(arguments["inputs"]), where)


def check_length(config: Any, name: str, length: int, where: str) -> None:
    """Checks that `length` tokens of the input `name` have positions.

    Raises:
        ModelError: they have not.
    """
    limit = sequence_limit(config, name)
    if limit is not None and length > limit[0]:
        raise ModelError(
            where,
            f"{name} has {length} tokens, but the model has positions for {limit[0]} ({limit[1]})",
            "make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        )


def sequence_limit(config: Any, name: str) -> tuple[int, str] | None:
    """The most tokens that the input `name` may have, and the setting that says so; None for no limit."""
    if config.model_type == "whisper":
        return config.max_target_positions, "max_target_positions"
    part = "decoder" if name.startswith("decoder_") else "encoder"
    inner = getattr(config, part, None) or getattr(config, "text_config", None)
    if inner is not None:
        return sequence_limit(inner, name)
    limits = {key: getattr(config, key, None) for key in ("max_position_embeddings", "sliding_window")}
    if config.model_type in OFFSET_POSITIONS and limits["max_position_embeddings"] is not None:
        limits["max_position_embeddings"] -= config.pad_token_id + 1
    known = [(value, key) for key, value in limits.items() if value is not None]
    return min(known) if known else None


def _check_image(config: Any, shape: tuple[int, ...], where: str) -> None:
    inner = getattr(config, "encoder", None) or getattr(config, "vision_config", None) or config
    size = getattr(inner, "image_size", None)
    if size is None or inner.model_type in ("resnet", "regnet"):
        return
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if tuple(shape[-2:]) != (height, width) or len(shape) != 4:
        raise ModelError(
            where,
            f"pixel_values have shape {list(shape)}, but the model takes [B, {inner.num_channels}, {height}, {width}]",
            "resize the images, or set image_size in the model's config",
        )


def _check_spectrogram(config: Any, shape: tuple[int, ...], where: str) -> None:
    wanted = (config.num_mel_bins, 2 * config.max_source_positions)
    if len(shape) != 3 or tuple(shape[1:]) != wanted:
        raise ModelError(
            where,
            f"input_features have shape {list(shape)}, but the model takes [B, {wanted[0]}, {wanted[1]}]",
            "pad or cut them as the model's feature extractor does: mel bins, then frames of max_source_positions",
        )


def _check_sound(encoder: Any, shape: tuple[int, ...], where: str) -> None:
    """Convolutions take a sound of so many samples at least."""
    if len(shape) != 2:
        raise ModelError(where, f"inputs have shape {list(shape)}, but the model takes [B, samples]", "give raw sound")
    least = 1
    for width, stride in reversed(list(zip(encoder.conv_kernel, encoder.conv_stride, strict=True))):
        least = (least - 1) * stride + width
    if shape[1] < least:
        raise ModelError(
            where,
            f"inputs have {shape[1]} samples, but the convolutions of {encoder.model_type} take {least} at least",
            "pad sounds, or leave such short ones out",
        )
