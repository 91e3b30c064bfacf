"""Reinforcement learning of several agents: they cover landmarks together, by MADDPG (Lowe et al., 2017).

Each agent has an actor, which knows what this agent sees and nothing else, and a critic, which is needed in training
only and is told what all of them see and do. For the agents i, with target networks marked ':

    critic   (Q_i(o, a) - r - discount Q'_i(o', mu'_1(o'_1), ..., mu'_N(o'_N)))²
    actor    -Q_i(o, a_1, ..., mu_i(o_i), ..., a_N)                                what others did is as it was

Each is a model, with an optimizer. With `critic: own` a critic is told what its own agent sees and does: DDPG for each.
Episodes are cut off after 25 steps, which is not their end. Examples are of three kinds, as in `td3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params, Run
from redco_cli.plugin.environments import (
    System,
    as_batch,
    as_examples,
    before_training,
    begun,
    collected,
    noisy,
    play,
    simple_spread,
    train_on_replay,
    unseen,
)
from redco_cli.plugin.parts import picture

COVERED = 0.1
"""An agent that is so near to a landmark covers it, as the scenario's `benchmark_data` counts."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        critic: is told what all agents see and do (`joint`), or what its own does (`own`), which is DDPG for each.
        agents: how many, and as many landmarks.
        environments: how many are played at once.
        horizon: steps of each environment between two pieces of training.
        updates: optimizer steps of such a piece.
        random: steps of each environment before any training, by actions that mean nothing.
        replay: how many transitions are kept, the newest.
        discount: of a reward one step later.
        noise: on actions in play, as a share of the greatest one.
        inertia: how much of a target network is left after a step.
        clip: the norm that the gradient of each network is scaled down to.
        width: of the two hidden layers.
        eval_episodes: how many evaluation plays.
    """

    critic: Literal["joint", "own"] = "joint"
    agents: int = 3
    environments: int = 32
    horizon: int = 25
    updates: int = 80
    random: int = 100
    replay: int = 100_000
    discount: float = 0.95
    noise: float = 0.2
    inertia: float = 0.99
    clip: float = 0.5
    width: int = 128
    eval_episodes: int = 100

    def __post_init__(self) -> None:
        """Refuses a world without agents."""
        if self.agents < 1:
            raise ValueError(f"agents is {self.agents}, but there must be one or more")


def hidden(x: jax.Array, width: int) -> jax.Array:
    """Two layers, within a module: [..., N] to [..., width]."""
    for _ in range(2):
        x = nn.relu(nn.Dense(width)(x))
    return x


class Actor(nn.Module):  # type: ignore[misc]
    """What an agent does."""

    width: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Observations of this agent [..., O] to its actions [..., 2]."""
        action: jax.Array = nn.tanh(nn.Dense(2)(hidden(observation, self.width)))
        return action


class Critic(nn.Module):  # type: ignore[misc]
    """What that is worth."""

    width: int
    told: tuple[int, ...]
    """The agents that it knows of."""

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Observations [B, agents, O] and actions [B, agents, 2] to values [B]."""
        known = jnp.concatenate([observation, action], -1)[:, list(self.told)]
        value: jax.Array = nn.Dense(1)(hidden(known.reshape(len(known), -1), self.width))[:, 0]
        return value


def build_model(ctx: Context) -> Mapping[str, nn.Module]:
    """`actor_0`, `critic_0`, and so on, which are trained together."""
    width, everyone = ctx.options.width, tuple(range(ctx.options.agents))
    told = {agent: everyone if ctx.options.critic == "joint" else (agent,) for agent in everyone}
    actors = {f"actor_{agent}": Actor(width) for agent in everyone}
    return actors | {f"critic_{agent}": Critic(width, told[agent]) for agent in everyone}


def optimizer_fn(ctx: Context, schedule: Any) -> optax.GradientTransformation:
    """Adam for each network, whose gradient is clipped alone."""
    each = optax.chain(optax.clip_by_global_norm(ctx.options.clip), optax.adam(schedule))
    names = tuple(build_model(ctx))
    return optax.multi_transform(dict.fromkeys(names, each), lambda params: {name: name for name in params})


def init_state(ctx: Context, params: Params) -> Mapping[str, Params]:
    """The target networks."""
    return {"target": params}


def update_state(ctx: Context, state: Mapping[str, Params], params: Params, stats: Any) -> Mapping[str, Params]:
    """Target networks follow slowly."""
    return {"target": optax.incremental_update(params, state["target"], 1 - ctx.options.inertia)}


def system(ctx: Context) -> System:
    """The environment."""
    return simple_spread(ctx.options.agents)


def beginning(ctx: Context) -> dict[str, Any]:
    """What happens before any training."""
    return before_training(system(ctx), ctx.recipe.seed, ctx.options.environments, ctx.options.random)


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """For evaluation, seeds of episodes; for training, the first transitions, by actions that mean nothing."""
    return unseen(ctx.options.eval_episodes) if split == "eval" else as_examples(beginning(ctx)["replay"])


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Rows of whatever kind, stacked."""
    return as_batch(examples)


def actions(ctx: Context, params: Params, observation: jax.Array) -> jax.Array:
    """What all agents do [B, agents, 2], each by what it sees of [B, agents, O]."""
    each = [ctx.models[f"actor_{i}"](params[f"actor_{i}"], observation[:, i]) for i in range(ctx.options.agents)]
    return jnp.stack(each, 1)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Errors of the critics, and what each says of its actor, summed; in evaluation minus the returns."""
    if not train:
        found = predict_fn(ctx, params, batch, rng)
        metrics = {name: found[name].sum() for name in ("return", "covered")}
        return Loss(-metrics["return"], len(found["return"]), metrics)
    seen, did, target = batch["observation"], batch["action"], ctx.state["target"]
    later, would_do = actions(ctx, target, batch["next_observation"]), actions(ctx, params, seen)
    error = gain = jnp.zeros(len(seen))
    for agent in range(ctx.options.agents):
        name, critic = f"critic_{agent}", ctx.models[f"critic_{agent}"]
        worth = critic(target[name], batch["next_observation"], later)
        goal = batch["reward"] + ctx.options.discount * jnp.where(batch["ended"], 0.0, worth)
        error += (critic(params[name], seen, did) - goal) ** 2
        judge = jax.lax.stop_gradient(params[name])  # its actor is to please it, and it is to judge
        gain += critic(judge, seen, did.at[:, agent].set(would_do[:, agent]))
    return Loss((error - gain).sum(), len(seen), {"critic_error": error.sum(), "value": gain.sum()})


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, Any]:
    """Of seeds, their episodes; of environments, how they go on.

    Returns:
        Of an episode its `return`, the share of landmarks that is `covered` at its end, the `paths` of agents [steps,
        agents, 2], and the `landmarks` [agents, 2].
    """
    world, agents = system(ctx), ctx.options.agents

    def act(observation: jax.Array, keys: jax.Array) -> jax.Array:
        return actions(ctx, params, observation)

    if "state" in batch:
        return collected(world, noisy(world, act, ctx.options.noise), batch, ctx.options.horizon)
    start = begun(world, batch["seed"])
    _, seen = play(world, act, start, world.limit)
    position = jnp.swapaxes(seen["next_observation"][..., 2:4], 0, 1)
    landmarks = start["state"].reshape(-1, 3, agents, 2)[:, 2]
    apart = jnp.linalg.norm(landmarks[:, :, None] - position[:, -1, None], axis=-1)
    covered = (apart.min(-1) < COVERED).mean(-1)
    return {"return": seen["reward"].sum(0), "covered": covered, "paths": position, "landmarks": landmarks}


def run_fn(run: Run) -> None:
    """Plays, keeps, and trains on what was kept; draws `returns.png`, and four episodes that nobody has seen."""
    run.state = run.state or beginning(run.ctx)
    train_on_replay(run, run.ctx.options.updates, run.ctx.options.replay)
    with picture(run.ctx, "paths.png", (8, 8)) as figure:
        for axes, shown in zip(figure.subplots(2, 2).flat, run.predict(unseen(4)), strict=True):
            axes.plot(*np.moveaxis(shown["paths"], -1, 0), ".-")
            axes.plot(*np.transpose(shown["landmarks"]), "k+", markersize=12)
            axes.set(title=f"return {shown['return']:.1f}", aspect="equal")
