"""Train steps of small models, to be estimated and compiled: sizes can be chosen, meshes are of fake devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.models.resolve import resolve_model
from redco_cli.plugin.contract import Loss
from redco_cli.recipe.schema import ModelSection
from redco_cli.sharding.decide.follow import follow
from redco_cli.sharding.derive import derive
from redco_cli.sharding.gather.gathering import gathering
from redco_cli.training.state import TrainState, new_state
from redco_cli.training.step import make_train_step
from tests.sharding.measure import QUICKLY, device_mesh

OPTIMIZER = optax.adamw(1e-3)
MESHES = {
    "one": {"data": 1, "fsdp": 1, "tensor": 1},
    "data8": {"data": 8, "fsdp": 1, "tensor": 1},
    "data2 tensor4": {"data": 2, "fsdp": 1, "tensor": 4},
    "fsdp8": {"data": 1, "fsdp": 8, "tensor": 1},
}

AS_USERS_DO = {**QUICKLY, "xla_cpu_use_fusion_emitters": True}
"""The tests' own processes leave those emitters out (`tests/conftest.py`), and arrays are kept that they would fuse."""


class Size(NamedTuple):
    """Layers, hidden size, length, batch and vocabulary."""

    layers: int
    hidden: int
    length: int
    batch: int
    vocab: int


@dataclass(frozen=True)
class Model:
    """A loss to be trained.

    Attributes:
        loss_fn: parameters and batch to a scalar.
        params: abstract.
        batch: abstract; leading dim: examples.
    """

    loss_fn: Callable[[Any, Any], Any]
    params: Any
    batch: dict[str, Any]


class Block(nn.Module):
    """A layer of a decoder, in plain Flax."""

    hidden: int
    heads: int

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> tuple[Any, None]:
        y = nn.RMSNorm()(x)
        shape = (*x.shape[:2], self.heads, self.hidden // self.heads)
        q, k, v = (nn.Dense(self.hidden, use_bias=False, name=name)(y).reshape(shape) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(shape[-1])
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + nn.Dense(self.hidden, use_bias=False, name="o")(attended)
        y = nn.RMSNorm()(x)
        gate, up = (nn.Dense(3 * self.hidden, use_bias=False, name=name)(y) for name in ("gate", "up"))
        return x + nn.Dense(self.hidden, use_bias=False, name="down")(nn.silu(gate) * up), None


class Decoder(nn.Module):
    """Stacked layers, scanned."""

    size: Size
    remat: bool

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(self.size.vocab, self.size.hidden)(ids)
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        scanned = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=self.size.layers)
        x, _ = scanned(self.size.hidden, 4, name="layers")(x, None)
        return nn.Dense(self.size.vocab, use_bias=False)(nn.RMSNorm()(x))


class Layers(nn.Module):
    """Two matrices each, with ReLU between."""

    size: Size

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.size.layers):
            x = nn.Dense(self.size.hidden)(nn.relu(nn.Dense(4 * self.size.hidden)(x)))
        return nn.Dense(16)(x)


def _configs(size: Size) -> dict[str, tuple[str, dict[str, Any]]]:
    """Task and Hugging Face config by name."""
    vocab, layers, hidden = {"vocab_size": size.vocab}, size.layers, size.hidden
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    usual = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    wide = {"intermediate_size": 4 * hidden, "max_position_embeddings": size.length}
    gpt2 = {"n_positions": size.length, "n_embd": hidden, "n_layer": layers, "n_head": 4}
    opt = {"ffn_dim": 4 * hidden, "max_position_embeddings": size.length, "word_embed_proj_dim": hidden}
    t5 = {"d_model": hidden, "d_kv": hidden // 4, "d_ff": 4 * hidden, "num_layers": layers, "num_heads": 4}
    vit = {"image_size": 8 * math.isqrt(size.length), "patch_size": 8, "num_labels": 16}
    return {
        "gpt2": ("causal_lm", {"model_type": "gpt2", **vocab, **gpt2}),
        "llama": ("causal_lm", {"model_type": "llama", **vocab, **usual, **wide}),
        "opt": ("causal_lm", {"model_type": "opt", **vocab, **usual, **opt}),
        "bert": ("masked_lm", {"model_type": "bert", **vocab, **usual, **wide, **none}),
        "t5": ("seq2seq", {"model_type": "t5", **vocab, **t5, "decoder_start_token_id": 0}),
        "vit": ("image_classification", {"model_type": "vit", **usual, **vit, "intermediate_size": 4 * hidden, **none}),
    }


@functools.cache
def model(name: str, size: Size, dtype: str = "float32") -> Model:
    """A model by name: a Hugging Face family, `scan`, `scan remat` or `mlp`."""
    ids = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)
    if name == "mlp":
        inputs = jax.ShapeDtypeStruct((size.batch * size.length, size.hidden), jnp.float32)
        labels = jax.ShapeDtypeStruct((size.batch * size.length,), jnp.int32)
        return _linen(Layers(size), inputs, labels)
    if name.startswith("scan"):
        return _linen(Decoder(size, remat=name.endswith("remat")), ids, ids)
    task, config = _configs(size)[name]
    hugging = resolve_model(ModelSection(config=config, task=task, dtype=dtype), where=str)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    if name == "t5":
        half = jax.ShapeDtypeStruct((size.batch, size.length // 2), jnp.int32)
        batch |= {"labels": half, "decoder_input_ids": half}
    elif name == "vit":
        side = config["image_size"]
        images = jax.ShapeDtypeStruct((size.batch, 3, side, side), jnp.float32)
        batch = {"pixel_values": images, "labels": jax.ShapeDtypeStruct((size.batch,), jnp.int32)}

    def loss_fn(params: Any, batch: Any) -> Any:
        if task == "causal_lm":
            return hugging.next_token_loss(params, **batch).sum
        logits = hugging(params, **{key: value for key, value in batch.items() if key != "labels"})
        return _loss(logits, batch["labels"])

    return Model(loss_fn, hugging.abstract, batch)


def _linen(module: nn.Module, inputs: Any, labels: Any) -> Model:
    params = jax.eval_shape(module.init, jax.random.key(0), inputs)["params"]
    batch = {"inputs": inputs, "labels": labels}
    return Model(lambda p, b: _loss(module.apply({"params": p}, b["inputs"]), b["labels"]), params, batch)


def _loss(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).sum()


def compile_step(one: Model, mesh: Mapping[str, int], specs: Any, gathered: Any, micro_batches: int = 1) -> Any:
    """The compiled train step, its batch cut into micro-batches."""
    on = device_mesh(mesh)

    def places(tree: Any) -> Any:
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(on, spec), tree, is_leaf=is_spec)

    loss_fn = gathering(one.loss_fn, specs, gathered, on)
    step = make_train_step(
        lambda variables, batch, key, train: Loss(loss_fn(variables.params, batch), jnp.float32(1)),
        OPTIMIZER,
        lambda count: 1e-3,
        0,
        places(specs),
    )
    state = jax.eval_shape(lambda params: new_state(params, frozenset(), OPTIMIZER), one.params)
    everywhere = places(PartitionSpec())
    lives = places(follow(state.opt_state, one.params, specs))
    state_places = TrainState(everywhere, places(specs), {}, lives, None, everywhere, everywhere)
    batch = {
        name: jax.ShapeDtypeStruct((micro_batches, x.shape[0] // micro_batches, *x.shape[1:]), x.dtype)
        for name, x in one.batch.items()
    }
    over_data = dict.fromkeys(batch, places(PartitionSpec(None, ("data", "fsdp"))))
    jitted = jax.jit(step, in_shardings=(state_places, over_data), out_shardings=(state_places, None), donate_argnums=0)
    return jitted.lower(state, batch).compile(compiler_options=AS_USERS_DO)


def plan(one: Model, mesh: Mapping[str, int]) -> tuple[Any, Any]:
    """Where parameters live, and where they are used."""
    derived = derive(one.loss_fn, one.params, one.batch, mesh)
    return derived.specs, derived.gathered
