"""Cooperative navigation beside its published equations, written once more in numpy, one agent after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.plugin.environments import begun, play, simple_spread


def their_step(position, velocity, landmark, action):
    """`World.step`, `Scenario.observation` and `Scenario.reward`, with the three differences that ours has."""
    count = len(position)
    force = 5.0 * np.clip(np.float64(action), -1, 1)
    for a in range(count):
        for b in range(a + 1, count):
            delta = position[a] - position[b]
            distance = np.sqrt(np.sum(np.square(delta)))
            penetration = np.logaddexp(0, -(distance - 0.3) / 1e-3) * 1e-3
            force[a] += 1e2 * delta / distance * penetration
            force[b] -= 1e2 * delta / distance * penetration
    velocity = velocity * (1 - 0.25) + force / 1.0 * 0.1
    position = position + velocity * 0.1
    rewards, observations, touched = [], [], 0
    for a in range(count):
        touching = sum(np.hypot(*(position[a] - position[b])) < 0.3 for b in range(count) if b != a)
        rewards.append(-sum(min(np.hypot(*(there - mark)) for there in position) for mark in landmark) - touching)
        others = [position[b] - position[a] for b in range(count) if b != a]
        marks = [mark - position[a] for mark in landmark]
        observations.append(np.concatenate([velocity[a], position[a], *marks, *others]))
        touched += touching
    return np.concatenate([position, velocity, landmark]).ravel(), np.mean(rewards), np.array(observations), touched


@pytest.mark.parametrize("agents", [1, 3])
def test_each_step_is_that_of_the_published_equations(agents):
    """Many episodes of agents that begin close together, so that they push each other."""
    world, draw, touched = simple_spread(agents), np.random.default_rng(agents), 0
    move, see = jax.jit(jax.vmap(world.moved)), jax.jit(jax.vmap(world.observed))
    reach = np.array([0.3, 0.5, 1.0])[:, None, None]
    states = np.float32(draw.uniform(-1, 1, (60, 3, agents, 2)) * reach).reshape(60, -1)
    for _ in range(12):
        actions = np.float32(draw.uniform(-1.2, 1.2, (60, agents, 2)))
        new, rewards, ended = jax.device_get(move(states, actions))
        seen = np.asarray(see(new))
        for row, state in enumerate(states):
            theirs = their_step(*np.float64(state).reshape(3, agents, 2), actions[row])
            np.testing.assert_allclose(new[row], theirs[0], atol=1e-5)
            assert float(rewards[row]) == pytest.approx(theirs[1], abs=1e-4)
            np.testing.assert_allclose(seen[row], theirs[2], atol=1e-5)
            touched += theirs[3]
        assert not ended.any()
        states = new
    assert (touched > 50) == (agents > 1)


@pytest.mark.slow
def test_agents_in_one_place_stay_finite():
    world = simple_spread(2)
    new, reward, _ = world.moved(jnp.zeros(12), jnp.zeros((2, 2)))
    assert new.tolist() == [0.0] * 12
    assert reward == -1


@pytest.mark.slow
def test_episodes_begin_at_rest_and_are_cut_off_after_25_steps():
    world = simple_spread(3)
    states = np.asarray(begun(world, np.arange(2000))["state"]).reshape(-1, 3, 3, 2)
    assert not states[:, 1].any()
    np.testing.assert_allclose(np.abs(states[:, [0, 2]]).max(0), 1, rtol=0.01)
    np.testing.assert_allclose(states.mean(0), 0, atol=0.05)

    def chance(observation, keys):
        return jax.vmap(lambda key: jax.random.uniform(key, world.action_shape, minval=-1))(keys)

    together, seen = play(world, chance, begun(world, [3, 4, 5]), 51)
    assert seen["observation"].shape == (51, 3, 3, 14)
    assert seen["action"].shape == (51, 3, 3, 2)
    assert seen["reward"].shape == (51, 3)
    assert np.flatnonzero(seen["over"][:, 0]).tolist() == [24, 49]
    assert not seen["ended"].any()
    alone, _ = play(world, chance, begun(world, [4]), 51)
    for name, array in alone.items():  # whoever plays beside
        np.testing.assert_allclose(array[0], together[name][1], rtol=1e-5, atol=1e-5)
