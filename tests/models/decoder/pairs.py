"""Tiny random PyTorch decoders of every covered family, and their logits and gradients beside redco's."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.weights.table import decoder_config, to_params

torch.set_num_threads(1)  # beside XLA's, more threads only wait
QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options: these programs run once."""

_SIZES = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
_MODERN = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
_GPT = {"vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
_WIDE_HEADS = {**_MODERN, "head_dim": 8}
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALLEST: dict[str, dict[str, Any]] = {
    "llama": _MODERN,
    "mistral": {**_MODERN, "sliding_window": 4},
    "qwen2": _MODERN,
    "qwen3": _WIDE_HEADS,
    "gemma": _WIDE_HEADS,
    "gemma2": {**_WIDE_HEADS, "sliding_window": 4, "query_pre_attn_scalar": 5, "num_hidden_layers": 3},
    "gemma3_text": {**_WIDE_HEADS, "sliding_window": 4, "query_pre_attn_scalar": 5, "sliding_window_pattern": 2},
    "mixtral": {**_MODERN, "num_local_experts": 4},
    "qwen2_moe": {**_MODERN, **_EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_WIDE_HEADS, **_EXPERTS},
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 2},
    "gpt_neox": {**_SIZES, "intermediate_size": 32, "rotary_pct": 0.5},
    "opt": {**_SIZES, "ffn_dim": 32, "max_position_embeddings": 40},
    "bloom": {"vocab_size": 64, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    "phi3": {**_MODERN, **_SPECIAL_IDS},
    "olmo2": _MODERN,
    "starcoder2": _MODERN,
    "smollm3": {**_MODERN, **_SPECIAL_IDS, "no_rope_layer_interval": 2},
    "granite": {**_MODERN, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "falcon": {**_SIZES, "ffn_hidden_size": 32},
}
"""The smallest config of each family that has what makes the family."""


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


def hf_config(model_type: str, **changed: Any) -> Any:
    return transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(SMALLEST[model_type] | changed))


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
