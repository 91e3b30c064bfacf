"""Off policy: what happened is kept, in `run.state`, and trained on again and again.

A transition is an example with `observation`, `action`, `reward`, `next_observation`, and whether the episode `ended`
by itself: one that was cut off did not, and `next_observation` is worth what would have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.contract import Run
from redco_cli.plugin.environments.examples import as_arrays, as_examples, draw_episodes, finished, flat
from redco_cli.plugin.environments.playing import Act, begun, play
from redco_cli.plugin.environments.system import System

Array = Any
_TRANSITION = ("observation", "action", "reward", "next_observation", "ended")


def noisy(system: System, act: Act, share: float) -> Act:
    """`act` with normal noise, as a share of the greatest action, and never beyond that."""

    def explore(observation: Array, keys: Array) -> Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, system.action_shape))(keys)
        return (act(observation, keys) + share * system.most * noise).clip(-system.most, system.most)

    return explore


def collected(system: System, act: Act, environments: Mapping[str, Array], steps: int) -> dict[str, Any]:
    """What a `predict_fn` returns for `train_on_replay`, of environments [B].

    Returns:
        The `environments` as they stand some steps later, the `transitions` until then [B, steps, ...], and of each
        step `scores`: whether the episode is `over`, and its `score` so far.
    """
    after, seen = play(system, act, environments, steps)
    made = {
        "transitions": {name: seen[name] for name in _TRANSITION},
        "scores": {name: seen[name] for name in ("over", "score")},
    }
    return {"environments": after, **jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), made)}


def before_training(system: System, seed: int, environments: int, steps: int) -> dict[str, Any]:
    """The `run.state` that `train_on_replay` begins with: each environment has had so many steps of random actions.

    Returns:
        `environments`, a `replay` of transitions [environments * steps, ...], and no `episodes` yet.
    """

    def act(observation: Array, keys: Array) -> Array:
        shape, most = system.action_shape, system.most
        return jax.vmap(lambda key: jax.random.uniform(key, shape, minval=-most, maxval=most))(keys)

    rows = begun(system, seed * environments + np.arange(environments))
    made = jax.device_get(collected(system, act, rows, steps))
    return {"environments": made["environments"], "replay": flat(made["transitions"]), "episodes": []}


def train_on_replay(run: Run, steps: int | None = None, most: int | None = None) -> None:
    """Plays, keeps, and trains on what was kept, until the steps of the recipe are done; draws `returns.png`.

    Args:
        run: with a `state` as `before_training` makes it, and a plugin whose `predict_fn` returns what was `collected`.
        steps: optimizer steps after each piece of play; as many as steps were played, where nothing is said.
        most: how many transitions are kept, the newest ones; all, where nothing is said.
    """
    assert run.state is not None
    replay, newest = as_examples(run.state["replay"]), slice(-most if most else None, None)
    while run.step < run.steps:
        found = run.predict(as_examples(run.state["environments"]))
        after, new, scores = (as_arrays(found, kind) for kind in ("environments", "transitions", "scores"))
        new = flat(new)
        replay = (replay + as_examples(new))[newest]
        run.train(replay, steps=steps or len(new["reward"]))
        kept = {name: np.concatenate([array, new[name]])[newest] for name, array in run.state["replay"].items()}
        episodes = run.state["episodes"] + finished(after, scores)
        run.state = {"environments": after, "replay": kept, "episodes": episodes}
        run.log({"environment_steps": int(after["time"].sum())})
        run.save()
    draw_episodes(run.ctx, run.state["episodes"])
