"""Reinforcement learning: a policy that balances a pole or swings a pendulum up, by PPO (Schulman et al., 2017).

The environments are CartPole-v1 and Acrobot-v1 as gymnasium has them, and `predict_fn` plays many at once, on the
devices, for as many steps as an iteration needs. There are three kinds of examples:

    a transition        what was seen and done in one step of an environment, and how good it was: trained on
    an environment      in the midst of an episode: `predict_fn` plays on, and draws its actions
    a seed              of an episode that nobody has seen: evaluation plays all of it, by the best action
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params, Run
from redco_cli.plugin.environments import (
    SYSTEMS,
    System,
    as_arrays,
    as_batch,
    as_examples,
    begun,
    draw_episodes,
    finished,
    flat,
    play,
    unseen,
    whole_episodes,
)

Policy = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Observations [..., O] to log-probabilities of actions [..., A] and values [...]."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        environment: `cartpole` or `acrobot`.
        environments: how many are played at once.
        horizon: steps of each environment between two updates of the policy.
        epochs: how often each transition is trained on.
        discount: of a reward one step later.
        trace: lambda of the generalised advantages.
        clip: how far the probability of an action may move, as a share of what it was.
        entropy: weight of the entropy of the policy.
        width: of the two hidden layers.
        eval_episodes: how many evaluation plays.
    """

    environment: Literal["cartpole", "acrobot"] = "cartpole"
    environments: int = 8
    horizon: int = 32
    epochs: int = 20
    discount: float = 0.98
    trace: float = 0.8
    clip: float = 0.2
    entropy: float = 0.0
    width: int = 64
    eval_episodes: int = 100


class Net(nn.Module):  # type: ignore[misc]
    """Policy and value, which share nothing."""

    width: int
    actions: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observations [..., O] to log-probabilities [..., A] and values [...]."""

        def network(outputs: int, scale: float) -> jax.Array:
            x = observation
            for _ in range(2):
                x = nn.tanh(nn.Dense(self.width, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
            y: jax.Array = nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(x)
            return y

        return nn.log_softmax(network(self.actions, 0.01)), network(1, 1.0)[..., 0]


def system(ctx: Context) -> System:
    """The environment."""
    return SYSTEMS[ctx.options.environment]


def build_model(ctx: Context) -> Net:
    """Two small networks."""
    actions = system(ctx).actions
    assert actions is not None
    return Net(ctx.options.width, actions)


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """For evaluation, seeds of episodes; for training, the first transitions of a policy that draws any action."""
    if split == "eval":
        return unseen(ctx.options.eval_episodes)
    actions = build_model(ctx).actions

    def policy(observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = observation.shape[:-1]
        return jnp.full((*shape, actions), -np.log(actions)), jnp.zeros(shape)

    return as_examples(flat(played(ctx, policy, beginnings(ctx))["transitions"]))


def beginnings(ctx: Context) -> dict[str, jax.Array]:
    """The environments of a run, at their start."""
    count = ctx.options.environments
    return begun(system(ctx), ctx.recipe.seed * count + np.arange(count))


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """Rows of whatever kind, stacked."""
    return as_batch(examples)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """The clipped objective and the error of the value, summed over transitions; in evaluation minus the returns."""
    options = ctx.options
    if not train:
        returns = predict_fn(ctx, params, batch, rng)["return"]
        return Loss(-returns.sum(), returns.size, {"return": returns.sum()})
    log_probs, values = ctx.model(params, batch["observation"])
    chosen = jnp.take_along_axis(log_probs, batch["action"][:, None], 1)[:, 0]
    ratio, better = jnp.exp(chosen - batch["log_prob"]), batch["advantage"]
    gain = jnp.minimum(ratio * better, jnp.clip(ratio, 1 - options.clip, 1 + options.clip) * better)
    error, entropy = (values - batch["target"]) ** 2 / 2, -(jnp.exp(log_probs) * log_probs).sum(-1)
    metrics = {"value_error": error.sum(), "entropy": entropy.sum(), "kl": (batch["log_prob"] - chosen).sum()}
    return Loss((error - gain - options.entropy * entropy).sum(), gain.size, metrics)


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Mapping[str, Any]:
    """Of seeds, the `return` of their episodes [B]; of environments, how they go on."""
    if "state" in batch:
        return played(ctx, lambda observation: ctx.model(params, observation), batch)

    def act(observation: jax.Array, keys: jax.Array) -> jax.Array:
        best: jax.Array = ctx.model(params, observation)[0].argmax(-1)
        return best

    return {"return": whole_episodes(system(ctx), act, batch["seed"])}


def played(ctx: Context, policy: Policy, environments: Mapping[str, Any]) -> dict[str, Any]:
    """How `environments` stand after an iteration, and its `transitions` and `scores` [B, steps, ...]."""

    def act(observation: jax.Array, keys: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.categorical)(keys, policy(observation)[0])

    after, seen = play(system(ctx), act, environments, ctx.options.horizon)
    log_probs, values = policy(seen["observation"])
    # What is cut off would have gone on: its worth is that of where it was, not of where the next episode begins.
    later = jnp.where(seen["ended"], 0.0, policy(seen["next_observation"])[1])
    better = advantages(ctx.options, seen["reward"], values, later, seen["over"])
    recorded = {
        "observation": seen["observation"],
        "action": seen["action"],
        "log_prob": jnp.take_along_axis(log_probs, seen["action"][..., None], -1)[..., 0],
        "advantage": better,
        "target": better + values,
    }
    made = {"transitions": recorded, "scores": {"over": seen["over"], "score": seen["score"]}}
    return {"environments": after, **jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), made)}


def advantages(options: Options, reward: Any, value: Any, later: Any, over: Any) -> Any:
    """How much better each action was than the usual one, all [steps, B] (Schulman et al., 2016)."""

    def back(following: Any, one: tuple[Any, Any]) -> tuple[Any, Any]:
        surprise, is_last = one
        found = surprise + options.discount * options.trace * jnp.where(is_last, 0.0, following)
        return found, found

    surprises = reward + options.discount * later - value
    return jax.lax.scan(back, jnp.zeros_like(value[0]), (surprises, over), reverse=True)[1]


def run_fn(run: Run) -> None:
    """Plays, and trains on what was played, until the steps of the recipe are done; `returns.png` has the episodes."""
    ctx, options, batch = run.ctx, run.ctx.options, run.ctx.recipe.train.global_batch_size
    run.state = run.state or {"environments": beginnings(ctx), "episodes": []}
    while run.step < run.steps:
        found = run.predict(as_examples(run.state["environments"]))
        after, new, scores = (as_arrays(found, kind) for kind in ("environments", "transitions", "scores"))
        better = new["advantage"]
        new["advantage"] = (better - better.mean()) / (better.std() + 1e-8)
        run.train(as_examples(flat(new)), steps=max(1, options.epochs * better.size // batch))
        run.state = {"environments": after, "episodes": run.state["episodes"] + finished(after, scores)}
        run.log({"environment_steps": int(after["time"].sum())})
        run.save()
    draw_episodes(ctx, run.state["episodes"])
