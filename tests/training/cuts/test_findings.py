"""What the trace of a loss says of cutting its batch: what depends on it is told with its line, the rest is not."""

from pathlib import Path

import jax
import pytest

from redco_cli.job import Job, prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.run import validate
from redco_cli.sharding.axes import fresh_dims
from redco_cli.training.cuts.findings import dependences, read
from redco_cli.training.cuts.values import CONSTANT, Batch, Kind, rows
from redco_cli.training.cuts.walk import Walk
from tests.sharding.programs.catalogue import program

PLUGIN = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from redco_cli.plugin.contract import Loss

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.Dropout(0.1, broadcast_dims=(0,), deterministic=not train)(x)
        return nn.Dense(4)(x)

def build_model(ctx):
    return Net()

def load_examples(ctx, split):
    return [{"x": np.ones(6, np.float32), "y": i % 4, "mask": np.ones(3, np.int32)} for i in range(40)]

def collate_fn(ctx, examples):
    return {name: np.stack([e[name] for e in examples]) for name in ("x", "y", "mask")}

def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"])

def each(ctx, params, batch, rng, train):
    logits = ctx.model(params, batch["x"], rng=rng, train=train)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

def loss_fn(ctx, params, batch, rng, train):
    losses, mask, x = each(ctx, params, batch, rng, train), batch["mask"], batch["x"]
    b = len(losses)
"""
LINE = PLUGIN.count("\n") + 1
"""Of what a case adds."""
RECIPE = "plugin: {module: plugin.py}\ntrain: {global_batch_size: 12}\noutput_dir: run\n"

FREE = {
    "mean": "return losses.mean()",
    "sum": "return Loss(losses.sum(), b)",
    "masked": "return Loss((losses[:, None] * mask).sum(), mask.sum(), {'n': (mask.sum() / b, 1)})",
    "mean times weight": "m = (losses * mask[:, 0]).sum() / mask.sum()\n    return Loss(m * mask.sum(), mask.sum())",
    "guarded weight": "return Loss(losses.sum(), jnp.maximum(mask.sum(), 1))",
    "largest taken out": "return Loss((jnp.exp(losses - losses.max()) * jnp.exp(losses.max())).sum(), b)",
    "noise for each": "return Loss((losses * jax.random.normal(rng, (b,))).sum(), b)",
    "noise for each by keys": "noise = jax.vmap(lambda k: jax.random.normal(k, (6,)))(jax.random.split(rng, b))\n"
    "    return Loss((losses * (x * noise).sum(-1)).sum(), b)",
    "noise for each in turn": "noise = jax.lax.map(lambda k: jax.random.normal(k, ()), jax.random.split(rng, b))\n"
    "    return Loss((losses * noise).sum(), b)",
    "the same noise each time": "w = jax.random.normal(jax.random.key(0), (6,))\n"
    "    return Loss((losses * (x @ w)).sum(), b)",
    "noise in a metric": "return Loss(losses.sum(), b, {'noise': jax.random.normal(rng)})",
    "Fourier transform": "f = jnp.abs(jnp.fft.rfft(x)).sum(-1)\n    return Loss((f * losses).sum(), b)",
    "linear systems": "a = x[:, :, None] * x[:, None] + jnp.eye(6)\n"
    "    return Loss((jnp.linalg.solve(a, x[..., None])[..., 0].sum(-1) * losses).sum(), b)",
    "rows in turn": "return Loss(jax.lax.scan(lambda s, l: (s + l, None), 0.0, losses)[0], b)",
    "two copies as one batch": "p = ctx.model(params, jnp.concatenate([x, -x]))\n    first, second = p[:b], p[b:]\n"
    "    return Loss(-jax.nn.log_sigmoid(first - second).sum(), b)",
    "attention within an example": "h = x[:, :, None]\n    a = jax.nn.softmax(h @ h.swapaxes(1, 2), -1) @ h\n"
    "    return Loss((a[..., 0].sum(-1) * losses).sum(), b)",
    "sorted and put back": "order = jnp.argsort(losses)\n    back = jnp.argsort(order)\n"
    "    return Loss((x[order] ** 2)[back].sum(), b)",
    "labels picked by arange": "p = jax.nn.log_softmax(ctx.model(params, x))\n"
    "    return Loss(-p[jnp.arange(b), batch['y']].sum(), b)",
    "padded and moved": "h = jnp.zeros_like(mask).at[:, 1:].set(mask[:, :-1])\n"
    "    return Loss((losses[:, None] * jnp.pad(h, ((0, 0), (1, 1)))[:, 1:-1]).sum(), b)",
    "rows of a table": "t = jnp.arange(12.0).reshape(4, 3)[batch['y']]\n"
    "    return Loss((jnp.take_along_axis(t, mask % 3, axis=1).sum(-1) * losses).sum(), b)",
    "masked tokens": "hidden = jax.random.bernoulli(rng, 0.5, mask.shape)\n    tokens = jnp.where(hidden, 7, mask)\n"
    "    logits = jnp.ones((8, 4))[tokens] @ jnp.ones((4, 8))\n"
    "    found = optax.softmax_cross_entropy_with_integer_labels(logits, mask) * hidden\n"
    "    return Loss(found.sum() + losses.sum(), hidden.sum())",
    "recomputed": "return Loss(jax.checkpoint(lambda p: each(ctx, p, batch, rng, train).sum())(params), b)",
}
BOUND = {
    "mean over tokens": ("return (losses * mask[:, 0]).sum() / mask.sum()", "divided by another"),
    "guarded mean": ("return jnp.where(mask.sum() > 0, losses.sum() / mask.sum(), 0.0)", "divided by another"),
    "weights of the batch": ("return Loss((losses * mask[:, 0] / mask[:, 0].sum()).sum(), b)", "divided by another"),
    "contrastive": (
        "p = ctx.model(params, x); sim = p @ p.T\n"
        "    return optax.softmax_cross_entropy_with_integer_labels(sim, jnp.arange(b)).mean()",
        "rows of the batch meet each other",
    ),
    "all pairs": ("return jnp.abs(losses[:, None] - losses[None, :]).mean()", "rows of the batch meet each other"),
    "batch norm": ("h = (x - x.mean(0)) / x.std(0)\n    return (h.sum(-1) * losses).mean()", "added to its rows"),
    "softmax over the batch": ("return Loss((jax.nn.softmax(losses) * losses).sum(), b)", "divided by another"),
    "root of a mean": ("return jnp.sqrt((losses**2).mean())", "goes through sqrt"),
    "decorrelated": (
        "c = x.T @ x / b\n    return Loss(losses.sum() + ((c - jnp.eye(6)) ** 2).sum(), b)",
        "goes through",
    ),
    "inside of a loop": (
        "h = jax.lax.fori_loop(0, 3, lambda i, h: h - h.mean(0), x)\n    return (h.sum(-1) * losses).mean()",
        "added to its rows",
    ),
}
FIXED = {
    "noise for each": "return Loss((losses * jax.random.normal(jax.random.key(0), (b,))).sum(), b)",
    "dropout": "keep = jax.random.bernoulli(jax.random.key(1), 0.9, x.shape)\n"
    "    return Loss((ctx.model(params, x * keep) ** 2).sum(), b)",
}
"""Draws with a key that is the same in every step."""
DRAWN = {
    "noise on the gradient": (
        "flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])\n"
        "    return Loss(losses.sum() + flat @ jax.random.normal(rng, flat.shape), b)",
        "[180]",
    ),
    "differential privacy": (
        "one = lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(ctx.model(p, x[None])[0], y)\n"
        "    grads = jax.vmap(jax.grad(one), (None, 0, 0))(params, x, batch['y'])\n"
        "    scale = 1 / jnp.maximum(jax.vmap(optax.tree.norm)(grads), 1.0)\n"
        "    clipped = jax.tree.map(lambda g: jnp.einsum('b,b...->...', scale, g), grads)\n"
        "    noisy = optax.tree.add(clipped, optax.tree.random_like(rng, clipped))\n"
        "    return Loss(losses.sum() + optax.tree.vdot(jax.lax.stop_gradient(noisy), params), b)",
        "[16], [6, 16], [4], ...",
    ),
    "one number for all": ("return Loss((losses * jax.random.uniform(rng)).sum(), b)", "[]"),
    "by a library": (
        "noise = optax.tree.random_like(rng, params)\n"
        "    return Loss(losses.sum() + optax.tree.vdot(noise, params), b)",
        "[16], [6, 16], [4], ...",
    ),
}

SLOW = pytest.mark.slow


def job_of(folder: Path, body: str) -> Job:
    (folder / "plugin.py").write_text(f"{PLUGIN}    {body}\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    return prepare(load_recipe("recipe.yaml"), stages=("train",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("body", FREE.values(), ids=FREE)
def test_nothing_is_said_of_a_loss_that_may_be_cut(folder: Path, body: str) -> None:
    """Nor of the dropout of a layer, which all rows share here: noise it is either way."""
    assert dependences(job_of(folder, body)) == []


@pytest.mark.parametrize(
    "recipe",
    [
        "quickstart",
        "dates",
        "digits",
        *(pytest.param(name, marks=SLOW) for name in ("instruct", "text_classification")),
    ],
)
def test_the_losses_of_the_built_in_plugins_are_sums(recipe: str) -> None:
    """Our decoder, T5, an encoder with dropout, and a network that moves its images about."""
    job = prepare(load_recipe(recipe), stages=("train",))
    total, _ = read(job, 8)
    assert total.kind is Kind.SUM
    assert dependences(job) == []


def test_pairs_that_a_named_model_compares_are_seen() -> None:
    """CLIP, whose output object has the similarities of all images with all texts."""
    clip = program("clip")
    batch = Batch(8)
    leaves = [rows([(batch.axis,), *fresh_dims(leaf.shape[1:])]) for leaf in jax.tree.leaves(clip.batch)]
    closed = jax.make_jaxpr(clip.loss_fn)(clip.params, clip.batch)
    (total,) = Walk(batch).closed(closed, [*(CONSTANT for _ in jax.tree.leaves(clip.params)), *leaves])
    assert total.kind is Kind.MIXED


def test_a_batch_that_is_a_whole_depends_on_nothing(folder: Path) -> None:
    job = job_of(folder, f"{BOUND['contrastive'][0]}\n\nwhole_batch = True")
    assert job.plugin.whole_batch
    assert dependences(job) == []


@pytest.mark.parametrize(("body", "what"), BOUND.values(), ids=BOUND)
def test_rows_that_meet_are_told_with_their_line(folder: Path, body: str, what: str) -> None:
    (found,) = dependences(job_of(folder, body))
    assert found.where in [f"plugin.py:{LINE + offset}: loss_fn" for offset in range(body.count("\n") + 1)]
    assert found.problem.startswith("Loss.sum depends on how the batch is cut into micro-batches: ")
    assert what in found.problem
    assert "whole_batch = True" in found.remedy


@pytest.mark.parametrize(("body", "shape"), DRAWN.values(), ids=DRAWN)
def test_numbers_drawn_for_all_examples_at_once_are_told(folder: Path, body: str, shape: str) -> None:
    (found,) = dependences(job_of(folder, body))
    assert found.where in {f"plugin.py:{LINE + offset}: loss_fn" for offset in range(6)}
    assert f"random numbers ({shape}) are drawn once for all examples of a micro-batch: the result" in found.problem


@pytest.mark.parametrize("body", FIXED.values(), ids=FIXED)
def test_numbers_that_are_the_same_in_every_step_are_told(folder: Path, body: str) -> None:
    (told,) = dependences(job_of(folder, body))
    assert str(told).startswith(f"plugin.py:{LINE}: loss_fn: random numbers ([12")
    assert "every step draws the same" in told.problem


BY_EXAMPLE = """key = jax.random.fold_in(jax.random.key(ctx.recipe.seed), ctx.step)
    noise = jax.vmap(lambda number: jax.random.normal(jax.random.fold_in(key, number), (8,)))(batch["y"])"""
BY_STEP = "noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), ctx.step), (b, 8))"


@pytest.mark.parametrize("noise", [BY_STEP, BY_EXAMPLE], ids=["step", "example"])
def test_a_key_of_the_step_is_another_in_each(folder: Path, noise: str) -> None:
    """By example, as the guide has it, the noise does not depend on how a batch is cut either."""
    assert dependences(job_of(folder, f"{noise}\n    return Loss((losses * noise.sum(-1)).sum(), b)")) == []


def test_validate_tells(folder: Path) -> None:
    job_of(folder, BOUND["mean over tokens"][0])
    document, _ = validate("recipe.yaml", ["mesh.data=1"])
    assert document["warnings"] == [
        f"plugin.py:{LINE}: loss_fn: Loss.sum depends on how the batch is cut into micro-batches: a sum over the batch "
        "is divided by another, or multiplied with one; sum over the examples, Loss(sum, weight); "
        "or say whole_batch = True in the plugin: its batches are never cut"
    ]


def test_validate_tells_that_a_step_has_examples_twice(folder: Path) -> None:
    job = job_of(folder, BOUND["mean over tokens"][0])
    size = job.train_size + 1
    document, _ = validate("recipe.yaml", ["mesh.data=1", f"train.global_batch_size={size}"])
    assert document["warnings"][0] == (
        f"command line: train.global_batch_size: a step of {size} examples is more than an epoch, of {size - 1}: "
        f"it has some of them more than once; {size - 1} are all of them"
    )
