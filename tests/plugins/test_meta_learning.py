"""Meta-learning: its gradients against their closed forms, and what a few steps on a new task reach."""

import jax
import numpy as np
import pytest

from redco_cli.plugin.parts import builtin
from tests.plugins.trained import trained

meta = builtin("meta_learning")
RATE, STEPS, SHOTS, WIDTH = 0.03, 3, 5, 4


@pytest.fixture
def tasks():
    """Three linear regressions, whose errors are quadratics: inputs [3, 10, 4] and targets [3, 10]."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(3, 2 * SHOTS, WIDTH))
    return x, x @ draw.normal(size=(3, WIDTH, 1))[..., 0][..., None] + draw.normal(size=(3, 2 * SHOTS, 1))


def closed_form(algorithm, x, y, theta):
    """The gradient of the sum over tasks, in float64.

        error(t) = |X t - y|^2 / n     gradient(t) = H t - b,  H = 2 X'X / n,  b = 2 X'y / n

    so that a step is t -> (1 - rate H) t + rate b, and its derivative the matrix (1 - rate H).
    """
    total = np.zeros_like(theta)
    for points, targets in zip(x, y, strict=True):
        seen = slice(None) if algorithm == "reptile" else slice(SHOTS)
        hessian = 2 * points[seen].T @ points[seen] / len(points[seen])
        linear = 2 * points[seen].T @ targets[seen] / len(points[seen])
        move = np.eye(WIDTH) - RATE * hessian
        begun = theta
        for _ in range(0 if algorithm == "joint" else STEPS):
            begun = move @ begun + RATE * linear
        gradient = 2 * points[SHOTS:].T @ (points[SHOTS:] @ begun - targets[SHOTS:]) / SHOTS
        chain = np.linalg.matrix_power(move, STEPS) if algorithm == "maml" else np.eye(WIDTH)
        total += theta - begun if algorithm == "reptile" else chain.T @ gradient
    return total


@pytest.mark.parametrize("algorithm", ["maml", "first_order", "reptile", "joint"])
def test_the_meta_gradient_of_a_quadratic_is_its_closed_form(context, tasks, algorithm):
    options = {"algorithm": algorithm, "inner_steps": STEPS, "inner_rate": RATE, "shots": SHOTS}
    ctx = context("meta_learning", model=lambda params, x: x @ params, **options)
    theta = np.linspace(-1, 1, WIDTH)[:, None]
    batch = dict(zip("xy", (each.astype(np.float32) for each in tasks), strict=True))
    gradient = jax.jit(jax.grad(lambda params: meta.loss_fn(ctx, params, batch, None, True).sum))
    np.testing.assert_allclose(gradient(theta.astype(np.float32)), closed_form(algorithm, *tasks, theta), rtol=2e-4)


def test_tasks_are_sinusoids_and_differ_between_splits(context):
    ctx = context("meta_learning", tasks=20, eval_tasks=20)
    seen, held = (meta.collate_fn(ctx, meta.load_examples(ctx, split)) for split in ("train", "eval"))
    assert seen["x"].shape == seen["y"].shape == (20, 20, 1)
    assert not np.isin(seen["x"], held["x"]).any()
    for x, y in zip(seen["x"], seen["y"], strict=True):
        waves = np.concatenate([np.sin(x), np.cos(x)], axis=1)
        wave, left, *_ = np.linalg.lstsq(waves, y[:, 0], rcond=None)
        assert left < 1e-8
        assert 0.1 <= np.linalg.norm(wave) <= 5


def test_tasks_are_drawn(context, tmp_path):
    ctx = context("meta_learning", eval_tasks=2)
    ctx = type(ctx)(None, None, ctx.options, ctx.recipe.model_copy(update={"output_dir": str(tmp_path)}), "predict")
    curves = {name: [0.0] * 101 for name in ("before", "after")}
    assert meta.metric_fn(ctx, meta.load_examples(ctx, "eval"), [curves] * 2) == {}
    assert (tmp_path / "sinusoids.png").is_file()


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_sinusoids_are_known_after_few_steps(seed, tmp_path):
    values = trained("meta_learning", tmp_path, [f"seed={seed}"])[-1]
    assert values["error_after_1"] <= 0.8
    assert values["error_after_10"] <= 0.4


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
def test_what_learns_to_adapt_adapts_twice_as_well_as_what_does_not(tmp_path):
    options = {
        "joint": "{algorithm: joint, judged_rate: 0.001}",
        "first_order": "{algorithm: first_order}",
        "reptile": "{algorithm: reptile, inner_steps: 10}",
    }
    found = {}
    for name, given in options.items():
        settings = [f"plugin.options={given}", "seed=3"]
        found[name] = trained("meta_learning", tmp_path / name, settings)[-1]["error_after_10"]
    assert max(found["first_order"], found["reptile"]) <= found["joint"] / 2, found
