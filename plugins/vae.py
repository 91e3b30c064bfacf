"""A variational autoencoder of scikit-learn's digits, which then draws digits that nobody wrote.

    loss = KL(q(z | x) || N(0, 1)) - log p(x | z),  z ~ q(z | x)      in nats per image

(Kingma and Welling, 2014). Each of the 17 levels of gray that a pixel may have has a probability of its own, so that
the loss bounds -log p(x) from above. Examples are those of `image_classification`, without their classes.
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

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import builtin, image_grid

digits = builtin("image_classification")
LEVELS, SIDE = 17, 8


@dataclass(frozen=True)
class Options(digits.Options):  # type: ignore[name-defined, misc]
    """The options of `image_classification`, of which `image` counts, and these.

    Attributes:
        latents: how many numbers an image is made of.
        width: of the hidden layer of encoder and decoder.
    """

    latents: int = 16
    width: int = 512


class Net(nn.Module):  # type: ignore[misc]
    """An encoder to mean and log variance of the latents, and a decoder to the logits of each pixel's levels."""

    options: Options

    def setup(self) -> None:
        """Two layers each."""
        width = self.options.width
        self.encoder = nn.Sequential([nn.Dense(width), nn.gelu, nn.Dense(2 * self.options.latents)])
        self.decoder = nn.Sequential([nn.Dense(width), nn.gelu, nn.Dense(SIDE * SIDE * LEVELS)])

    def encode(self, levels: jax.Array) -> Any:
        """Levels [B, 8, 8] to mean and log variance, each [B, latents]."""
        return jnp.split(self.encoder(levels.reshape(len(levels), -1) / (LEVELS - 1)), 2, axis=-1)

    def decode(self, latents: jax.Array) -> jax.Array:
        """Latents [B, latents] to logits [B, 8, 8, 17]."""
        logits: jax.Array = self.decoder(latents).reshape(-1, SIDE, SIDE, LEVELS)
        return logits

    def __call__(self, levels: jax.Array) -> jax.Array:
        """Levels [B, 8, 8] to the logits of those that the mean of their latents stands for."""
        return self.decode(self.encode(levels)[0])


def build_model(ctx: Context) -> nn.Module:
    """Encoder and decoder in one."""
    return Net(ctx.options)


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """The digits of scikit-learn."""
    examples: Sequence[Example] = digits.load_examples(ctx, split)
    return examples


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`levels` [B, 8, 8], whole numbers from 0 to 16."""
    images = np.stack(digits.arrays(digits.column(examples, ctx.options.image), ctx.options.image))
    return {"levels": np.rint(images[..., 0] * (LEVELS - 1)).astype(np.int32)}


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """The negative evidence lower bound, from one sample of the latents; metrics are its two terms."""
    mean, log_variance = ctx.model(params, batch["levels"], method="encode")
    latents = mean + jnp.exp(log_variance / 2) * jax.random.normal(rng, mean.shape)
    logits = ctx.model(params, latents, method="decode")
    missed = optax.softmax_cross_entropy_with_integer_labels(logits, batch["levels"]).sum()
    divergence = 0.5 * (mean**2 + jnp.exp(log_variance) - log_variance - 1).sum()
    return Loss(missed + divergence, len(mean), {"reconstruction": missed, "divergence": divergence})


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, jax.Array]:
    """The reconstruction of each image, and beside it one that is drawn without looking: levels [B, 8, 8]."""
    seen = ctx.model(params, batch["levels"], method="encode")[0]
    drawn = jax.random.normal(rng, seen.shape)
    levels = jnp.arange(LEVELS, dtype=jnp.float32)
    found = {"reconstruction": seen, "sample": drawn}
    return {
        name: jax.nn.softmax(ctx.model(params, latents, method="decode")) @ levels for name, latents in found.items()
    }


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """The mean error of a pixel's level; `samples.png` has images, their reconstructions, and samples below."""
    images = collate_fn(ctx, examples)["levels"]
    seen, drawn = (np.array([one[name] for one in predictions]) for name in ("reconstruction", "sample"))
    image_grid(ctx, "samples.png", np.concatenate([images[:16], seen[:16], drawn[:64]]) / (LEVELS - 1), columns=16)
    return {"mean_absolute_error": float(np.abs(images - seen).mean())}
