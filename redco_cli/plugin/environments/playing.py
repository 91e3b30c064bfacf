"""Playing many environments at once: each is an example, a row of numbers that says all about where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.environments.system import System

Array = Any
Act = Callable[[Array, Array], Array]
"""Observations [B, O] and a key for each, [B], to actions: [B], or [B, ...] of the shape that the system has."""


def begun(system: System, seeds: Array) -> dict[str, Array]:
    """Environments at the start of their first episodes, by the seed of each [B]: rows for `play`."""
    seeds = jnp.asarray(seeds, jnp.int32)
    nothing = jnp.zeros_like(seeds)
    state = jax.vmap(lambda key: _start(system, key))(_keys(seeds, nothing))
    return {"seed": seeds, "time": nothing, "elapsed": nothing, "score": jnp.zeros(seeds.shape), "state": state}


def play(system: System, act: Act, rows: Mapping[str, Array], steps: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Plays environments on; where an episode is over, the next begins.

    Args:
        system: the environment.
        act: what chooses actions.
        rows: `seed`, `time` (steps since the beginning), `elapsed` and `score` (steps and rewards of this episode),
            each [B], and `state` [B, S].
        steps: of each environment.

    Returns:
        The rows as they are then, and what happened, with leading dims [steps, B]: `observation` [O], `action`,
        `reward`, `next_observation` [O] (of this episode, even where it is the last), `ended` (by itself), `over`
        (ended, or cut off), and `score`, the rewards of the episode until then.
    """

    def step(rows: Mapping[str, Array], _: None) -> tuple[dict[str, Array], dict[str, Array]]:
        time, elapsed = rows["time"] + 1, rows["elapsed"] + 1
        keys = jax.vmap(jax.random.split)(_keys(rows["seed"], time))
        observation = jax.vmap(system.observed)(rows["state"])
        action = act(observation, keys[:, 0])
        state, reward, ended = jax.vmap(system.moved)(rows["state"], action)
        over, score = ended | (elapsed >= system.limit), rows["score"] + reward
        following = {
            "seed": rows["seed"],
            "time": time,
            "elapsed": jnp.where(over, 0, elapsed),
            "score": jnp.where(over, 0.0, score),
            "state": jnp.where(over[:, None], jax.vmap(lambda key: _start(system, key))(keys[:, 1]), state),
        }
        happened = {
            "observation": observation,
            "action": action,
            "reward": reward,
            "next_observation": jax.vmap(system.observed)(state),
            "ended": ended,
            "over": over,
            "score": score,
        }
        return following, happened

    return jax.lax.scan(step, dict(rows), None, steps)


def whole_episodes(system: System, act: Act, seeds: Array) -> Array:
    """The sum of rewards [B] of the first episode of each seed [B]."""
    _, happened = play(system, act, begun(system, seeds), system.limit)
    is_first = happened["over"].cumsum(0) - happened["over"] == 0
    return jnp.where(is_first, happened["reward"], 0.0).sum(0)


def _keys(seeds: Array, times: Array) -> Array:
    return jax.vmap(lambda seed, time: jax.random.fold_in(jax.random.key(seed), time))(seeds, times)


def _start(system: System, key: Array) -> Array:
    spread = np.asarray(system.spread, np.float32)
    return jax.random.uniform(key, spread.shape, minval=-spread, maxval=spread)
