"""Causal language modelling on a text column, and continuing prompts.

A text is tokenized and ended with the end mark. Rows have `data.max_length` tokens: several texts share one where the
model can tell them apart (`data.packing`), and of a longer text the beginning is kept (`data.overflow`). The loss is
in nats per token; its exponential is the perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import (
    column,
    decode,
    encode,
    generate,
    refuse_conversation,
    stack_rows,
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


def encode_fn(ctx: Context, example: Example) -> Mapping[str, Any]:
    """The ids of a text, each of which carries loss; for prediction those of a prompt."""
    tokenizer = tokenizer_of(ctx)
    if ctx.stage == "predict":
        name = ctx.options.prompt if ctx.options.prompt in example else ctx.options.text
        return {"input_ids": tokenizer(column([example], name, str))["input_ids"][0]}
    refuse_conversation(example, ctx.options.text)
    return {"input_ids": encode(tokenizer, column([example], ctx.options.text, str))[0]}


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Rows of ids as one batch: fields [B, L], padded."""
    return stack_rows(ctx, examples)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each next token, the end mark included."""
    loss: Loss = ctx.model.next_token_loss(params, **batch, rng=rng, train=train)
    return loss


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """Token ids [B, N] that continue each prompt."""
    return generate(ctx, params, batch, rng)


def output_fn(ctx: Context, outputs: Any) -> Sequence[Any]:
    """The continuations as text."""
    return decode(ctx.tokenizer, outputs)
