"""Text to image: small pictures from prompts such as "a seven", by a diffusion model with a U-Net that reads them.

    x_t = alpha_t x_0 + sigma_t noise        the network sees x_t, t and the prompt, and tells
    v   = alpha_t noise - sigma_t x_0        by its mean squared error (Salimans and Ho, 2022)

with the cosine schedule of Nichol and Dhariwal (2021). In training some prompts are empty, so that a sample can be
pushed away from what the network draws without one (classifier-free guidance; Ho and Salimans, 2022). Samples are drawn
with a moving average of the parameters. Without `data.train` the pictures are the digits of `image_classification`.
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

from redco_cli.errors import ExampleError
from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.diffusion import Solver, clean_of, cosine, sample, target_of, trailing
from redco_cli.plugin.parts import builtin, column, cut, encode, image_grid, pad, tokenizer_of

digits = builtin("image_classification")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCHEDULE = cosine(1000)
GROUPS, HEADS = 8, 4
ROWS, COLUMNS = 10, 16
"""Of `samples.png`: so many prompts, and samples of each."""


@dataclass(frozen=True)
class Options(digits.Options):  # type: ignore[name-defined, misc]
    """The options of `image_classification`, of which `image`, `label`, `channels` and `dropout` count, and these.

    The width of the U-Net at full resolution is `channels`, a multiple of 8; at half of it there are twice as many.

    Attributes:
        text: the column of prompts.
        size: height and width of an image in pixels, both even, and its channels.
        unprompted: share of prompts, 0 to 1, that are left out in training.
        guidance: how far a sample goes from what is drawn without a prompt to what is drawn with it; 1 is just with it.
        solver: how samples are drawn: `ddim`, or `dpm_solver++`, which needs fewer steps.
        steps: of drawing, 1 to 1000.
        ema_decay: how much of the average of the parameters is left after a step; less in the first steps.
    """

    text: str = "text"
    size: tuple[int, int, int] = (8, 8, 1)
    unprompted: float = 0.1
    guidance: float = 1.1
    solver: Solver = "dpm_solver++"
    steps: int = 20
    ema_decay: float = 0.999

    def __post_init__(self) -> None:
        """Refuses what cannot be built or drawn."""
        if self.channels % GROUPS or self.channels < GROUPS or any(side % 2 for side in self.size[:2]):
            raise ValueError(f"channels must be a multiple of {GROUPS}, and height and width even")
        if not 1 <= self.steps <= len(SCHEDULE) or not 0 <= self.ema_decay <= 1:
            raise ValueError(f"steps must be 1 to {len(SCHEDULE)}, and ema_decay 0 to 1")


class Encoder(nn.Module):  # type: ignore[misc]
    """Prompts as vectors, one for each token, by one layer of a transformer."""

    vocabulary: int
    width: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Tokens [B, L] and their mask [B, 1, 1, L] to vectors [B, L, width]."""
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x = x + self.param("places", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        vectors: jax.Array = nn.LayerNorm()(x)
        return vectors


class Residual(nn.Module):  # type: ignore[misc]
    """Two convolutions, between which the time scales and shifts each channel."""

    width: int
    dropout: float

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array, time: jax.Array, train: bool) -> jax.Array:
        """Features [B, height, width, C] and times [B, T] to [B, height, width, self.width]."""
        scale, shift = jnp.split(nn.Dense(2 * self.width)(time)[:, None, None], 2, axis=-1)
        y = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(GROUPS)(x)))
        y = nn.silu(nn.GroupNorm(GROUPS)(y) * (1 + scale) + shift)
        y = nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.Conv(self.width, (3, 3), kernel_init=nn.initializers.zeros)(y)
        after: jax.Array = y + (x if x.shape[-1] == self.width else nn.Dense(self.width)(x))
        return after


class Attention(nn.Module):  # type: ignore[misc]
    """Every pixel looks at all others, and then at the prompt."""

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array, words: jax.Array, mask: jax.Array) -> jax.Array:
        """Features [B, height, width, C], vectors of the prompt [B, L, D] and their mask [B, 1, 1, L]."""
        pixels: jax.Array = x.reshape(len(x), -1, x.shape[-1])
        pixels = pixels + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(pixels))
        pixels = pixels + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(pixels), words, mask=mask)
        return pixels.reshape(x.shape)


class UNet(nn.Module):  # type: ignore[misc]
    """Down to half of the resolution, where the prompt is read, and up again with what was seen on the way."""

    options: Options
    vocabulary: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(
        self, noisy: jax.Array, timestep: jax.Array, tokens: jax.Array, mask: jax.Array, train: bool = False
    ) -> jax.Array:
        """Noisy images [B, height, width, C], times [B], tokens and mask of prompts [B, L] to v, shaped as images."""
        options, width = self.options, self.options.channels
        angles = timestep[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(width) / width)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = nn.silu(nn.Dense(4 * width)(nn.silu(nn.Dense(4 * width)(time))))
        seen = mask[:, None, None].astype(bool)
        words = Encoder(self.vocabulary, 2 * width)(tokens, seen)

        def block(x: jax.Array, features: int) -> Any:
            return Residual(features, options.dropout)(x, time, train)

        def lower(x: jax.Array) -> Any:
            return Attention()(block(x, 2 * width), words, seen)

        fine = block(nn.Conv(width, (3, 3))(noisy), width)
        coarse = lower(nn.Conv(2 * width, (3, 3), strides=2)(fine))
        x = lower(jnp.concatenate([lower(coarse), coarse], axis=-1))
        x = nn.Conv(width, (3, 3))(x.repeat(2, axis=1).repeat(2, axis=2))
        x = block(jnp.concatenate([x, fine], axis=-1), width)
        x = nn.silu(nn.GroupNorm(GROUPS)(x))
        velocity: jax.Array = nn.Conv(noisy.shape[-1], (3, 3), kernel_init=nn.initializers.zeros)(x)
        return velocity


def build_model(ctx: Context) -> nn.Module:
    """The U-Net, with as many tokens as the tokenizer has."""
    return UNet(ctx.options, len(tokenizer_of(ctx)))


def init_batch(ctx: Context) -> Mapping[str, Any]:
    """Inputs of the U-Net, which `loss_fn` makes of a batch."""
    images = jax.ShapeDtypeStruct((1, *ctx.options.size), np.float32)
    return {"noisy": images, "timestep": jax.ShapeDtypeStruct((1,), np.int32), **read(ctx, [""])}


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """The digits of scikit-learn, and what they are: "a seven", "an eight"."""
    names = [f"{'an' if word == 'eight' else 'a'} {word}" for word in WORDS]
    return [{**one, ctx.options.text: names[one[ctx.options.label]]} for one in digits.load_examples(ctx, split)]


def read(ctx: Context, texts: Sequence[str]) -> dict[str, Any]:
    """`tokens` and `mask` [B, L], L = `data.max_length`; of an empty prompt only the end mark is left."""
    length = ctx.recipe.data.max_length
    tokens, mask = pad(cut(encode(ctx.tokenizer, texts), length), length, ctx.tokenizer.pad_token_id)
    return {"tokens": tokens, "mask": mask}


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Prompts as `read` has them, and for training `images` [B, height, width, channels], from -1 to 1."""
    batch = read(ctx, column(examples, ctx.options.text, str))
    if ctx.stage == "predict":
        return batch
    images = np.stack(digits.arrays(column(examples, ctx.options.image), ctx.options.image))
    if images.shape[1:] != ctx.options.size or images.min() < 0 or images.max() > 1:
        found = f"{list(images.shape[1:])}, from {images.min():g} to {images.max():g}"
        remedy = f"give all images the shape of plugin.options.size, {list(ctx.options.size)}, from 0 (black) to 1"
        raise ExampleError("collate_fn", f"the image in the column {ctx.options.image!r} is {found}", remedy)
    return {**batch, "images": 2 * images - 1}


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """The mean squared error of v, at a random time of each image; in training some prompts are left out."""
    images, options = batch["images"], ctx.options
    keys = jax.random.split(jax.random.fold_in(rng, 1), 3)
    timestep = jax.random.randint(keys[0], (len(images),), 0, len(SCHEDULE))
    noise = jax.random.normal(keys[1], images.shape)
    shares = SCHEDULE.at(timestep, images.ndim)
    prompts = {name: batch[name] for name in ("tokens", "mask")}
    if train:
        left_out = jax.random.bernoulli(keys[2], options.unprompted, (len(images), 1))
        prompts = {name: jnp.where(left_out, empty, prompts[name]) for name, empty in read(ctx, [""]).items()}
    noisy = shares[0] * images + shares[1] * noise
    found = ctx.model(params, noisy, timestep, **prompts, rng=rng, train=train)
    error = (found - target_of("v", images, noise, *shares)) ** 2
    return Loss(error.mean((1, 2, 3)).sum(), len(images))


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """An image of each prompt [B, height, width, channels], from 0 to 1."""
    options, count = ctx.options, len(batch["tokens"])
    empty = {name: jnp.broadcast_to(row, batch[name].shape) for name, row in read(ctx, [""]).items()}

    def denoise(noisy: jax.Array, timestep: jax.Array) -> jax.Array:
        times = jnp.full(count, timestep)
        found = ctx.model(params, noisy, times, batch["tokens"], batch["mask"])
        if options.guidance != 1:
            without = ctx.model(params, noisy, times, **empty)
            found = without + options.guidance * (found - without)
        return clean_of("v", found, noisy, *SCHEDULE.at(timestep)).clip(-1, 1)

    noise = jax.random.normal(rng, (count, *options.size))
    drawn = sample(denoise, noise, SCHEDULE, trailing(SCHEDULE, options.steps), options.solver)
    return (drawn + 1) / 2


def output_fn(ctx: Context, outputs: Any) -> list[Any]:
    """Images as lists of rows of pixels of channels, with four digits each."""
    images: list[Any] = np.round(outputs.astype(np.float64), 4).tolist()
    return images


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """How often a sample is nearest to a real image of its own prompt; `samples.png` has a row for each prompt."""
    texts = column(examples, ctx.options.text, str)
    drawn, real = np.array(predictions), np.stack(digits.arrays(column(examples, ctx.options.image), ctx.options.image))
    order = [
        index for text in [*dict.fromkeys(texts)][:ROWS] for index in np.flatnonzero(np.array(texts) == text)[:COLUMNS]
    ]
    image_grid(ctx, "samples.png", drawn[order][..., 0] if drawn.shape[-1] == 1 else drawn[order], columns=COLUMNS)
    flat = [images.reshape(len(images), -1) for images in (drawn, real)]
    nearest = ((flat[1] ** 2).sum(-1) - 2 * flat[0] @ flat[1].T).argmin(-1)
    return {"agreement": float(np.mean([texts[index] == text for text, index in zip(texts, nearest, strict=True)]))}


def init_state(ctx: Context, params: Params) -> Mapping[str, Params]:
    """The average of the parameters, which samples are drawn with."""
    return {"ema": params}


def update_state(ctx: Context, state: Mapping[str, Params], params: Params, stats: Any) -> Mapping[str, Params]:
    """Follows the parameters, soon in the first steps."""
    decay = jnp.minimum(ctx.options.ema_decay, (1 + ctx.step) / (10 + ctx.step))
    return {"ema": optax.incremental_update(params, state["ema"], 1 - decay)}
