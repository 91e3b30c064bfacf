"""Images and texts in one space, by two towers of one's own: three digits in a row, and the words for them.

The loss tells each image's text from all others of the global batch, and each text's image (Radford et al., 2021), so
the batch is never cut. What is held out for evaluation is decided by the words: none of them has been seen in that
order, and none of the digits in any image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.plugin.contract import Batch, Context, Example, Params
from redco_cli.plugin.parts import builtin, column, held_out

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


class Towers(nn.Module):  # type: ignore[misc]
    """An encoder of images and one of texts, to unit vectors, and a temperature."""

    options: Options

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, images: jax.Array, words: jax.Array) -> Any:
        """Images [B, height, width, channels] and words [B, L] to vectors [B, D] each, and the scale."""
        x = images
        for width in (self.options.channels, 2 * self.options.channels):
            x = nn.relu(nn.Conv(width, (3, 3))(nn.relu(nn.Conv(width, (3, 3))(x))))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        y = nn.Embed(len(WORDS), self.options.width)(words)
        y = nn.gelu(nn.Dense(2 * self.options.width)(y.reshape(len(y), -1)))
        scale = jnp.exp(self.param("scale", nn.initializers.constant(np.log(10.0)), ()))
        ends = [nn.Dense(self.options.width)(z.reshape(len(z), -1)) for z in (x, y)]
        return *(z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in ends), scale


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
    """`images` [B, 8, 24, 1] and `words` [B, 3], by their numbers."""
    images = digits.arrays(column(examples, ctx.options.image), ctx.options.image)
    texts = column(examples, ctx.options.text, str)
    return {
        "images": np.stack(images),
        "words": np.array([[WORDS.index(word) for word in text.split()] for text in texts], np.int32),
    }


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> jax.Array:
    """Cross-entropy of each image's text among all texts, and of each text's image; equal texts count alike."""
    images, texts, scale = ctx.model(params, batch["images"], batch["words"])
    similarities = scale * images @ texts.T
    same = (batch["words"][:, None] == batch["words"]).all(-1)
    wanted = same / same.sum(-1, keepdims=True)
    each = optax.softmax_cross_entropy(similarities, wanted) + optax.softmax_cross_entropy(similarities.T, wanted)
    mean: jax.Array = each.mean() / 2
    return mean


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, jax.Array]:
    """The vectors [B, D] of each image and each text."""
    images, texts, _ = ctx.model(params, batch["images"], batch["words"])
    return {"image": images, "text": texts}


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """How often the nearest of all texts is an image's own, and the other way round."""
    images, texts = (np.array([one[name] for one in predictions]) for name in ("image", "text"))
    similarities, own = images @ texts.T, np.arange(len(images))
    found = {"image_to_text": similarities.argmax(1) == own, "text_to_image": similarities.argmax(0) == own}
    return {f"recall_{name}": float(each.mean()) for name, each in found.items()}
