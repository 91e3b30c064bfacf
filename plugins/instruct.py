"""Instruction tuning: the model learns the assistant's answers of conversations, and nothing else of them.

An example is a conversation in one of the usual shapes: messages, ShareGPT, Alpaca, or a prompt and a completion. The
tokenizer's chat template makes one sequence of it, and only the tokens that the assistant has to produce carry a
label: its words, the tools it calls, and the end of its turn. A plain text is learned as a whole.

Several conversations share a row of `data.max_length` tokens where the model can tell them apart (`data.packing`). One
that is longer keeps its beginning (`data.overflow`), in prediction its end. When nothing of an answer is left the
example carries no loss; such examples are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from redco_cli.errors import PluginError
from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import (
    Columns,
    Text,
    TrainOn,
    decode,
    encode,
    exact_match,
    generate,
    masked,
    prompt_ids,
    recognise,
    stack_rows,
    tokenizer_of,
)


@dataclass(frozen=True)
class Options(Columns):
    """What `plugin.options` may hold: the names of columns, and these.

    Attributes:
        train_on: learn `all` answers of the assistant, the `last`, the `completion` after the prompt, or `everything`.
        weights: messages have weights other than 0 and 1 in the loss.
    """

    train_on: TrainOn = "all"
    weights: bool = False


def encode_fn(ctx: Context, example: Example) -> Mapping[str, Any]:
    """The ids of a conversation, with labels on what is learned of it; for prediction those before its answer."""
    tokenizer, found = tokenizer_of(ctx), recognise(example, ctx.options)
    if isinstance(found, Text):
        if ctx.stage == "predict":
            return {"input_ids": tokenizer([found.text])["input_ids"][0]}
        (ids,) = encode(tokenizer, [found.text])
        return {"input_ids": ids, "labels": ids, **_weights(ctx, np.ones(len(ids), np.float32))}
    if ctx.stage == "predict":
        return {"input_ids": prompt_ids(tokenizer, found)}
    row = masked(tokenizer, found, ctx.options.train_on, weighted=ctx.options.weights)
    return {"input_ids": row.ids, "labels": row.labels, **_weights(ctx, row.weights)}


def _weights(ctx: Context, weights: Any) -> dict[str, Any]:
    """All rows of a split have the same fields: the option decides, not the example."""
    return {"weights": weights} if ctx.options.weights else {}


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Rows of ids as one batch: fields [B, L], padded."""
    return stack_rows(ctx, examples)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each learned token, given everything before it."""
    loss: Loss = ctx.model.next_token_loss(params, **batch, rng=rng, train=train)
    return loss


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """Token ids [B, N] of the answers."""
    return generate(ctx, params, batch, rng)


def output_fn(ctx: Context, outputs: Any) -> Sequence[Any]:
    """The answers as text."""
    return decode(ctx.tokenizer, outputs)


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """How many answers equal that of their conversation to the letter, of those that have one."""
    found = [recognise(example, ctx.options) for example in examples]
    answers = [None if isinstance(one, Text) else one.answer for one in found]
    pairs = [(said, answer) for said, answer in zip(predictions, answers, strict=True) if answer is not None]
    if not pairs:
        problem = "no conversation ends with an answer of the assistant to compare predictions with"
        raise PluginError("metric_fn", problem, "leave eval.predict out, or add answers to the eval data")
    return {"exact_match": exact_match([said for said, _ in pairs], [answer for _, answer in pairs])}
