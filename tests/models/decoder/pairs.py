"""Tiny random PyTorch decoders of every covered family, and their logits and gradients beside redco's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.decoder import Decoder, abstract_params
from redco_cli.models.families.registry import families
from redco_cli.models.hf_config import decoder_config
from redco_cli.models.weights.table import to_params

torch.set_num_threads(1)  # beside XLA's, more threads only wait
QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options: these programs run once."""

LIKE_OTHERS = frozenset(
    {"mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "olmo3", "smollm3", "granite", "starcoder2"}
)
"""Families whose parts, names and ways to store tensors others have too: `make test-all` has their cases.

A family that is not among them, such as a new one, is in every run of the tests.
"""


@dataclass(frozen=True)
class Pair:
    """One model in both libraries."""

    torch_model: Any
    hf_config: Any
    config: DecoderConfig
    state: dict[str, np.ndarray]
    params: Any

    @property
    def module(self) -> Decoder:
        return Decoder(self.config)


@dataclass(frozen=True)
class Batch:
    """Rows without padding, with padding on the right, and on the left."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    weights: np.ndarray

    @property
    def real(self) -> np.ndarray:
        return self.attention_mask.astype(bool)


def where(key: str) -> str:
    return f"recipe.yaml:3: {key}"


def families_and(values: Sequence[Any]) -> list[Any]:
    """Every covered family with one of the values, in turn, as parameters of a test; those like others are slow."""
    return [
        pytest.param(family, values[number % len(values)], marks=pytest.mark.slow if family in LIKE_OTHERS else ())
        for number, family in enumerate(families())
    ]


def hf_config(model_type: str, **changed: Any) -> Any:
    """The family's example, changed."""
    return transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(families()[model_type].example | changed))


def abstract_decoder(hf_config: Any) -> tuple[Decoder, Any]:
    """The decoder for a transformers config, with its abstract parameters."""
    module = Decoder(decoder_config(hf_config, where=where))
    return module, abstract_params(module)


def pair(model_type: str, **changed: Any) -> Pair:
    """A model with random weights, biases and scales too."""
    config = hf_config(model_type, **changed)
    # eager attention is the one that squashes Gemma 2's scores, and the one that adds Falcon's ALiBi twice
    config._attn_implementation = "sdpa" if model_type == "falcon" else "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    own = decoder_config(config, where=where)
    return Pair(model, config, own, state, to_params(state, own))


def batch(length: int = 12, vocab_size: int = 64) -> Batch:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, (3, length)).astype(np.int32)
    ids[0, 3] = ids[1, 2] = 0  # the padding of some families, among the real tokens
    mask = np.ones_like(ids)
    mask[1, -4:] = 0
    mask[2, :5] = 0
    weights = rng.normal(size=(3, length, vocab_size)).astype(np.float32) * mask[..., None]
    return Batch(ids, mask, weights)


def torch_results(models: Pair, given: Batch) -> tuple[np.ndarray, Any]:
    """Logits, and the gradients of their weighted sum in the tree of redco's parameters."""
    models.torch_model.zero_grad()
    ids, mask, weights = map(torch.from_numpy, (given.input_ids, given.attention_mask, given.weights))
    logits = models.torch_model(input_ids=ids.long(), attention_mask=mask.long()).logits
    (logits * weights).sum().backward()
    grads = {
        name: np.zeros(parameter.shape, np.float32) if parameter.grad is None else parameter.grad.numpy()
        for name, parameter in models.torch_model.named_parameters()
    }
    return logits.detach().numpy(), to_params(grads, models.config)


def redco_results(models: Pair, given: Batch, **options: Any) -> tuple[np.ndarray, Any]:
    """The same by redco; `options` are those of `Decoder`."""
    module = Decoder(models.config, **options)

    def weighted(params: Any) -> Any:
        logits = module.apply({"params": params}, given.input_ids, given.attention_mask)
        return (logits * given.weights).sum(), logits

    run = jax.jit(jax.value_and_grad(weighted, has_aux=True), compiler_options=QUICK)
    (_, logits), grads = run(models.params)
    return np.asarray(logits), grads


def logits_of(models: Pair, *inputs: Any, **named: Any) -> np.ndarray:
    """redco's logits."""
    run = jax.jit(lambda params: models.module.apply({"params": params}, *inputs, **named), compiler_options=QUICK)
    return np.asarray(run(models.params))


def largest_difference(found: np.ndarray, expected: np.ndarray, given: Batch) -> float:
    """Of logits, over real tokens."""
    return float(np.abs(found - expected)[given.real].max())


def worst_gradient(found: Any, expected: Any) -> tuple[float, str]:
    """The largest relative error of a parameter's gradient, and which it is.

    A gradient that is nothing but rounding (a key's bias without rotary positions) is measured by the others.
    """
    reference = flatten_dict(expected, sep="/")
    overall = np.sqrt(sum(np.square(grad).sum() for grad in reference.values()))
    errors = {
        path: np.linalg.norm(grad - reference[path]) / (np.linalg.norm(reference[path]) + 1e-2 * overall)
        for path, grad in flatten_dict(found, sep="/").items()
    }
    return max((float(error), path) for path, error in errors.items())
