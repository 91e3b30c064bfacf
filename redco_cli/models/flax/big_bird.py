"""BigBird's two kinds of attention, chosen by the length of the input as PyTorch's class chooses.

Block-sparse attention needs more blocks than those that every token sees. Shorter inputs get full attention, and longer
ones are padded to whole blocks (`BigBirdModel.forward` and `_pad_to_block_size` in PyTorch's transformers). In
training, the random blocks are drawn anew in every step, as the key of dropout says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.errors import ModelError


def for_inputs(flax: Any, arguments: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any], int | None]:
    """A class and its inputs, so that its attention is what PyTorch computes for them.

    Args:
        flax: the transformers model, of any type.
        arguments: its inputs by name.
        where: place for errors.

    Returns:
        The class, its inputs, and how long outputs for each token are to be; None where nothing was padded.

    Raises:
        ModelError: a decoder with block-sparse attention, which would see the tokens that it should predict.
    """
    config = flax.config
    if config.model_type != "big_bird" or config.attention_type != "block_sparse":
        return flax, dict(arguments), None
    length = int(jnp.shape(arguments["input_ids"])[-1])
    if length <= (5 + 2 * config.num_random_blocks) * config.block_size:
        return with_full_attention(flax), dict(arguments), None
    if config.is_decoder:
        problem = f"big_bird with is_decoder has no block_sparse attention, which {length} tokens ask for"
        raise ModelError(where, problem, "set attention_type: original_full in the model's config")
    missing = -length % config.block_size
    if not missing:
        return flax, dict(arguments), None
    ids = jnp.asarray(arguments["input_ids"])
    named = {**arguments, "attention_mask": arguments.get("attention_mask")}
    if named["attention_mask"] is None:
        named["attention_mask"] = jnp.ones(ids.shape, jnp.int32)
    fill = {"input_ids": config.pad_token_id, "position_ids": config.pad_token_id}
    positions = jnp.minimum(jnp.arange(length + missing), config.max_position_embeddings - 1)
    if named.get("position_ids") is None:
        named["position_ids"] = jnp.broadcast_to(positions[:length], ids.shape)
    for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids"):
        if named.get(name) is not None:
            named[name] = jnp.pad(named[name], ((0, 0), (0, missing)), constant_values=fill.get(name, 0))
    return flax, named, length


def cropped(outputs: Any, length: int, padded: int) -> Any:
    """Outputs of each token without those of padding.

    Args:
        outputs: of the class.
        length: how many tokens there were.
        padded: how many with the padding.
    """
    fields = (name for name in outputs if name.endswith("logits"))
    changed = {name: outputs[name][:, :length] for name in fields if outputs[name].shape[1:2] == (padded,)}
    return outputs.replace(**changed)


def with_full_attention(flax: Any) -> Any:
    """The same class with full attention; its parameters are the same."""
    full = copy.copy(flax)
    full._config = copy.deepcopy(flax.config)
    full._config.attention_type = "original_full"
    full._module = flax.module.clone(config=full._config)
    return full


def drawing(rng: Any) -> dict[str, Any]:
    """The key for random blocks as the class takes it, from that for dropout."""
    return {"indices_rng": jax.random.fold_in(rng, 1)}
