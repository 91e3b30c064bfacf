"""Five classes told apart from one image of each, by where to begin: MAML and its kin, of `meta_learning`, on digits.

A class is a digit of scikit-learn turned by 0, 90, 180 or 270 degrees, and a task is `ways` classes: `shots` images of
each to adapt to, and `queries` others to be judged by. All images of three digits are held out, however they are
turned: training never sees their classes. Images lie anywhere on a canvas, so that pixels alone do not tell much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import builtin, image_grid

meta, digits = builtin("meta_learning"), builtin("image_classification")
collate_fn = meta.collate_fn
HELD_OUT = (3, 4, 7)
"""Digits that only evaluation sees; turned by half, none of them is like itself or another."""
TURNS = 4


@dataclass(frozen=True)
class Options(meta.Options):  # type: ignore[name-defined, misc]
    """The options of `meta_learning`, and these.

    Attributes:
        inner_steps: as there.
        inner_rate: as there.
        shots: images of each class to adapt to.
        width: channels of the first of three convolutions; the others have twice as many.
        eval_tasks: as there.
        ways: classes of a task.
        queries: images of each class to be judged by.
        canvas: height and width of an image; the 8 x 8 pixels of a digit lie anywhere on it.
    """

    inner_steps: int = 3
    inner_rate: float = 0.3
    shots: int = 1
    width: int = 64
    eval_tasks: int = 600
    ways: int = 5
    queries: int = 3
    canvas: int = 10


class Net(nn.Module):  # type: ignore[misc]
    """Three convolutions, each as a product of patches, which JAX vectorises over tasks with weights of their own.

    They halve height and width, as they are smooth: at the kink of a ReLU, or where the greatest of a pool changes,
    the steps of a task change by more than they should, and a difference of rounding becomes one of the loss.
    """

    width: int
    ways: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array) -> jax.Array:
        """Images [..., height, width, 1] to logits [..., ways]."""
        for times in (1, 2, 2):
            x = nn.silu(nn.Dense(times * self.width)(patches(x)))
        logits: jax.Array = nn.Dense(self.ways)(x.mean((-3, -2)))
        return logits


def patches(images: jax.Array) -> jax.Array:
    """The 3 x 3 pixels around every second one either way: [..., H, W, C] to [..., (H + 1) // 2, (W + 1) // 2, 9 C]."""
    height, width = images.shape[-3:-1]
    padded = jnp.pad(images, [(0, 0)] * (images.ndim - 3) + [(1, 1), (1, 1), (0, 0)])
    shifts = [padded[..., y : y + height : 2, x : x + width : 2, :] for y in range(3) for x in range(3)]
    return jnp.concatenate(shifts, axis=-1)


def build_model(ctx: Context) -> nn.Module:
    """The network that tasks begin with; which output means which class is another in each."""
    return Net(ctx.options.width, ctx.options.ways)


class Tasks:
    """Tasks, each drawn from its number: `x` [ways * (shots + queries), canvas, canvas, 1], and `y`, the classes.

    The images to adapt to come first, one or more of each class, and then the others.
    """

    def __init__(self, ctx: Context, split: str) -> None:
        """Those of a split."""
        self._options, self._seed = ctx.options, [ctx.recipe.seed, int(split == "eval")]
        own = replace(ctx, options=digits.Options())
        images = [one for part in ("train", "eval") for one in digits.load_examples(own, part)]
        named = [label for label in range(10) if (label in HELD_OUT) == (split == "eval")]
        upright = [np.stack([one["image"] for one in images if one["label"] == label]) for label in named]
        self._classes = [np.rot90(found, turns, axes=(1, 2)) for found in upright for turns in range(TURNS)]

    def __len__(self) -> int:
        """How many there are."""
        count: int = self._options.eval_tasks if self._seed[1] else self._options.tasks
        return count

    def __getitem__(self, number: int) -> Example:
        """One task.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        options, draw = self._options, np.random.default_rng([*self._seed, number])
        each = options.shots + options.queries
        chosen = [self._classes[one] for one in draw.choice(len(self._classes), options.ways, replace=False)]
        drawn = np.stack([draw.choice(images, each, replace=False) for images in chosen], axis=1)  # [each, ways, ...]
        x = np.zeros((each * options.ways, options.canvas, options.canvas, 1), np.float32)
        corners = draw.integers(0, options.canvas - 7, (len(x), 2))
        for canvas, image, (top, left) in zip(x, drawn.reshape(-1, 8, 8, 1), corners, strict=True):
            canvas[top : top + 8, left : left + 8] = image
        return {"x": x, "y": np.tile(np.arange(options.ways, dtype=np.int32), each)}


def load_examples(ctx: Context, split: str) -> Tasks:
    """Tasks of digits that are evaluated, or of the others."""
    return Tasks(ctx, split)


def error(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """The cross-entropy of classes [N], as a mean."""
    found: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()
    return found


def accuracy(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """The share of classes [N] that are the likeliest."""
    return (logits.argmax(-1) == classes).mean()


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """What the algorithm learns from; in evaluation also the accuracy after some steps on new classes."""
    known = ctx.options.ways * ctx.options.shots
    found: Loss = meta.meta_loss(ctx, params, batch, known, error, {} if train else {"accuracy": accuracy})
    return found


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """The class of each image to be judged [B, ways * queries], after the most steps."""
    options, known = ctx.options, ctx.options.ways * ctx.options.shots
    rate, steps = options.judged_rate or options.inner_rate, max(meta.JUDGED)

    def classes(x: jax.Array, y: jax.Array) -> jax.Array:
        begun = meta.adapted(ctx, params, x[:known], y[:known], steps, rate, error)[-1]
        likeliest: jax.Array = ctx.model(begun, x[known:]).argmax(-1)
        return likeliest

    return jax.vmap(classes)(batch["x"], batch["y"])


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """What a linear probe of the pixels reaches on the same tasks: `linear_probe`; `task.png` has the first of them."""
    known = ctx.options.ways * ctx.options.shots
    image_grid(ctx, "task.png", examples[0]["x"][..., 0], columns=ctx.options.ways)
    right = [linear_probe(one["x"], one["y"], known) == one["y"][known:] for one in examples]
    return {"linear_probe": float(np.mean(right))}


def linear_probe(images: Any, classes: Any, known: int) -> Any:
    """The classes of all images but the first, by a ridge regression of these on their pixels."""
    pixels = np.hstack([images.reshape(len(images), -1), np.ones((len(images), 1))])
    seen, wanted = pixels[:known], np.eye(classes.max() + 1)[classes[:known]]
    weights = seen.T @ np.linalg.solve(seen @ seen.T + 1e-2 * np.eye(known), wanted)
    return (pixels[known:] @ weights).argmax(1)
