"""Images and texts in one space, by a CLIP or two towers of one's own: three digits in a row, and the words for them.

The loss tells each image's text from all others of the global batch, and each text's image (Radford et al., 2021), so
the batch is never cut. Towers take and give what a CLIP of transformers does, by its names. What is held out for
evaluation is decided by the words: none of them has been seen in that order, and none of the digits in any image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.plugin.contract import Batch, Context, Example, Params
from redco_cli.plugin.parts import builtin, column, cut, encode, held_out, pad, padding_id, tokenizer_of

digits = builtin("image_classification")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IN_A_ROW = 3
whole_batch = True


@dataclass(frozen=True)
class Options(digits.Options):  # type: ignore[name-defined, misc]
    """The options of `image_classification`, of which `image` and `channels` count, and these.

    Attributes:
        text: the column of texts.
        width: of the common space.
        train_examples: how many to make for training.
        eval_examples: how many to make for evaluation, each with a text of its own.
        eval_share: share of all texts, 0 to 1, that only evaluation sees.
    """

    text: str = "text"
    width: int = 64
    train_examples: int = 20_000
    eval_examples: int = 100
    eval_share: float = 0.2


class Compared(NamedTuple):
    """Unit vectors of B images and B texts [B, D], and how alike each image is to each text [B, B]."""

    image_embeds: jax.Array
    text_embeds: jax.Array
    logits_per_image: jax.Array


class Towers(nn.Module):  # type: ignore[misc]
    """An encoder of images and one of texts, to unit vectors, and a temperature."""

    options: Options

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, pixel_values: jax.Array, input_ids: jax.Array) -> Compared:
        """Images [B, height, width, channels] and the numbers of words [B, L], compared each with each."""
        x = pixel_values
        for width in (self.options.channels, 2 * self.options.channels):
            x = nn.relu(nn.Conv(width, (3, 3))(nn.relu(nn.Conv(width, (3, 3))(x))))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        y = nn.Embed(len(WORDS), self.options.width)(input_ids)
        y = nn.gelu(nn.Dense(2 * self.options.width)(y.reshape(len(y), -1)))
        scale = jnp.exp(self.param("scale", nn.initializers.constant(np.log(10.0)), ()))
        ends = [nn.Dense(self.options.width)(z.reshape(len(z), -1)) for z in (x, y)]
        images, texts = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in ends)
        return Compared(images, texts, scale * images @ texts.T)


def build_model(ctx: Context) -> nn.Module:
    """Both towers."""
    return Towers(ctx.options)


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Digits in a row, and their names: `image` [8, 24, 1] and `text`."""
    options, drawn = ctx.options, digits.load_examples(ctx, split)
    draw = np.random.default_rng([ctx.recipe.seed, split == "eval"])
    examples: list[Example] = []
    texts: set[str] = set()
    while len(examples) < (options.eval_examples if split == "eval" else options.train_examples):
        row = [drawn[index] for index in draw.integers(len(drawn), size=IN_A_ROW)]
        text = " ".join(WORDS[one[options.label]] for one in row)
        if held_out(text, options.eval_share) == (split == "eval") and not (split == "eval" and text in texts):
            texts.add(text)
            images = [one[options.image] for one in row]
            examples.append({options.image: np.concatenate(images, axis=1), options.text: text})
    return examples


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`pixel_values` of B images, as the model's processor makes them or as they are, and `input_ids` [B, L] of texts.

    Without a tokenizer these are the numbers of words; with one, ended with the end mark and padded to
    `data.max_length`, and `attention_mask` stands beside them.
    """
    texts, processor = column(examples, ctx.options.text, str), getattr(ctx.tokenizer, "image_processor", None)
    batch = dict(digits.collate_fn(replace(ctx, tokenizer=processor, stage="predict"), examples))
    if processor is None:
        return {
            **batch,
            "input_ids": np.array([[WORDS.index(word) for word in text.split()] for text in texts], np.int32),
        }
    tokenizer, length = tokenizer_of(ctx), ctx.recipe.data.max_length
    rows = [[*row[:-1], tokenizer.eos_token_id] for row in cut(encode(tokenizer, texts), length)]
    ids, mask = pad(rows, length, padding_id(tokenizer))
    return {**batch, "input_ids": ids, "attention_mask": mask}


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> jax.Array:
    """Cross-entropy of each image's text among all texts, and of each text's image; equal texts count alike."""
    similarities = ctx.model(params, **batch, rng=rng, train=train).logits_per_image
    same = (batch["input_ids"][:, None] == batch["input_ids"]).all(-1)
    wanted = same / same.sum(-1, keepdims=True)
    each = optax.softmax_cross_entropy(similarities, wanted) + optax.softmax_cross_entropy(similarities.T, wanted)
    mean: jax.Array = each.mean() / 2
    return mean


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, jax.Array]:
    """The vectors [B, D] of each image and each text."""
    found = ctx.model(params, **batch)
    return {"image": found.image_embeds, "text": found.text_embeds}


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """How often the nearest of all texts is an image's own, and the other way round."""
    images, texts = (np.array([one[name] for one in predictions]) for name in ("image", "text"))
    similarities, own = images @ texts.T, np.arange(len(images))
    found = {"image_to_text": similarities.argmax(1) == own, "text_to_image": similarities.argmax(0) == own}
    return {f"recall_{name}": float(each.mean()) for name, each in found.items()}
