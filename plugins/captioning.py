"""Image to text with an encoder of images and a decoder of text, such as a ViT and GPT-2: captions.

    loss = -log p(token | image, tokens before it), summed over the tokens of a caption and its end mark

Without `data.train`, `load_examples` puts two of scikit-learn's digits side by side, and the caption says which they
are: "a three and an eight". An example is drawn when it is asked for, by its number, so that thousands of them cost
nothing. Evaluation has digits that no training image has, in pairs of classes that none has.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.contract import IGNORED_LABEL, Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import (
    builtin,
    column,
    cut,
    decode,
    encode,
    exact_match,
    generate,
    pad,
    picture,
    rouge,
    token_loss,
    tokenizer_of,
)

digits = builtin("image_classification")
WORDS = ("a zero", "a one", "a two", "a three", "a four", "a five", "a six", "a seven", "an eight", "a nine")
SIDE, DIGIT = 16, 8
MARGIN = (SIDE - DIGIT) // 2
SHOWN, LETTERS = 12, 36
"""So many captions are in the picture, in lines of so many letters."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        image: the column of images: PIL images, or arrays [height, width, channels] for a model without a processor.
        caption: the column of texts.
        train_examples: how many pairs of digits to make for training.
        eval_examples: how many to make for evaluation.
        shift: each digit stands up to so many pixels above or below the middle, 0 to 4.
        word_dropout: the share of tokens that the decoder cannot read in training, where the start token stands
            instead: what comes next is told from the image then, rather than from which words went together (Bowman
            et al., arXiv 1511.06349).
    """

    image: str = "image"
    caption: str = "caption"
    train_examples: int = 100_000
    eval_examples: int = 500
    shift: int = 1
    word_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuses digits beyond the image, and shares that are none."""
        if not 0 <= self.shift <= MARGIN:
            raise ValueError(f"shift {self.shift}: from 0 to {MARGIN}")
        if not 0 <= self.word_dropout < 1:
            raise ValueError(f"word_dropout {self.word_dropout}: from 0 to below 1")


@dataclass(frozen=True)
class Pairs:
    """Examples of two digits, each drawn by its number when it is asked for."""

    options: Options
    images: Sequence[Sequence[Any]]
    pairs: Sequence[tuple[int, int]]
    seed: tuple[int, ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        """A pair of classes, an image of each, and how high these stand."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        draw = np.random.default_rng([*self.seed, index])
        pair = self.pairs[int(draw.integers(len(self.pairs)))]
        image = np.zeros((SIDE, SIDE, 1), np.float32)
        for left, digit in zip((0, DIGIT), pair, strict=True):
            top = MARGIN + int(draw.integers(-self.options.shift, self.options.shift + 1))
            chosen = int(draw.integers(len(self.images[digit])))
            image[top : top + DIGIT, left : left + DIGIT] = self.images[digit][chosen]
        return {self.options.image: image, self.options.caption: caption_of(pair)}


def caption_of(pair: tuple[int, int]) -> str:
    """What stands in an image.

    >>> caption_of((3, 8))
    'a three and an eight'
    """
    return " and ".join(WORDS[digit] for digit in pair)


def load_examples(ctx: Context, split: str) -> Pairs:
    """Pairs of digits [16, 16, 1] and their captions.

    A fifth of the 100 pairs of classes is for evaluation, and each class in two of them on the left, two on the right.
    """
    options = ctx.options
    images: list[list[Any]] = [[] for _ in WORDS]
    for one in digits.load_examples(replace(ctx, options=digits.Options()), split):
        images[one["label"]].append(one["image"])
    every = [(left, right) for left in range(len(WORDS)) for right in range(len(WORDS))]
    pairs = [pair for pair in every if ((pair[1] - 3 * pair[0]) % 5 == 0) == (split == "eval")]
    count = options.eval_examples if split == "eval" else options.train_examples
    return Pairs(options, images, pairs, (ctx.recipe.seed, split == "eval"), count)


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`pixel_values` [B, channels, height, width]; for training also `labels` [B, L], the tokens of the captions."""
    tokenizer, processor = tokenizer_of(ctx), getattr(ctx.tokenizer, "image_processor", None)
    batch = dict(digits.collate_fn(replace(ctx, tokenizer=processor, stage="predict"), examples))
    if processor is None:
        batch["pixel_values"] = batch["pixel_values"].transpose(0, 3, 1, 2)
    if ctx.stage != "predict":
        length, captions = ctx.recipe.data.max_length, column(examples, ctx.options.caption, str)
        batch["labels"] = pad(cut(encode(tokenizer, captions), length), length, IGNORED_LABEL)[0]
    return batch


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each token of the captions; the decoder reads them moved one to the right."""
    read = ctx.model.decoder_inputs(batch["labels"])
    if train and ctx.options.word_dropout:
        hidden = jax.random.bernoulli(jax.random.fold_in(rng, 1), ctx.options.word_dropout, read.shape)
        read = jnp.where(hidden, read[:, :1], read)
    logits = ctx.model(params, batch["pixel_values"], decoder_input_ids=read, rng=rng, train=train)
    return token_loss(logits, batch["labels"])


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """Token ids [B, N] of each caption."""
    return generate(ctx, params, batch, rng)


def output_fn(ctx: Context, outputs: Any) -> Sequence[Any]:
    """The captions as text."""
    return decode(ctx.tokenizer, outputs)


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """How many captions are right to the letter, and what the others share (ROUGE); draws some in `captions.png`."""
    wanted = column(examples, ctx.options.caption, str)
    found = {"exact_match": exact_match(predictions, wanted), **rouge(predictions, wanted)}
    with picture(ctx, "captions.png", (9.0, 7.0)) as figure:
        grid = figure.subplots(SHOWN // 4, 4, squeeze=False).flat
        for axes in grid:
            axes.axis("off")
        for axes, example, said in zip(figure.axes, examples, predictions, strict=False):
            axes.imshow(np.asarray(example[ctx.options.image]), cmap="gray")
            text = said["text"] if isinstance(said, Mapping) else said
            axes.set_title(textwrap.fill(text, LETTERS), fontsize=8, parse_math=False)
    return found
