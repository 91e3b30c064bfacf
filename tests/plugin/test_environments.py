"""Environments beside gymnasium's, step by step, and what is played in them."""

from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.plugin.environments import (
    SYSTEMS,
    System,
    as_arrays,
    as_examples,
    begun,
    finished,
    flat,
    play,
    replay,
    train_on_replay,
    whole_episodes,
)

NAMES = {"cartpole": "CartPole-v1", "acrobot": "Acrobot-v1", "pendulum": "Pendulum-v1"}
COUNTER = System((1.0,), 2, 0.0, 4, lambda state: state, lambda state, action: (state + 1, action * 1.0, state[0] > 99))
"""Nothing ends by itself, and action 1 is worth a point."""


@pytest.mark.parametrize("name", ["cartpole", "pendulum", pytest.param("acrobot", marks=pytest.mark.slow)])
def test_each_step_is_that_of_gymnasium(name):
    system, theirs = SYSTEMS[name], gymnasium.make(NAMES[name]).unwrapped
    draw, move, see = np.random.default_rng(0), jax.jit(system.moved), jax.jit(system.observed)
    ends, turned = 0, 0
    for _ in range(1500):
        theirs.reset()
        reach = {"cartpole": [2.5, 3, 0.22, 3], "acrobot": [3, 3, 12, 28], "pendulum": [9, 8]}[name]
        state = draw.uniform(-1, 1, len(reach)) * reach
        theirs.state = state.copy()
        action = draw.uniform(-3, 3, 1) if system.actions is None else int(draw.integers(system.actions))
        seen, reward, ended, _, _ = theirs.step(action)
        new, our_reward, our_end = move(state.astype(np.float32), np.float32(action))
        assert float(our_reward) == pytest.approx(float(reward), abs=2e-4)
        assert bool(our_end) == ended
        ends += ended
        turned += abs(float(new[0]) - float(theirs.state[0])) > 1  # by a whole turn, where an angle is at the seam
        np.testing.assert_allclose(see(new), seen, atol=2e-3 if name == "acrobot" else 2e-5, rtol=1e-4)
    assert turned < 3
    assert (ends > 20) == (name != "pendulum")


@pytest.mark.parametrize("name", NAMES)
def test_episodes_begin_and_are_cut_off_as_gymnasiums(name):
    system, theirs = SYSTEMS[name], gymnasium.make(NAMES[name])
    states = np.asarray(begun(system, np.arange(4000))["state"])
    assert system.limit == theirs.spec.max_episode_steps
    assert jax.vmap(system.observed)(states).shape[1:] == theirs.reset(seed=0)[0].shape
    np.testing.assert_allclose(np.abs(states).max(0), system.spread, rtol=0.01)
    np.testing.assert_allclose(states.mean(0), 0, atol=0.05 * max(system.spread))
    begins = np.array([theirs.unwrapped.state for seed in range(500) if theirs.reset(seed=seed)])
    np.testing.assert_allclose(np.abs(begins).max(0), system.spread, rtol=0.03)


def ones(observation, keys):
    return jnp.ones(len(observation), int)


@pytest.mark.slow
def test_an_episode_is_cut_off_and_the_next_begins():
    rows, seen = play(COUNTER, ones, begun(COUNTER, [0, 1]), 10)
    assert seen["over"][:, 0].tolist() == [False, False, False, True] * 2 + [False, False]
    assert not seen["ended"].any()
    assert seen["score"][:, 1].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert rows["time"].tolist() == [10, 10]
    assert rows["elapsed"].tolist() == rows["score"].tolist() == [2, 2]
    last, first = seen["next_observation"][3, 0], seen["observation"][4, 0]
    assert last == seen["observation"][3, 0] + 1  # of the episode that is over, not of the next one
    assert abs(first) <= 1
    assert whole_episodes(COUNTER, ones, jnp.arange(3)).tolist() == [4, 4, 4]


@pytest.mark.slow
def test_what_is_played_does_not_depend_on_who_plays_beside_nor_on_when_it_is_cut():
    def chance(observation, keys):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys)

    system = SYSTEMS["cartpole"]
    together, seen = play(system, chance, begun(system, [3, 4, 5]), 40)
    part, _ = play(system, chance, begun(system, [4]), 15)
    alone, after = play(system, chance, part, 25)
    assert after["over"].any()
    for name, array in alone.items():
        np.testing.assert_allclose(array[0], together[name][1], rtol=1e-6)
    assert len({tuple(column) for column in seen["action"].T.tolist()}) == 3


def test_predictions_become_transitions_and_episodes():
    played = [
        {"scores": {"over": [False, True], "score": [1.0, 2.5]}},
        {"scores": {"over": [True, False], "score": [4.0, 1.0]}},
    ]
    scores = as_arrays(played, "scores")
    assert finished({"time": np.array([2, 2])}, scores) == [[4.0, 2.5], [4.0, 4.0]]
    rows = as_examples(flat({"reward": scores["score"], "seen": np.zeros((2, 2, 3))}))
    assert [float(row["reward"]) for row in rows] == [1.0, 2.5, 4.0, 1.0]
    assert rows[0]["seen"].shape == (3,)
    assert rows[0]["reward"].dtype == np.float32


@pytest.mark.parametrize(("steps", "most"), [(None, None), (3, 5)])
def test_what_happened_is_kept_and_trained_on(steps, most, monkeypatch):
    """Two environments, each two steps further at each piece, for three pieces; the newest is kept."""
    drawn, trained, logged = [], [], []

    def predict(examples):
        first = int(examples[0]["time"])
        rewards = [[float(10 * (first + step) + number) for step in (1, 2)] for number in (0, 1)]
        scores = {"over": [False, True], "score": [0.0, 1.0]}
        after = {"time": first + 2}
        return [{"environments": after, "transitions": {"reward": row}, "scores": scores} for row in rewards]

    def train(examples, steps):
        trained.append([float(example["reward"]) for example in examples])
        run.step += steps

    monkeypatch.setattr(replay, "draw_episodes", lambda ctx, episodes: drawn.extend(episodes))
    run = SimpleNamespace(ctx=None, step=0, steps=3 * (steps or 4), predict=predict, train=train)
    run.log, run.save = lambda values: logged.append(values["environment_steps"]), lambda: None
    before = {"reward": np.float32([1, 2])}
    run.state = {"environments": {"time": np.int32([0, 0])}, "replay": before, "episodes": []}
    train_on_replay(run, steps, most)
    happened = [1, 2, 10, 20, 11, 21, 30, 40, 31, 41, 50, 60, 51, 61]
    kept = [happened[: 2 + 4 * piece][-most if most else None :] for piece in (1, 2, 3)]
    assert trained == kept
    assert run.state["replay"]["reward"].tolist() == kept[-1]
    assert logged == [4, 8, 12]
    assert run.state["episodes"] == drawn == [[played, 1.0] for played in (4.0, 8.0, 12.0) for _ in range(2)]
