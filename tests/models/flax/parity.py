"""A tiny random model by PyTorch and by redco: logits, gradients, and which parameters are trained."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict

from redco_cli.models.flax.naming import torch_name
from redco_cli.models.flax.proven import Case
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import CONFIGS, TORCH_CLASSES, config_for, inputs_for, logits_of, where

PARTS = {
    ("clip", "clip_text_model"): "text_config",
    ("clip", "clip_vision_model"): "vision_config",
    ("speech-encoder-decoder", "wav2vec2"): "encoder",
    ("vision-text-dual-encoder", "vit"): "vision_config",
}
"""Composite model type and the type of a part of it, to the name of the part."""
ONLY_PARTS = {
    "wav2vec2": CONFIGS["speech-encoder-decoder"]["encoder"],
    "clip_vision_model": CONFIGS["clip"]["vision_config"],
}

_READ_AT_THE_END = ("sequence_classification", "question_answering")
"""Tasks that BART's kind reads at the last `eos_token_id`."""
_BARRED = 1e5
"""Logits beyond are those of tokens that cannot be the answer: of no size."""


@dataclass(frozen=True)
class Run:
    """What a model computes for a batch.

    Attributes:
        logits: by name.
        gradients: by PyTorch's name, of a fixed weighted sum of the logits; None where there is none.
    """

    logits: Mapping[str, Any]
    gradients: Mapping[str, Any]


def case_config(model_type: str, case: Case, task: str, without: str = "") -> dict[str, Any]:
    """The inline config of a case; a setting that it is to be `without` is as by default."""
    config = config_for(case.inside or model_type, task)
    part = config[PARTS[case.inside, model_type]] if case.inside else config
    if without in part and part[without] == case.settings[without]:
        del part[without]
    part.update({key: value for key, value in case.settings.items() if key != without})
    return config


def built(config: Mapping[str, Any], task: str, case: Case | None = None) -> Any:
    """A PyTorch model with random weights, biases and scales too; in training, only what the case says is dropped."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.CONFIG_MAPPING[config["model_type"]](**values)
    if case is not None and case.trains:
        _drop_nothing_else(hf_config, config, case)
    hf_config._attn_implementation = "eager"
    torch.manual_seed(0)
    torch_class = getattr(transformers, TORCH_CLASSES[task])
    model = (torch_class.from_config if hasattr(torch_class, "from_config") else torch_class)(hf_config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.train(case is not None and case.trains)


def _drop_nothing_else(hf_config: Any, given: Mapping[str, Any], case: Case) -> None:
    for key, value in hf_config.to_dict().items():
        rate = "drop" in key and isinstance(value, int | float) and key not in given
        if key in hf_config.sub_configs:
            _drop_nothing_else(getattr(hf_config, key), given.get(key, {}), case)
        elif rate or (key == "apply_spec_augment" and not case.masks):
            setattr(hf_config, key, type(value)(0))


def case_inputs(model: Any, model_type: str, task: str, length: int) -> dict[str, np.ndarray]:
    """Inputs of a batch of two that fit a config, with padding among the tokens."""
    config = model.config
    inputs = inputs_for(model_type, task, length=length)
    rng = np.random.default_rng(3)
    vision = getattr(config, "vision_config", None) or (config.encoder if task == "vision_to_sequence" else config)
    if "pixel_values" in inputs:
        size = getattr(vision, "image_size", 16)
        inputs["pixel_values"] = rng.normal(size=(2, vision.num_channels, size, size)).astype(np.float32)
    if "input_features" in inputs:
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        inputs["input_features"] = rng.normal(size=shape).astype(np.float32)
    text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
    for name in ("input_ids", "decoder_input_ids"):
        if name in inputs and text.pad_token_id is not None:
            ids = inputs[name]
            ids[ids == text.eos_token_id] = 9
            ids[0, 3] = ids[1, -1] = text.pad_token_id
            ends = task == "clip" and text.eos_token_id is not None
            if ends or (model_type in ("bart", "mbart") and task in _READ_AT_THE_END):
                ids[:, 4] = text.eos_token_id
            if model_type == "big_bird" and task == "question_answering":
                ids[:, 2] = text.sep_token_id % text.vocab_size
    return inputs


def torch_run(model: Any, inputs: Mapping[str, np.ndarray]) -> Run:
    """Logits, and the gradients of all parameters that PyTorch trains."""
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    tensors = {name: value.long() if value.dtype == torch.int32 else value for name, value in tensors.items()}
    model.zero_grad()
    outputs = logits_of(model(**tensors))
    weights = _weights({name: tuple(value.shape) for name, value in outputs.items()}, inputs)
    sum((value * torch.from_numpy(weights[name])).sum() for name, value in outputs.items()).backward()
    return Run(
        {name: _comparable(value.detach().numpy(), weights[name]) for name, value in outputs.items()},
        {
            name: None if one.grad is None else one.grad.numpy().copy()
            for name, one in model.named_parameters()
            if one.requires_grad
        },
    )


def _weights(shapes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of each logit in the sum: 0 behind padding."""
    found, mask = {}, inputs.get("attention_mask")
    for name, shape in sorted(shapes.items()):
        weights = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
        if mask is not None and len(shape) > 1 and shape[:2] == mask.shape:
            weights *= mask.reshape(mask.shape + (1,) * (len(shape) - 2))
        found[name] = weights
    return found


def _comparable(logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.where((weights != 0) & (np.abs(logits) < _BARRED), logits, 0)


def redco_run(directory: Path, task: str, inputs: Mapping[str, np.ndarray], *, trains: bool = False) -> Run:
    """The same by redco, from the saved model; gradients by PyTorch's names.

    Raises:
        AssertionError: a parameter is trained that is none in PyTorch.
    """
    section = ModelSection(name=str(directory), task=task, implementation="hf_flax")
    model = resolve_model(section, where=where)
    params = load_params(model, directory).params

    def summed(params: Any) -> tuple[Any, dict[str, Any]]:
        switches = {"train": True, "rng": jax.random.key(0)} if trains else {}
        outputs = model(params, **inputs, **switches)
        named = outputs if hasattr(outputs, "items") else {"logits": outputs}
        named = {name: value for name, value in named.items() if "logits" in name}
        weights = _weights({name: value.shape for name, value in named.items()}, inputs)
        return sum(jnp.sum(value * weights[name]) for name, value in named.items()), (named, weights)

    gradients, (logits, weights) = jax.grad(summed, has_aux=True)(params)
    found = {}
    for path, value in flatten_dict(gradients).items():
        if not any(re.fullmatch(pattern, "/".join(path)) for pattern in model.frozen):
            name, order = torch_name(path, value.ndim)
            found[name] = np.asarray(value if order is None else value.transpose(order))
    return Run({name: _comparable(np.asarray(value), weights[name]) for name, value in logits.items()}, found)


def save(model: Any, directory: Path) -> None:
    """Saves a PyTorch model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)


def faults(expected: Run, found: Run, tolerance: float = 1e-4) -> list[str]:
    """What is not the same: one line each, empty for nothing."""
    lines = [] if expected.logits.keys() == found.logits.keys() else [f"logits: {list(expected.logits)}"]
    lines += _apart("logits", expected.logits, found.logits, tolerance)
    untrained = sorted(found.gradients.keys() - expected.gradients.keys())
    lines += [f"{name} is trained, and none of PyTorch's parameters" for name in untrained]
    missing = [name for name, one in expected.gradients.items() if one is not None and np.any(one)]
    lines += [f"{name} is not trained, but by PyTorch" for name in missing if name not in found.gradients]
    return lines + _apart("gradient", expected.gradients, found.gradients, tolerance)


def _apart(what: str, expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float) -> list[str]:
    largest = max((float(np.abs(one).max()) for one in expected.values() if one is not None), default=0.0)
    lines = []
    for name in expected.keys() & found.keys():
        wanted, got = (0.0 if one is None else one for one in (expected[name], found[name]))
        if np.shape(wanted) != np.shape(got) and () not in (np.shape(wanted), np.shape(got)):
            lines.append(f"{what} {name}: {np.shape(wanted)} {np.shape(got)}")
            continue
        apart = float(np.abs(wanted - got).max())
        if not apart <= tolerance * max(largest, 1e-30):
            lines.append(f"{what} {name}: {apart / max(largest, 1e-30):.2g}")
    return lines


def without_effect(
    model: Any, inputs: Mapping[str, np.ndarray], expected: Run, model_type: str, case: Case, task: str
) -> list[str]:
    """The settings of a case that change nothing in PyTorch, compared with their defaults."""

    def matters(key: str) -> bool:
        try:
            other = built(case_config(model_type, case, task, without=key), task, case)
            return _differ(model, other, inputs, expected)
        except (ValueError, IndexError, RuntimeError, AssertionError):
            return True  # without it, the model cannot even be built, or does not take these inputs

    return [key for key in case.settings if not matters(key)]


def _differ(model: Any, other: Any, inputs: Mapping[str, np.ndarray], expected: Run) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    if {name: one.shape for name, one in ours.items()} != {name: one.shape for name, one in theirs.items()}:
        return True
    other.load_state_dict(ours)
    return bool(faults(expected, torch_run(other, inputs), 2e-4))


def composed_config(kind: str, first: str, second: str) -> dict[str, Any]:
    """The inline config of a composite of two parts, the first of them wider."""
    names = ("encoder", "decoder") if "encoder-decoder" in kind else ("vision_config", "text_config")
    config = copy.deepcopy(CONFIGS[kind]) | {"model_type": kind}
    known = {**CONFIGS, **ONLY_PARTS}
    config[names[0]] = copy.deepcopy(known[first]) | {"model_type": first, "hidden_size": 24}
    config[names[1]] = copy.deepcopy(known[second]) | {"model_type": second}
    if names[1] == "decoder":
        config["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
    return config
