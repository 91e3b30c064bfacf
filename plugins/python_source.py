"""A byte-level language model of Python: reads the standard library's own source, then continues prompts.

The whole contract on one page; `causal_lm` is the same for your own text. Data is the source of the Python that runs
this, about seven million bytes. Whole modules are held out for evaluation, chosen by a hash of their name, so the
choice is the same on every machine. Each split is one long text cut into windows of `data.max_length` bytes;
neighbours share one byte, so every byte but the first is predicted exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import (
    column,
    cut,
    decode,
    generate,
    held_out,
    pad,
    standard_library,
    tokenizer_of,
)


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        eval_share: share of the modules, 0 to 1, that training never sees.
        eval_windows: so many windows of them are evaluated, evenly spread.
    """

    eval_share: float = 0.05
    eval_windows: int = 64


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Windows of source code: `text`, and as `prompt` its first half."""
    modules = standard_library()
    source = "\n".join(
        text for name, text in modules.items() if held_out(name, ctx.options.eval_share) == (split == "eval")
    )
    length = ctx.recipe.data.max_length
    starts = range(0, len(source) - length + 1, length - 1)
    if split == "eval":
        starts = starts[:: max(1, len(starts) // ctx.options.eval_windows)][: ctx.options.eval_windows]
    return [{"text": source[i : i + length], "prompt": source[i : i + length // 2]} for i in starts]


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Training: `input_ids` [B, L]. Prediction: prompts, padded on the left, with their `attention_mask`."""
    length, tokenizer = ctx.recipe.data.max_length, tokenizer_of(ctx)
    if ctx.stage == "predict":
        prompts = cut([tokenizer.encode(prompt) for prompt in column(examples, "prompt", str)], length, keep="end")
        input_ids, attention_mask = pad(prompts, length, tokenizer.pad_token_id, side="left")
        return {"input_ids": input_ids, "attention_mask": attention_mask}
    return {"input_ids": np.array([tokenizer.encode(text) for text in column(examples, "text", str)], np.int32)}


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each next byte, in nats."""
    ids = batch["input_ids"]
    loss: Loss = ctx.model.next_token_loss(params, ids, labels=ids, rng=rng, train=train)
    return loss


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """Token ids [B, N] that continue each prompt."""
    return generate(ctx, params, batch, rng)


def output_fn(ctx: Context, outputs: Any) -> Sequence[Any]:
    """The continuations as text."""
    return decode(ctx.tokenizer, outputs)
