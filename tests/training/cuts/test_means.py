"""Which losses are taken for means beside a count: those that are, and none that is right."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import PluginError
from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.training.cuts.growth import ZERO, growths
from redco_cli.training.cuts.means import refuse_means
from tests.training.cuts.test_findings import FREE, LINE, job_of

MEANS = {
    "mean": "return Loss(losses.mean(), losses.size)",
    "mean of what counts": "m = mask[:, 0]\n    return Loss((losses * m).sum() / (m.sum() + 1e-8), m.sum())",
    "guarded mean": "m = mask.sum()\n    return Loss(jnp.where(m > 0, losses.sum() / jnp.maximum(m, 1), 0.0), m)",
    "contrastive": "p = ctx.model(params, x)\n"
    "    pairs = optax.softmax_cross_entropy_with_integer_labels(p @ p.T, jnp.arange(b))\n"
    "    return Loss(pairs.mean(), b)",
    "batch norm": "h = (x - x.mean(0)) / x.std(0)\n    return Loss((h.sum(-1) * losses).mean(), b)",
    "with a penalty": "return Loss(losses.mean() + 0.1 * optax.tree.norm(params), b)",
    "in bfloat16": "return Loss(losses.astype(jnp.bfloat16).mean(), b)",
    "of all pairs": "return Loss(jnp.abs(losses[:, None] - losses[None, :]).mean(), b)",
}
EXPONENTS = {
    "sum": (lambda x: x.sum(), 1),
    "mean": (lambda x: x.mean(), 0),
    "mean of each dim": (lambda x: x.mean(0).sum(), 0),
    "pairs": (lambda x: (x @ x.T).sum(), 2),
    "mean of pairs": (lambda x: (x @ x.T).mean(), 0),
    "count": (lambda x: 1.0 * x.size, 1),
    "norm": (lambda x: jnp.sqrt((x**2).sum()), 0.5),
    "in turn": (lambda x: jax.lax.scan(lambda s, row: (s + row.sum(), None), 0.0, x)[0], None),
    "of layers": (lambda x: jax.lax.scan(lambda h, _: (jnp.tanh(h), None), x, None, length=3)[0].sum(), 1),
    "in segments": (lambda x: jax.ops.segment_sum(x, jnp.zeros(len(x), int), 3).sum(), None),
    "nothing": (lambda x: 0.0 * x.sum(), ZERO),
    "either": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x.sum(), lambda: 0.0), 1),
    "a gradient": (lambda x: jax.grad(lambda w: ((x @ w) ** 2).mean())(jnp.ones(3)).sum(), 0),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("function", "exponent"), EXPONENTS.values(), ids=EXPONENTS)
def test_growth_is_the_exponent_of_the_number_of_examples(function, exponent: float | None) -> None:
    closed = jax.make_jaxpr(function)(np.ones((34, 3), np.float32))
    assert growths(closed, [0], 17) == [exponent]


@pytest.mark.parametrize("body", FREE.values(), ids=FREE)
def test_nothing_is_said_of_a_loss_that_is_right(body: str) -> None:
    job = job_of(Path(), body.replace("{'noise': jax.random.normal(rng)}", "{'noise': (jax.random.normal(rng), 1)}"))
    assert refuse_means(job) == []


@pytest.mark.parametrize("body", MEANS.values(), ids=MEANS)
def test_a_mean_beside_a_count_is_refused_with_its_line(body: str) -> None:
    with pytest.raises(PluginError) as refused:
        refuse_means(job_of(Path(), body))
    assert str(refused.value).startswith(f"plugin.py:{LINE + body.count(chr(10))}: loss_fn: Loss.sum does not grow")


def test_a_batch_size_that_the_plugin_refuses_is_no_error() -> None:
    job = job_of(Path(), "assert b < 13\n    return Loss(losses.mean(), losses.size)")
    refuse_means(job)


def test_a_batch_that_is_a_whole_may_be_summed() -> None:
    assert refuse_means(job_of(Path(), "return losses.sum()\n\nwhole_batch = True")) == []


@pytest.mark.parametrize("recipe", ["quickstart", "dates", "digits", "gan", "meta_learning", "pendulum", "vae"])
def test_the_built_in_plugins_give_sums(recipe: str) -> None:
    job = prepare(load_recipe(recipe), stages=("train",))
    assert refuse_means(job) == []
