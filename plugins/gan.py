"""A generative adversarial network with two optimizers, on a ring of Gaussians.

    discriminator   softplus(d(g(z)) - d(x)) + penalty / 2 |dd/dx|^2      x real, z normal
    generator       softplus(d(x) - d(g(z)))

(Goodfellow et al., 2014; relativistic as in Jolicoeur-Martineau, 2019: each sample is compared with a real point; the
gradient penalty is R1 of Mescheder et al., 2018.) Both losses are one sum: what a term must not train is behind
`stop_gradient`, and each network has an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import picture

MODES, RADIUS = 8, 2.0
ANGLES = 2 * np.pi * np.arange(MODES) / MODES
CENTRES = RADIUS * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=-1)
GOOD, COVERED = 3.0, 0.25
"""A sample is good within so many deviations of a mode, and a mode is covered by so much of its fair share of them."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        deviation: standard deviation of each Gaussian; they lie 2 from the middle.
        latents: how many normal numbers a sample is made of.
        width: of the three hidden layers of generator and discriminator.
        penalty: weight of the discriminator's squared gradient at real points.
        discriminator_rate: the discriminator's learning rate, as a multiple of the generator's.
        train_examples: how many points to draw for training.
        eval_examples: how many points to draw, and to generate, for evaluation.
    """

    deviation: float = 0.05
    latents: int = 2
    width: int = 128
    penalty: float = 0.02
    discriminator_rate: float = 2.0
    train_examples: int = 50_000
    eval_examples: int = 2000


def layers(inputs: jax.Array, width: int, outputs: int) -> jax.Array:
    """Three hidden layers, within a module: [B, N] to [B, outputs]."""
    for _ in range(3):
        inputs = nn.leaky_relu(nn.Dense(width)(inputs), 0.2)
    found: jax.Array = nn.Dense(outputs)(inputs)
    return found


class Generator(nn.Module):  # type: ignore[misc]
    """From normal numbers to points."""

    width: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, noise: jax.Array) -> jax.Array:
        """Noise [B, latents] to points [B, 2]."""
        return layers(noise, self.width, 2)


class Discriminator(nn.Module):  # type: ignore[misc]
    """From points to how real each looks."""

    width: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, points: jax.Array) -> jax.Array:
        """Points [B, 2] to logits [B]."""
        return layers(points, self.width, 1)[:, 0]


def build_model(ctx: Context) -> Mapping[str, nn.Module]:
    """Both networks."""
    return {"generator": Generator(ctx.options.width), "discriminator": Discriminator(ctx.options.width)}


def init_batch(ctx: Context) -> Mapping[str, Any]:
    """Points, as in a training batch, and noise, which is drawn in `loss_fn`."""
    sizes = {"points": 2, "noise": ctx.options.latents}
    return {name: jax.ShapeDtypeStruct((1, size), np.float32) for name, size in sizes.items()}


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Random points of the ring: `point` [2]."""
    count = ctx.options.eval_examples if split == "eval" else ctx.options.train_examples
    draw = np.random.default_rng([ctx.recipe.seed, split == "eval"])
    points = CENTRES[draw.integers(MODES, size=count)] + ctx.options.deviation * draw.normal(size=(count, 2))
    return [{"point": point} for point in points.astype(np.float32)]


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`points` [B, 2]."""
    return {"points": np.stack([example["point"] for example in examples])}


def optimizer_fn(ctx: Context, schedule: Any) -> Any:
    """Adam without momentum for either, at a rate of its own."""
    rates = {"generator": 1.0, "discriminator": ctx.options.discriminator_rate}

    def scaled(rate: float) -> Any:
        return lambda step: rate * schedule(step)

    optimizers = {name: optax.adam(scaled(rate), b1=0, b2=0.99) for name, rate in rates.items()}
    return optax.multi_transform(optimizers, lambda params: {name: name for name in params})


def generated(ctx: Context, params: Params, points: jax.Array, rng: jax.Array) -> jax.Array:
    """As many points as there are in [B, 2], each from noise of its own."""
    noise = jax.random.normal(rng, (len(points), ctx.options.latents))
    drawn: jax.Array = ctx.models["generator"](params["generator"], noise)
    return drawn


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """The losses of generator and discriminator, whose gradients do not meet; metrics are the two."""
    real, fake = batch["points"], generated(ctx, params, batch["points"], rng)
    judge, still = ctx.models["discriminator"], jax.lax.stop_gradient
    slope = jax.vmap(jax.grad(lambda point: judge(params["discriminator"], point[None])[0]))(real)
    judged = jax.nn.softplus(judge(params["discriminator"], still(fake)) - judge(params["discriminator"], real))
    judged += ctx.options.penalty / 2 * (slope**2).sum(-1)
    fixed = still(params["discriminator"])
    fooled = jax.nn.softplus(judge(fixed, real) - judge(fixed, fake))
    found = {"discriminator_loss": judged.sum(), "generator_loss": fooled.sum()}
    return Loss(sum(found.values()), len(real), found)


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """A generated point [B, 2] for each example."""
    return generated(ctx, params, batch["points"], rng)


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """The share of samples that are good, and the modes that are covered; `samples.png` has real and generated ones."""
    real, drawn = collate_fn(ctx, examples)["points"], np.array(predictions)
    apart = np.linalg.norm(drawn[:, None] - CENTRES, axis=-1)
    good = apart.min(1) < GOOD * ctx.options.deviation
    counts = np.bincount(apart.argmin(1)[good], minlength=MODES)
    with picture(ctx, "samples.png", (5, 5)) as figure:
        axes = figure.subplots()
        axes.plot(*real.T, ".", color="0.8", label="real")
        axes.plot(*drawn.T, ".", markersize=2, label="generated")
        axes.legend()
    return {"good": float(good.mean()), "modes": float((counts >= COVERED * len(drawn) / MODES).sum())}
