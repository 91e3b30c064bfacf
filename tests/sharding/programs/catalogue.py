"""Programs to shard: every Hugging Face Flax family in a tiny config, our decoder, and small modules of many styles.

Sizes are such that eight devices divide them: 8 heads, hidden 64, vocabulary 96, 3 layers, batch 8, sequence 16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.models.config.tasks import flax_class_names
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.sharding.batch_shards import batch_sharded
from tests.models.flax.tiny import CONFIGS, config_for, where
from tests.sharding.programs.small import SMALL, token_loss

BATCH, LENGTH = 8, 16
_SIZES: dict[int, tuple[str, ...]] = {
    64: ("hidden_size", "d_model", "n_embd", "dim"),
    8: (
        *("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "d_kv", "groups_width"),
        *("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"),
    ),
    3: ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"),
    256: ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"),
    96: ("vocab_size",),
    32: ("embedding_size", "projection_dim"),
    16: ("num_mel_bins", "head_dim", "max_source_positions"),
}
_CHANGED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "opt": {"word_embed_proj_dim": 64},
    "roformer": {"embedding_size": 64},
    "mistral": {"num_key_value_heads": 2},
    "gemma": {"num_key_value_heads": 1},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64]},
    "regnet": {"embedding_size": 16, "hidden_sizes": [32, 64]},
}
_TASKS = ("causal_lm", "masked_lm", "seq2seq", "image_classification", "vision_to_sequence", "speech_to_sequence")
"""What a family is trained for here: the first of these that it has, BERT-like ones as masked language models."""
_MASKED = ("albert", "bert", "big_bird", "distilbert", "electra", "roberta", "roberta-prelayernorm", "roformer")
_MODERN = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8}
OURS: dict[str, dict[str, Any]] = {
    "ours-llama": {**_MODERN, "num_key_value_heads": 4},
    "ours-gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 32},
    "ours-mixtral": {**_MODERN, "num_key_value_heads": 4, "num_local_experts": 8},
    "ours-gemma2": {**_MODERN, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
}
"""Our decoder, by name and model type: what its config says besides."""
FAMILIES = tuple(family for family in CONFIGS if family != "clip_text_model")
"""All but one that has no loss of its own: the text half of CLIP, which `clip` has."""
NAMES = (*FAMILIES, *OURS, *SMALL)


@dataclass(frozen=True)
class Program:
    """Something that can be trained.

    Attributes:
        name: one of `NAMES`, or `family:task`.
        loss_fn: parameters and batch to a scalar.
        params: abstract.
        batch: arrays with a leading dim of `BATCH`.
    """

    name: str
    loss_fn: Callable[[Any, Any], Any]
    params: Any
    batch: dict[str, Any]

    def values(self, seed: int = 0) -> Any:
        """Random parameters: matrices small, vectors positive as a variance must be."""
        rng = np.random.default_rng(seed)

        def draw(leaf: Any) -> Any:
            if len(leaf.shape) < 2:
                return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
            return (rng.normal(size=leaf.shape) * 0.1).astype(leaf.dtype)

        return jax.tree.map(draw, self.params)


@functools.cache
def program(name: str) -> Program:
    """The program of a name."""
    if name in SMALL:
        loss_fn, shapes, batch = SMALL[name]()
        is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
        params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape)
        return Program(name, loss_fn, params, batch)
    if name in OURS:
        return _ours(name)
    family, _, task = name.partition(":")
    return _family(name, family, task or _task(family))


def _task(family: str) -> str:
    tasks = flax_class_names(family)
    if family in (*_MASKED, "xlm-roberta"):
        return "masked_lm"
    if "encoder_layers" in CONFIGS[family] and "seq2seq" in tasks:
        return "seq2seq"
    return next((task for task in _TASKS if task in tasks), "clip")


def _scaled(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    sizes = {key: size for size, keys in _SIZES.items() for key in keys}
    return {key: sizes.get(key, _scaled(value)) for key, value in config.items()}


def _family(name: str, family: str, task: str) -> Program:
    config = _scaled(config_for(family, task)) | _CHANGED.get(family, {})
    model = resolve_model(ModelSection(config=config, task=task, implementation="hf_flax"), where=where)
    batch = _batch(family, task)

    def loss_fn(params: Any, batch: Any) -> Any:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        outputs = model(params, **inputs)
        if task == "clip":
            pairs = jnp.arange(BATCH)
            return token_loss(outputs.logits_per_text, pairs) + token_loss(outputs.logits_per_image, pairs)
        if task == "question_answering":
            return token_loss(outputs.start_logits, batch["labels"]) + token_loss(outputs.end_logits, batch["labels"])
        if task == "causal_lm":
            return token_loss(outputs[:, :-1], batch["labels"][:, 1:])
        return token_loss(outputs, batch["labels"])

    return Program(name, loss_fn, model.abstract, batch)


def _ours(name: str) -> Program:
    """The decoder's own loss, which sums the gradient of its head apart for each row."""
    config = {"model_type": name.removeprefix("ours-"), "vocab_size": 96, **OURS[name]}
    model = resolve_model(ModelSection(config=config, implementation="decoder"), where=where)
    assert isinstance(model, DecoderModel)

    def loss_fn(params: Any, batch: Any) -> Any:
        with batch_sharded(BATCH):
            loss = model.next_token_loss(params, **batch)
        return loss.sum / loss.weight

    return Program(name, loss_fn, model.abstract, _batch("llama", "causal_lm"))


def _batch(family: str, task: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def tokens(length: int = LENGTH) -> Any:
        return rng.integers(4, 90, (BATCH, length)).astype(np.int32)

    text = {"input_ids": tokens(), "attention_mask": np.ones((BATCH, LENGTH), np.int32)}
    text["attention_mask"][1, LENGTH - 3 :] = 0
    image = {"pixel_values": rng.normal(size=(BATCH, 3, 16, 16)).astype(np.float32)}
    decoder = {"decoder_input_ids": tokens(8), "labels": tokens(8)}
    if task == "clip":
        text["input_ids"][:, 4] = 3
        return text | image
    if task == "image_classification":
        return image | {"labels": rng.integers(0, 3, BATCH).astype(np.int32)}
    if task == "vision_to_sequence":
        return image | decoder
    if family == "whisper":
        return {"input_features": rng.normal(size=(BATCH, 16, 32)).astype(np.float32)} | decoder
    if task == "speech_to_sequence":
        return {"inputs": rng.normal(size=(BATCH, 200)).astype(np.float32)} | decoder
    if task == "seq2seq":
        return text | decoder
    if task in ("sequence_classification", "question_answering"):
        text["input_ids"][:, 4] = 2
        return text | {"labels": rng.integers(0, 3, BATCH).astype(np.int32)}
    return text | {"labels": tokens()}
