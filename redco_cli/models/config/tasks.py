"""Which head a model gets: the tasks, the Flax class of each model type for each task, and what `auto` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.families.registry import families
from redco_cli.recipe.explain import did_you_mean

_MAPPINGS = {
    "causal_lm": "FLAX_MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "FLAX_MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classification": "FLAX_MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification": "FLAX_MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question_answering": "FLAX_MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image_classification": "FLAX_MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "vision_to_sequence": "FLAX_MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES",
    "speech_to_sequence": "FLAX_MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
"""Task to its table in transformers. Where one class serves two tasks (BART), `auto` takes the first of them here."""

_CLIP = {"clip": "FlaxCLIPModel", "vision-text-dual-encoder": "FlaxVisionTextDualEncoderModel"}
_TEXT_ENCODERS = {"clip_text_model": "FlaxCLIPTextModel"}

TO_SEQUENCE = frozenset({"seq2seq", "vision_to_sequence", "speech_to_sequence"})
"""Tasks with an encoder and a decoder that writes tokens."""
GENERATING = TO_SEQUENCE | {"causal_lm"}
"""Tasks whose models generate."""


def flax_class_names(model_type: str) -> Mapping[str, str]:
    """Task to the name of the Flax class that does it for a model type; empty when there is none."""
    from transformers.models.auto import modeling_flax_auto

    names = {task: getattr(modeling_flax_auto, mapping).get(model_type) for task, mapping in _MAPPINGS.items()}
    names |= {"clip": _CLIP.get(model_type), "text_encoder": _TEXT_ENCODERS.get(model_type)}
    return {task: name for task, name in names.items() if name is not None}


def choose_task(requested: str, config: Any, *, where: Callable[[str], str]) -> str:
    """The task of a model.

    Args:
        requested: `model.task` of the recipe. `auto` reads `architectures` of the config; a config without it gets the
            only task of its model type.
        config: a transformers config.
        where: dotted recipe key to its place, for errors.

    Raises:
        ModelError: the model type has no Flax class for the task, or `auto` finds no answer.
    """
    classes = flax_class_names(config.model_type)
    tasks = ", ".join(classes)
    if not classes and config.model_type in families():
        raise ModelError(
            where("model"),
            f"transformers has no Flax class for the model type {config.model_type}",
            "leave it to the decoder: model.implementation: auto, model.task: causal_lm",
        )
    if not classes:
        raise ModelError(
            where("model"),
            f"neither the decoder nor a Flax class of transformers covers the model type {config.model_type}",
            "choose a model of one of the types: " + ", ".join(supported_model_types()),
        )
    if requested != "auto":
        if requested not in classes:
            raise ModelError(where("model.task"), f"{config.model_type} has no {requested} head", f"it has: {tasks}")
        return requested
    for architecture in config.architectures or ():
        for task, name in classes.items():
            if name.removeprefix("Flax") == architecture.removeprefix("Flax"):
                return task
    if len(classes) == 1:
        return next(iter(classes))
    named = f"architectures {config.architectures}" if config.architectures else "no architectures"
    raise ModelError(
        where("model.task"),
        f"the config of this {config.model_type} has {named}, which does not say which head is meant",
        f"set model.task to one of: {tasks}",
    )


def supported_model_types() -> list[str]:
    """Every model type that the decoder covers, at least its text part, or that has a Flax class, sorted."""
    from transformers.models.auto import modeling_flax_auto

    tables = [getattr(modeling_flax_auto, mapping) for mapping in _MAPPINGS.values()]
    by_decoder = set(families()).union(*(family.part_of for family in families().values()))
    return sorted(
        {model_type for table in tables for model_type in table} | set(_CLIP) | set(_TEXT_ENCODERS) | by_decoder
    )


def unknown_model_type(model_type: object, *, where: Callable[[str], str]) -> ModelError:
    """The error for an inline config whose model type does not exist."""
    return ModelError(
        where("model.config.model_type"),
        f"{model_type!r} is no model type",
        did_you_mean(str(model_type), supported_model_types()),
    )
