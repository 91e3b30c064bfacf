"""Learning to learn sinusoids from ten points each: MAML, of second and first order, and Reptile.

A task is a sinusoid of some amplitude and phase, and an example is a task: `shots` points to adapt to, and as many to
be judged by. Adapting is a few steps of gradient descent, vectorised over the tasks of a batch. What is learned is
where to begin:

    maml            the gradient of the error after adapting, through the steps (Finn et al., 2017)
    first_order     the same, as if each step's gradient did not depend on where it is taken
    reptile         towards where the steps lead: half the squared distance to it (Nichol et al., 2018)
    joint           no meta-learning: the error before adapting, over all tasks at once, to compare with
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import picture

GRID = np.linspace(-5, 5, 101, dtype=np.float32)[:, None]
JUDGED = (0, 1, 10)
"""After how many steps evaluation tells the error."""
Error = Callable[[jax.Array, jax.Array], jax.Array]
"""Of what a network makes of points of a task and what they should be: a number."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        algorithm: how to learn where to begin: `maml`, `first_order`, `reptile` or `joint`.
        inner_steps: of gradient descent on a task, in training.
        inner_rate: their learning rate.
        judged_rate: the learning rate of the steps in evaluation; default: `inner_rate`.
        shots: points of a task to adapt to, and so many again to be judged by.
        width: of the two hidden layers.
        tasks: how many to make for training.
        eval_tasks: how many to make for evaluation.
    """

    algorithm: Literal["maml", "first_order", "reptile", "joint"] = "maml"
    inner_steps: int = 1
    inner_rate: float = 0.01
    judged_rate: float | None = None
    shots: int = 10
    width: int = 40
    tasks: int = 100_000
    eval_tasks: int = 1000


class Net(nn.Module):  # type: ignore[misc]
    """A number to a number."""

    width: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array) -> jax.Array:
        """Numbers [..., 1] to numbers [..., 1]."""
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        y: jax.Array = nn.Dense(1)(x)
        return y


def build_model(ctx: Context) -> nn.Module:
    """The network of Finn et al."""
    return Net(ctx.options.width)


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Random tasks: `x` and `y` [2 * shots, 1], amplitudes from 0.1 to 5, phases from 0 to pi."""
    count = ctx.options.eval_tasks if split == "eval" else ctx.options.tasks
    draw = np.random.default_rng([ctx.recipe.seed, split == "eval"])
    amplitude, phase = draw.uniform(0.1, 5, (count, 1, 1)), draw.uniform(0, np.pi, (count, 1, 1))
    x = draw.uniform(-5, 5, (count, 2 * ctx.options.shots, 1)).astype(np.float32)
    y = (amplitude * np.sin(x - phase)).astype(np.float32)
    return [{"x": x[task], "y": y[task]} for task in range(count)]


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`x` and `y` [B, 2 * shots, 1]."""
    return {name: np.stack([example[name] for example in examples]) for name in ("x", "y")}


def squared_error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """The mean over points [N, 1]."""
    return jnp.mean((found - wanted) ** 2)


def adapted(
    ctx: Context, params: Params, x: jax.Array, y: jax.Array, steps: int, rate: float, error: Error = squared_error
) -> list[Params]:
    """The parameters before and after each of some steps of gradient descent on points of one task, [N, ...] each."""
    found = [params]
    for _ in range(steps):
        gradient = jax.grad(lambda params: error(ctx.model(params, x), y))(found[-1])
        if ctx.options.algorithm == "first_order":
            gradient = jax.lax.stop_gradient(gradient)
        found.append(jax.tree.map(lambda p, g: p - rate * g, found[-1], gradient))
    return found


def meta_loss(
    ctx: Context, params: Params, batch: Batch, known: int, error: Error, judged: Mapping[str, Error]
) -> Loss:
    """What the algorithm learns from, summed over tasks; and how well it does after some steps.

    Args:
        ctx: with the options of this plugin.
        params: where tasks begin.
        batch: `x` and `y` [B, N, ...] of tasks.
        known: so many first points of each task are to adapt to, and the others to be judged by.
        error: what adapting makes less.
        judged: names of metrics, and what they are of the other points.
    """
    options = ctx.options

    def objective(x: jax.Array, y: jax.Array) -> jax.Array:
        if options.algorithm == "reptile":
            goal = jax.lax.stop_gradient(adapted(ctx, params, x, y, options.inner_steps, options.inner_rate, error)[-1])
            return jax.tree.reduce(jnp.add, jax.tree.map(lambda p, g: jnp.sum((p - g) ** 2) / 2, params, goal))
        steps = 0 if options.algorithm == "joint" else options.inner_steps
        begun = adapted(ctx, params, x[:known], y[:known], steps, options.inner_rate, error)[-1]
        return error(ctx.model(begun, x[known:]), y[known:])

    def judge(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        rate = options.judged_rate or options.inner_rate
        begun = adapted(ctx, params, x[:known], y[:known], max(JUDGED), rate, error)
        results = {step: ctx.model(begun[step], x[known:]) for step in JUDGED}
        return {f"{name}_after_{step}": of(results[step], y[known:]) for name, of in judged.items() for step in JUDGED}

    losses = jax.vmap(objective)(batch["x"], batch["y"])
    found = jax.vmap(judge)(batch["x"], batch["y"]) if judged else {}
    return Loss(losses.sum(), losses.size, {name: each.sum() for name, each in found.items()})


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """What the algorithm learns from; in evaluation also the error after some steps."""
    judged = {} if train else {"error": squared_error}
    return meta_loss(ctx, params, batch, ctx.options.shots, squared_error, judged)


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, jax.Array]:
    """The curve of each task [B, 101] before adapting to its first points, and after the most steps."""
    shots, rate = ctx.options.shots, ctx.options.judged_rate or ctx.options.inner_rate

    def curves(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        begun = adapted(ctx, params, x[:shots], y[:shots], max(JUDGED), rate)
        return [ctx.model(begun[step], GRID)[:, 0] for step in (0, -1)]

    return dict(zip(("before", "after"), jax.vmap(curves)(batch["x"], batch["y"]), strict=True))


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """No more than `loss_fn` says; `sinusoids.png` has four tasks, their points, and the curves before and after."""
    with picture(ctx, "sinusoids.png", (8, 6)) as figure:
        axes = figure.subplots(2, 2, sharex=True)
        for ax, example, found in zip(axes.flat, examples, predictions, strict=False):
            ax.plot(example["x"][: ctx.options.shots], example["y"][: ctx.options.shots], "k.", label="points")
            for name, curve in found.items():
                ax.plot(GRID, curve, label=name)
        axes.flat[0].legend()
    return {}
