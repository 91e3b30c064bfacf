"""The private gradient against its definition, written out: each example alone, however the batch is cut."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from redco_cli.data.batch import PADDING
from redco_cli.plugin.contract import Loss
from redco_cli.plugin.state import Variables
from redco_cli.privacy.accounting import Budget
from redco_cli.privacy.gradient import _noise, private_gradient
from redco_cli.training.state import new_state
from redco_cli.training.step import make_train_step

PARAMS = {"w": jnp.array([0.5, -0.25, 1.0]), "b": jnp.array(0.1)}
BUDGET = Budget("rdp", 1e-5, 0.7, 1.5, 100, 5, 8, 10)
SILENT = replace(BUDGET, noise_multiplier=0.0)
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SIZE, REAL = 8, 6


def batch_of(micro_batches=1, spoiled=None):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(SIZE, 3)), generator.normal(size=SIZE)
    weight = np.array([1, 3, 0, 2, 1, 1, 5, 5])
    if spoiled is not None:
        x[spoiled] = np.inf
    x[REAL:] = np.nan  # padding must not be looked at
    rows = {"x": np.float32(x), "y": np.float32(y), "weight": np.float32(weight), PADDING: np.arange(SIZE) >= REAL}
    return {name: jnp.asarray(row).reshape(micro_batches, -1, *row.shape[1:]) for name, row in rows.items()}


def loss(variables, batch, rng, train):
    assert PADDING not in batch
    params, noise = variables.params, jax.random.normal(rng, batch["y"].shape)
    error = batch["x"] @ params["w"] + params["b"] - batch["y"] + 0.1 * noise
    weighted = error**2 * batch["weight"]
    return Loss(weighted.sum(), batch["weight"].sum(), {"error": (error.sum(), jnp.float32(error.size))})


def found(budget, batch):
    gradient = private_gradient(loss, budget, HERE)
    return jax.jit(lambda batch, key: gradient(Variables, PARAMS, batch, key))(batch, jax.random.key(0))


def noise_of(budget, key, accepted=()):
    """The noise of a step, as a part of the gradient."""
    drawn = _noise(budget, accepted)(jax.tree.map(jnp.zeros_like, PARAMS), jax.random.key(key))
    return jax.tree.map(lambda leaf: leaf / budget.batch_size, drawn)


def expected(rows):
    """By hand: the gradient of error**2 is 2 * error * (x, 1), whatever an example weighs."""
    batch, key = batch_of(), jax.random.key(0)
    drawn = np.asarray(jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row), (1,)))(jnp.arange(SIZE)))
    x, y = np.asarray(batch["x"][0]), np.asarray(batch["y"][0])
    error = x @ np.asarray(PARAMS["w"]) + float(PARAMS["b"]) - y + 0.1 * drawn[:, 0]
    each = 2 * error[:, None] * np.hstack([x, np.ones((SIZE, 1))])
    clipped = [row * min(1.0, BUDGET.clip / np.linalg.norm(row)) for row in each[rows]]
    total = np.sum(clipped, axis=0) / BUDGET.batch_size
    return {"w": total[:3], "b": total[3]}


def close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), one, other)


def test_it_is_the_sum_of_clipped_gradients_over_the_expected_batch_however_it_is_cut():
    wanted = expected([0, 1, 3, 4, 5])  # without weight there is no gradient
    for micro_batches in (1, 4):  # of four, the last is padding alone
        total, gradient = found(SILENT, batch_of(micro_batches))
        close(gradient, wanted)
        assert float(total.weight) == 8
        assert float(total.metrics["error"][1]) == REAL
        assert np.isfinite(float(total.sum))


def test_noise_is_added_once_however_many_micro_batches_there_are():
    _, gradient = found(BUDGET, batch_of(4))
    close(gradient, jax.tree.map(jnp.add, expected([0, 1, 3, 4, 5]), noise_of(BUDGET, 0)))


def test_noise_follows_from_the_step_and_from_what_a_run_is_trained_with():
    accepted = [{"step": 3, "what": "data", "why": "by checkpoint.accept=data", "mark": "x"}]
    again = [{**accepted[0], "why": "as accepted before"}]
    drawn = [noise_of(BUDGET, 0), noise_of(BUDGET, 1), noise_of(replace(BUDGET, salt="other"), 0)]
    drawn.append(noise_of(BUDGET, 0, accepted))
    assert len({float(one["b"]) for one in drawn}) == 4
    close(noise_of(BUDGET, 0), drawn[0])
    close(noise_of(BUDGET, 0, again), drawn[3])


def test_noise_has_its_standard_deviation():
    drawn = np.asarray(_noise(BUDGET, ())({"w": jnp.zeros(20_000)}, jax.random.key(3))["w"])
    assert drawn.std() == pytest.approx(1.5 * 0.7, rel=0.03)
    assert abs(drawn.mean()) < 0.03


def test_an_example_that_is_not_finite_has_no_gradient_and_decides_nothing():
    optimizer = optax.sgd(1.0)
    private = private_gradient(loss, SILENT, HERE)
    arguments = (loss, optimizer, optax.constant_schedule(1.0), 0, HERE, lambda variables, _: None, private)
    step = jax.jit(make_train_step(*arguments))
    before = new_state(PARAMS, frozenset(), optimizer)
    state, metrics = step(before, batch_of(2, spoiled=1))
    assert not np.isfinite(float(metrics["loss"]))
    assert (int(state.skipped), int(state.step)) == (0, 1)
    assert float(metrics["grad_norm"]) > 0
    spoiled = jax.tree.map(lambda a, b: np.asarray(a - b), PARAMS, state.params)
    plain, _ = step(before, batch_of(2))
    whole = jax.tree.map(lambda a, b: np.asarray(a - b), PARAMS, plain.params)
    assert np.linalg.norm(whole["w"] - spoiled["w"]) <= BUDGET.clip / BUDGET.batch_size + 1e-6


def test_without_a_budget_there_is_none():
    assert private_gradient(loss, None, HERE) is None
