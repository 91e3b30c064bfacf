"""Several agents: what each critic is told and learns, what each actor learns from it, and which gradients meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.plugin.environments import simple_spread
from redco_cli.plugin.parts import builtin

maddpg = builtin("maddpg")
AGENTS = range(3)
NAMES = [f"{kind}_{agent}" for kind in ("actor", "critic") for agent in AGENTS]


def known(critic, agent, observation, action):
    """What a critic is told, in one row."""
    told = list(AGENTS) if critic == "joint" else [agent]
    return np.concatenate([observation[:, told], action[:, told]], -1).reshape(len(observation), -1)


def batch(rows=2):
    """Transitions, of which the first was cut off and the second ended by itself."""
    draw = np.random.default_rng(0)
    made = {"observation": (rows, 3, 4), "action": (rows, 3, 2), "reward": (rows,), "next_observation": (rows, 3, 4)}
    arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in made.items()}
    return jax.tree.map(jnp.asarray, arrays | {"ended": np.arange(rows) % 2 == 1})


def linear(context, critic):
    """A context in which all networks are linear, without nonlinearities: what they come to is a sum by hand."""

    def critic_of(agent):
        def value(params, observation, action):
            told = jnp.array(list(AGENTS) if critic == "joint" else [agent])
            seen = jnp.concatenate([observation[:, told], action[:, told]], -1)
            return seen.reshape(len(seen), -1) @ params

        return value

    ctx, draw = context("maddpg", critic=critic, discount=0.9), np.random.default_rng(1)
    nets = {f"actor_{agent}": lambda params, seen: seen @ params for agent in AGENTS}
    nets |= {f"critic_{agent}": critic_of(agent) for agent in AGENTS}
    width = 18 if critic == "joint" else 6

    def params():
        return {name: draw.normal(size=(4, 2) if "actor" in name else width).astype(np.float32) for name in NAMES}

    return type(ctx)(None, None, ctx.options, ctx.recipe, "train", {"target": params()}, 3, nets), params()


@pytest.mark.parametrize("critic", [pytest.param("joint", marks=pytest.mark.slow), "own"])
def test_critics_and_actors_learn_as_the_paper_says(context, critic):
    """Gradients beside those by hand: targets by all target actors, which go on where an episode is cut off."""
    ctx, params = linear(context, critic)
    rows, target = batch(), ctx.state["target"]
    found = maddpg.loss_fn(ctx, params, rows, jax.random.key(0), True)
    slopes = jax.grad(lambda params: maddpg.loss_fn(ctx, params, rows, jax.random.key(0), True).sum)(params)
    later = np.stack([rows["next_observation"][:, agent] @ target[f"actor_{agent}"] for agent in AGENTS], 1)
    error = gain = 0
    for agent in AGENTS:
        name = f"critic_{agent}"
        worth = known(critic, agent, rows["next_observation"], later) @ target[name]
        goal = rows["reward"] + 0.9 * np.where(rows["ended"], 0, worth)
        told = known(critic, agent, rows["observation"], rows["action"])
        surprise = told @ params[name] - goal
        error += (surprise**2).sum()
        np.testing.assert_allclose(slopes[name], 2 * surprise @ told, rtol=1e-4)
        action = rows["action"].at[:, agent].set(rows["observation"][:, agent] @ params[f"actor_{agent}"])
        gain += (known(critic, agent, rows["observation"], action) @ params[name]).sum()
        place = 6 * (agent if critic == "joint" else 0) + 4
        by_hand = -np.outer(rows["observation"][:, agent].sum(0), params[name][place : place + 2])
        np.testing.assert_allclose(slopes[f"actor_{agent}"], by_hand, rtol=1e-4)  # by its own critic alone
    assert found.sum == pytest.approx(float(error - gain), rel=1e-4)
    assert found.weight == 2


@pytest.mark.slow
def test_a_joint_critic_is_told_everything_and_an_own_one_its_agent():
    rows = batch(1)
    for told in [(0, 1, 2), (1,)]:
        net = maddpg.Critic(8, told)
        params = net.init(jax.random.key(0), rows["observation"], rows["action"])
        slopes = jax.grad(lambda *given, net=net, params=params: net.apply(params, *given)[0], (0, 1))(
            rows["observation"], rows["action"]
        )
        for slope in slopes:
            assert np.flatnonzero(np.abs(slope[0]).sum(-1)).tolist() == list(told)


def test_each_network_is_clipped_alone_and_named(context):
    ctx = context("maddpg", agents=2, clip=0.5)
    assert sorted(maddpg.build_model(ctx)) == ["actor_0", "actor_1", "critic_0", "critic_1"]
    optimizer = maddpg.optimizer_fn(ctx, lambda step: 0.1)
    params = {name: jnp.zeros(2) for name in maddpg.build_model(ctx)}
    large = {name: jnp.full(2, 1e6 if name == "critic_1" else 0.01) for name in params}
    _, state = optimizer.update(large, optimizer.init(params), params)
    moments = {name: float(state.inner_states[name].inner_state[1][0].mu[name][0]) for name in params}
    assert moments["actor_0"] == moments["critic_0"] == pytest.approx(0.1 * 0.01)
    assert moments["critic_1"] == pytest.approx(0.1 * 0.5 / np.sqrt(2))


@pytest.mark.slow
def test_episodes_that_nobody_has_seen(context):
    """Of agents that each go to a landmark of their own, slowly enough not to overshoot."""
    ctx = context("maddpg")
    nets = {f"actor_{agent}": lambda goes, seen, at=4 + 2 * agent: goes * seen[:, at : at + 2] for agent in AGENTS}
    ctx = type(ctx)(None, None, ctx.options, ctx.recipe, "predict", None, 3, nets)
    params = {f"actor_{agent}": 1.0 for agent in AGENTS}
    found = maddpg.predict_fn(ctx, params, {"seed": np.arange(20)}, jax.random.key(0))
    assert found["paths"].shape == (20, 25, 3, 2)
    distance = np.linalg.norm(found["paths"][:, -1, :, None] - found["landmarks"][:, None], axis=-1)
    np.testing.assert_allclose(found["covered"], (distance.min(1) < 0.1).mean(1), rtol=1e-6)
    assert found["covered"].mean() > 0.8  # but for landmarks that are too close together for two agents
    assert -40 < found["return"].mean() < -15


def test_there_is_no_world_without_agents():
    with pytest.raises(ValueError, match="agents is 0, but there must be one or more"):
        maddpg.Options(agents=0)


def test_noise_is_of_the_shape_that_all_agents_act_in():
    world = simple_spread(2)
    still = maddpg.noisy(world, lambda observation, keys: jnp.zeros((len(observation), 2, 2)), 0.5)
    actions = still(jnp.zeros((300, 2, 10)), jax.random.split(jax.random.key(0), 300))
    assert actions.shape == (300, 2, 2)
    assert float(actions.std()) == pytest.approx(0.46, abs=0.05)  # of a normal number times 0.5, cut off at 1
    assert np.abs(actions).max() == 1
