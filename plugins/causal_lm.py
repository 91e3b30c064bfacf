"""Causal language modelling on a text column, and continuing prompts.

A text is tokenized, ended with the end mark, and cut at `data.max_length` tokens: the beginning is kept. Shorter
ones are padded, so all batches have one shape. The loss is in nats per token; its exponential is the perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from redco_cli.plugin.contract import IGNORED_LABEL, Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import (
    column,
    cut,
    decode,
    encode,
    generate,
    note_without_loss,
    pad,
    padding_id,
    tokenizer_of,
)


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        text: the column to learn from.
        prompt: the column to continue in prediction; examples without it have their text continued.
    """

    text: str = "text"
    prompt: str = "prompt"


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`input_ids` and `attention_mask` [B, L]; for training also `labels` [B, L], the ids where they are no padding."""
    length, tokenizer = ctx.recipe.data.max_length, tokenizer_of(ctx)
    if ctx.stage == "predict":
        is_prompt = all(ctx.options.prompt in example for example in examples)
        texts = column(examples, ctx.options.prompt if is_prompt else ctx.options.text, str)
        prompts = cut(tokenizer(texts)["input_ids"], length, keep="end")
        input_ids, attention_mask = pad(prompts, length, padding_id(tokenizer), side="left")
        return {"input_ids": input_ids, "attention_mask": attention_mask}
    rows = cut(encode(tokenizer, column(examples, ctx.options.text, str)), length)
    input_ids, attention_mask = pad(rows, length, padding_id(tokenizer))
    labels, _ = pad(rows, length, IGNORED_LABEL)
    note_without_loss(labels)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each next token, the end mark included."""
    loss: Loss = ctx.model.next_token_loss(params, **batch, rng=rng, train=train)
    return loss


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """Token ids [B, N] that continue each prompt."""
    return generate(ctx, params, batch, rng)


def output_fn(ctx: Context, outputs: Any) -> Sequence[str]:
    """The continuations as text."""
    return decode(ctx.tokenizer, outputs)
