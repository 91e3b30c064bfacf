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
TERMS = {
    "mean beside a sum": ("return Loss(losses.sum() + (x**2 * losses[:, None]).mean(), b)", True),
    "noise for the gradient": (
        "noise = optax.tree.random_like(rng, params)\n"
        "    return Loss(losses.sum() + optax.tree.vdot(noise, params), b)",
        False,
    ),
    "less a mean": ("return Loss(losses.sum() - losses.mean(), b)", True),
    "mean beside what is not understood": (
        "odd = jax.lax.while_loop(lambda s: s < 9, lambda s: s * s + 1, losses.sum())\n"
        "    return Loss(odd + losses.mean(), b)",
        True,
    ),
    "penalty times the weight": ("return Loss(losses.sum() + 1e-3 * optax.tree.norm(params) * b, b)", False),
    "mean times the weight": ("return Loss(losses.sum() + losses.mean() * b, b)", False),
    "a number": ("return Loss(losses.sum() + 1e-6, b)", False),
    "means alone": ("return losses.mean() + 1e-3 * optax.tree.norm(params)", False),
}
"""Sums with a term that may be a mean, and whether it is."""
EXPONENTS = {
    "sum": (lambda x: x.sum(), 1),
    "mean": (lambda x: x.mean(), 0),
    "mean of each dim": (lambda x: x.mean(0).sum(), 0),
    "pairs": (lambda x: (x @ x.T).sum(), 2),
    "mean of pairs": (lambda x: (x @ x.T).mean(), 0),
    "count": (lambda x: 1.0 * x.size, 1),
    "product of each row": (lambda x: x.prod(1).sum(), 1),
    "product of all rows": (lambda x: x.prod(), None),
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


@pytest.mark.parametrize(("body", "is_mean"), TERMS.values(), ids=TERMS)
def test_a_mean_among_the_terms_of_a_sum_is_refused_with_its_line(body: str, is_mean: bool) -> None:
    job = job_of(Path(), body)
    if not is_mean:
        assert refuse_means(job) == []
        return
    with pytest.raises(PluginError, match=r"a term of Loss\.sum does not grow with the number of examples") as refused:
        refuse_means(job)
    line = next(number for number, text in enumerate(body.splitlines()) if "mean()" in text or "norm" in text)
    assert str(refused.value).startswith(f"plugin.py:{LINE + line}: loss_fn")


@pytest.mark.parametrize("condition", ["", " if train else 0"])
def test_a_penalty_that_counts_once_in_a_batch_is_told(condition: str) -> None:
    term = f"total = losses.sum()\n    total += 1e-3 * optax.tree.norm(params){condition}\n    return Loss(total, b)"
    (told,) = refuse_means(job_of(Path(), term))
    assert str(told).startswith(f"plugin.py:{LINE + 1}: loss_fn: a term of Loss.sum does not grow with the examples")
    assert told.remedy == "give it times Loss.weight"


def test_a_stat_that_depends_on_the_cut_is_told() -> None:
    state = "def init_state(ctx, params):\n    return {'n': jnp.zeros(6)}\n\n"
    state += "def update_state(ctx, state, params, stats):\n    return {'n': stats['n']}\n"
    loss = "return Loss(losses.sum(), b, stats={'n': (x.sum(0), WEIGHT)})"
    (told,) = refuse_means(job_of(Path(), f"{loss.replace('WEIGHT', '1')}\n\n{state}"))
    assert str(told).startswith(f"plugin.py:{LINE}: loss_fn: a stat grows with the number of examples, and its")
    assert refuse_means(job_of(Path(), f"{loss.replace('WEIGHT', 'losses.size')}\n\n{state}")) == []


def test_a_mean_in_evaluation_alone_is_refused() -> None:
    metric = "{'accuracy': losses.mean()}"
    body = f"if not train:\n        return Loss(losses.sum(), b, {metric})\n    return Loss(losses.sum(), b)"
    with pytest.raises(PluginError, match="the metric accuracy where train is False does not grow") as refused:
        refuse_means(job_of(Path(), body))
    assert str(refused.value).startswith(f"plugin.py:{LINE + 1}: loss_fn")


@pytest.mark.parametrize("kept", ["KEPT.append(losses.sum())", "KEPT[0] = 0.9 * KEPT[0] + losses.sum()"])
def test_an_array_that_an_earlier_trace_has_left_is_refused(kept: str) -> None:
    body = f"{kept}\n    return Loss(losses.sum() + 0 * sum(KEPT), b)\n\nKEPT = [0.0]\n"
    job = job_of(Path(), body)
    with pytest.raises(
        PluginError, match=rf"^plugin\.py:{LINE + 1 - kept.count('0.9')}: loss_fn: uses an array that an"
    ):
        refuse_means(job)


def test_a_batch_size_that_the_plugin_refuses_is_no_error() -> None:
    job = job_of(Path(), "assert b < 13\n    return Loss(losses.mean(), losses.size)")
    refuse_means(job)


def test_a_batch_that_is_a_whole_may_be_summed() -> None:
    assert refuse_means(job_of(Path(), "return losses.sum()\n\nwhole_batch = True")) == []


@pytest.mark.parametrize(
    "recipe",
    [
        *("quickstart", "dates", "digits", "vae"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gan", "meta_learning", "pendulum")),
    ],
)
def test_the_built_in_plugins_give_sums(recipe: str) -> None:
    job = prepare(load_recipe(recipe), stages=("train",))
    assert refuse_means(job) == []
