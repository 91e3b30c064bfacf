"""Reinforcement learning: advantages, targets and what each network learns from; and whole trainings."""

import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.plugin.parts import builtin
from redco_cli.run import train
from redco_cli.training.outer_loop import OuterLoop
from tests.plugins.trained import trained
from tests.training.tiny import assert_same_run, recorded

ppo, td3 = builtin("ppo"), builtin("td3")
MARKS = {"cartpole": (475, 450), "acrobot": (-85, -100), "pendulum": (-200, -250), "particles": (-38, -42)}
"""Recipe to the mean over seeds, and the worst of them."""
SEEDS = range(3, 8)


def test_advantages_stop_at_the_end_of_an_episode_and_go_on_where_it_was_cut():
    draw = np.random.default_rng(0)
    reward, value, later = draw.normal(size=(3, 6, 2))
    over = draw.random((6, 2)) < 0.4
    expected = np.zeros((7, 2))
    for step in reversed(range(6)):
        surprise = reward[step] + 0.9 * later[step] - value[step]
        expected[step] = surprise + 0.9 * 0.7 * np.where(over[step], 0, expected[step + 1])
    found = ppo.advantages(ppo.Options(discount=0.9, trace=0.7), reward, value, later, over)
    np.testing.assert_allclose(found, expected[:-1], rtol=1e-5)


@pytest.mark.slow
def test_what_is_cut_off_is_worth_what_would_have_come(context):
    """A pole that stands is cut off after 500 steps; one that falls has no future."""
    ctx = context("ppo", horizon=2, environments=2)
    rows = dict(ppo.beginnings(ctx))
    rows["elapsed"] = jnp.array([499, 0])
    rows["state"] = rows["state"].at[1].set(jnp.array([0, 0, 0.2, 3.0]))

    def policy(observation):
        return jnp.full((*observation.shape[:-1], 2), -np.log(2)), jnp.full(observation.shape[:-1], 10.0)

    found = ppo.played(ctx, policy, rows)
    assert found["scores"]["over"][:, 0].tolist() == [True, True]
    cut, fallen = found["transitions"]["target"][:, 0]
    assert cut == pytest.approx(1 + 0.98 * 10)
    assert fallen == pytest.approx(1)


def test_the_objective_is_clipped_where_that_makes_it_less(context):
    ctx = context("ppo", model=lambda params, seen: (params, jnp.zeros(len(params))), clip=0.2)
    batch = {"observation": np.zeros((4, 1)), "action": np.zeros(4, int), "target": np.zeros(4, np.float32)}
    batch |= {"log_prob": np.log(np.float32([0.5] * 4)), "advantage": np.float32([1, 1, -1, -1])}
    chosen = jnp.log(jnp.array([0.9, 0.3, 0.9, 0.3]))
    slope = jax.grad(lambda chosen: ppo.loss_fn(ctx, jnp.stack([chosen] * 2, 1), batch, None, True).sum)(chosen)
    assert [bool(one) for one in slope != 0] == [False, True, True, False]  # ratios 1.8, 0.6, 1.8, 0.6
    gain = -ppo.loss_fn(ctx, jnp.stack([chosen] * 2, 1), batch, None, True).sum
    assert gain == pytest.approx(1.2 + 0.6 - 1.8 - 0.8, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["ddpg", "td3"])
def test_critics_learn_from_the_targets_and_the_actor_from_the_critics(context, algorithm):
    ctx = context("td3", algorithm=algorithm, smoothing=0.0, discount=0.9)
    nets = {
        "actor": lambda params, seen: params * seen,
        "critics": lambda params, seen, action: params[:, None] * (seen + action)[..., 0],
    }
    count = 1 + (algorithm == "td3")
    state = {"target": {"actor": 0.5, "critics": jnp.array([4.0, 3.0][:count])}}
    ctx = type(ctx)(None, None, ctx.options, ctx.recipe, "train", state, 3, nets)
    params = {"actor": jnp.array(0.5), "critics": jnp.array([2.0, 7.0][:count])}
    batch = {
        "observation": np.float32([[1.0], [1.0]]),
        "action": np.float32([[0.5], [0.5]]),
        "reward": np.float32([1, 1]),
    }
    batch |= {"next_observation": np.float32([[2.0], [2.0]]), "ended": np.array([False, True])}

    def loss(params):
        return td3.loss_fn(ctx, params, batch, jax.random.key(0), True).sum

    worth = (3.0 if algorithm == "td3" else 4.0) * (2 + 1)  # the lower of two
    goals = 1 + 0.9 * worth, 1.0
    values = [2 * 1.5, 7 * 1.5][:count]
    errors = sum((value - goal) ** 2 for value in values for goal in goals)
    assert loss(params) == pytest.approx(errors - 2 * 2 * 1.5, rel=1e-5)
    slopes = jax.grad(loss)(params)
    assert slopes["actor"] == pytest.approx(-2 * 2)  # two examples, by the first critic alone
    by_hand = [sum(2 * (value - goal) * 1.5 for goal in goals) for value in values]
    np.testing.assert_allclose(slopes["critics"], by_hand, rtol=1e-5)  # and none of it to please the actor


def test_the_actor_of_td3_moves_in_every_second_step(context):
    params = {"actor": jnp.ones(2), "critics": jnp.ones(2)}
    moved = {}
    for algorithm in ("ddpg", "td3"):
        optimizer = td3.optimizer_fn(context("td3", algorithm=algorithm), lambda step: 0.1)
        state, moved[algorithm] = optimizer.init(params), []
        for _ in range(4):
            updates, state = optimizer.update({name: jnp.ones(2) for name in params}, state, params)
            moved[algorithm].append([bool(updates[name].any()) for name in ("actor", "critics")])
    assert moved == {"ddpg": [[True, True]] * 4, "td3": [[False, True], [True, True]] * 2}


def short(recipe, *more):
    """`recipe.yaml`, which is a shipped one, and the overrides of a short run."""
    Path("recipe.yaml").write_text(f"extends: {recipe}\noutput_dir: run\n")
    return [*more, "logging.every=1", "logging.plot=false", "eval.every=10", "plugin.options.eval_episodes=8"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cartpole", "acrobot", "pendulum", "particles"])
def test_the_first_steps_are_those_of_one_device(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["plugin.options.horizon=32"] if recipe == "acrobot" else []
    settings, losses = short(recipe, "train.steps=20", *quick), []
    for number, mesh in enumerate(("{data: 1}", "{data: 8}", "{data: 2, fsdp: 2, tensor: 2}")):
        train("recipe.yaml", [*settings, f"mesh={mesh}", f"output_dir=run-{number}"])
        losses.append([one["loss"] for one in recorded(f"run-{number}") if one["kind"] == "train"])
    assert len(losses[0]) == 20
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("cartpole", "plugin.options.epochs=2"),
        ("pendulum", "plugin.options={horizon: 1, random: 40, eval_episodes: 8}"),
        ("particles", "plugin.options={environments: 8, horizon: 1, random: 40, updates: 4, replay: 330}"),
    ],
)
def test_a_run_that_is_stopped_ends_as_if_it_had_not_been(recipe, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = short(recipe, options, "train.steps=24", "mesh.data=1")
    train("recipe.yaml", [*whole, "output_dir=whole"])
    add = OuterLoop.log

    def stopping(self, values):
        add(self, values)
        if self.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterLoop, "log", stopping)
        with pytest.raises(RedcoError, match="stopped by a signal after step 8; saved"):
            train("recipe.yaml", whole)
    train("recipe.yaml", whole)
    assert_same_run("run", "whole", 24)


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("cartpole", ()),
        ("acrobot", ()),
        ("pendulum", ("plugin.options.algorithm=td3",)),
        ("pendulum", ("plugin.options.algorithm=ddpg",)),
        ("particles", ()),
    ],
)
def test_unseen_episodes_are_mastered(recipe, more, tmp_path):
    """Five seeds, a hundred episodes each."""
    found = []
    for seed in SEEDS:
        found.append(trained(recipe, tmp_path / str(seed), [f"seed={seed}", *more])[-1]["return"])
        assert (tmp_path / str(seed) / "returns.png").is_file()
    mean, worst = MARKS[recipe]
    assert np.mean(found) >= mean, found
    assert min(found) >= worst, found
