"""Reinforcement learning off policy: a pendulum is held upright, by DDPG or TD3 (Lillicrap, 2016; Fujimoto, 2018).

Everything that ever happened is kept, in `run.state`, and trained on again and again: an actor that says what to do,
and critics that say what that is worth. Their targets are slow copies of both, kept by `update_state`. The environment
is Pendulum-v1 as gymnasium has it; `predict_fn` plays many at once. There are three kinds of examples:

    a transition        what was seen, done and gained in one step, and what was seen next: trained on
    an environment      in the midst of an episode: `predict_fn` plays on, with noise on its actions
    a seed              of an episode that nobody has seen: evaluation plays all of it, without noise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params, Run
from redco_cli.plugin.environments import (
    SYSTEMS,
    as_batch,
    as_examples,
    before_training,
    collected,
    noisy,
    train_on_replay,
    unseen,
    whole_episodes,
)

PENDULUM = SYSTEMS["pendulum"]


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        algorithm: `ddpg` has one critic; `td3` takes the lower of two, disturbs the actions that they judge, and moves
            the actor in every second step only.
        environments: how many are played at once.
        horizon: steps of each environment between two pieces of training, which has as many optimizer steps as there
            were steps of all environments.
        random: steps of each environment before any training, by actions that mean nothing.
        discount: of a reward one step later.
        noise: on actions in play, as a share of the greatest one.
        smoothing: noise on the actions that critics judge, likewise; never more than 2.5 times that.
        inertia: how much of a target network is left after a step.
        width: of the two hidden layers.
        eval_episodes: how many evaluation plays.
    """

    algorithm: Literal["ddpg", "td3"] = "td3"
    environments: int = 8
    horizon: int = 10
    random: int = 125
    discount: float = 0.98
    noise: float = 0.1
    smoothing: float = 0.2
    inertia: float = 0.995
    width: int = 128
    eval_episodes: int = 100


class Actor(nn.Module):  # type: ignore[misc]
    """What to do."""

    width: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Observations [..., O] to actions [..., 1]."""
        x = observation
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        action: jax.Array = PENDULUM.most * nn.tanh(nn.Dense(1)(x))
        return action


class Critics(nn.Module):  # type: ignore[misc]
    """What that is worth, by one critic or two."""

    width: int
    count: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Observations [..., O] and actions [..., 1] to values [count, ...]."""
        values = []
        for _ in range(self.count):
            x = jnp.concatenate([observation, action], -1)
            for _ in range(2):
                x = nn.relu(nn.Dense(self.width)(x))
            values.append(nn.Dense(1)(x)[..., 0])
        return jnp.stack(values)


def build_model(ctx: Context) -> Mapping[str, nn.Module]:
    """Actor and critics, which are trained together."""
    return {
        "actor": Actor(ctx.options.width),
        "critics": Critics(ctx.options.width, 1 + (ctx.options.algorithm == "td3")),
    }


def optimizer_fn(ctx: Context, schedule: Any) -> optax.GradientTransformation:
    """Adam for both; with TD3 the actor takes the mean of two gradients in every second step."""
    actor = optax.MultiSteps(optax.adam(schedule), 2) if ctx.options.algorithm == "td3" else optax.adam(schedule)
    return optax.multi_transform(
        {"actor": actor, "critics": optax.adam(schedule)}, lambda params: {name: name for name in params}
    )


def init_state(ctx: Context, params: Params) -> Mapping[str, Params]:
    """The target networks."""
    return {"target": params}


def update_state(ctx: Context, state: Mapping[str, Params], params: Params, stats: Any) -> Mapping[str, Params]:
    """Target networks follow slowly."""
    return {"target": optax.incremental_update(params, state["target"], 1 - ctx.options.inertia)}


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """For evaluation, seeds of episodes; for training, the first transitions, by actions that mean nothing."""
    return unseen(ctx.options.eval_episodes) if split == "eval" else as_examples(beginning(ctx)["replay"])


def beginning(ctx: Context) -> dict[str, Any]:
    """What happens before any training."""
    return before_training(PENDULUM, ctx.recipe.seed, ctx.options.environments, ctx.options.random)


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Rows of whatever kind, stacked."""
    return as_batch(examples)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Errors of the critics, and what the first says of the actor, summed; in evaluation minus the returns."""
    if not train:
        returns = predict_fn(ctx, params, batch, rng)["return"]
        return Loss(-returns.sum(), returns.size, {"return": returns.sum()})
    options, target, most = ctx.options, ctx.state["target"], PENDULUM.most
    actor, critics = ctx.models["actor"], ctx.models["critics"]
    later = actor(target["actor"], batch["next_observation"])
    if options.algorithm == "td3":
        noise = most * options.smoothing * jax.random.normal(rng, later.shape).clip(-2.5, 2.5)
        later = (later + noise).clip(-most, most)
    worth = critics(target["critics"], batch["next_observation"], later).min(0)
    goal = batch["reward"] + options.discount * jnp.where(batch["ended"], 0.0, worth)
    values = critics(params["critics"], batch["observation"], batch["action"])
    error = ((values - goal) ** 2).sum(0)
    judges = jax.lax.stop_gradient(params["critics"])  # the actor is to please them, and they are to judge
    gain = critics(judges, batch["observation"], actor(params["actor"], batch["observation"]))[0]
    return Loss((error - gain).sum(), error.size, {"critic_error": error.sum(), "value": gain.sum()})


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, Any]:
    """Of seeds, the `return` of their episodes [B]; of environments, how they go on."""

    def act(observation: jax.Array, keys: jax.Array) -> jax.Array:
        action: jax.Array = ctx.models["actor"](params["actor"], observation)
        return action

    if "state" not in batch:
        return {"return": whole_episodes(PENDULUM, act, batch["seed"])}
    return collected(PENDULUM, noisy(PENDULUM, act, ctx.options.noise), batch, ctx.options.horizon)


def run_fn(run: Run) -> None:
    """Plays, keeps, and trains on all that was kept, as often as it played; draws `returns.png`."""
    run.state = run.state or beginning(run.ctx)
    train_on_replay(run)
