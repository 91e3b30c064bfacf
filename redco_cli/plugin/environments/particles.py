"""Cooperative navigation: agents on a plane that are to cover as many landmarks, and to keep out of each other's way.

Source: Lowe et al., 2017 (arXiv 1706.02275), and what came with it, `openai/multiagent-particle-envs`: the physics of
`multiagent/core.py`, the scenario `simple_spread`, episodes of 25 steps. For agents i with positions x, velocities v
and actions u, discs of radius 0.15 and mass 1:

    f_i = 5 u_i + sum_j 100 c_ij (x_i - x_j) / |x_i - x_j|       c_ij = 0.001 softplus((0.3 - |x_i - x_j|) / 0.001)
    v_i <- (1 - 0.25) v_i + 0.1 f_i                              x_i <- x_i + 0.1 v_i

Three things differ. Actions are numbers, as there where `discrete_action_space` is false, and not one of five. The
reward that all share is the mean of theirs instead of the sum, and none is fined for touching itself. And what agents
of that scenario are to hear from each other, which is zeros, is left out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.plugin.environments.system import System

Array = Any
_SECONDS, _DAMPING, _STRENGTH, _RADIUS = 0.1, 0.25, 5.0, 0.15
_CONTACT, _MARGIN = 100.0, 0.001
_SMALLEST = 1e-9


def simple_spread(agents: int) -> System:
    """The system of so many agents (at least 1) and as many landmarks, which are points.

    Positions begin anywhere in [-1, 1]², velocities at 0; nothing keeps agents there, and no episode ends by itself.
    The state is positions of agents, their velocities, and positions of landmarks, [agents, 2] each, in one row. An
    agent sees its velocity and its position, and where landmarks and the other agents are, seen from there, [4 agents +
    2]; its action is a force [2] within [-1, 1]². The reward is minus the distance of each landmark from the agent that
    is nearest to it, summed, and minus the number of others that an agent touches, the mean over agents.
    """
    others = np.array([[j for j in range(agents) if j != i] for i in range(agents)], int)  # [agents, agents - 1]

    def observed(state: Array) -> Array:
        position, velocity, landmark = state.reshape(3, agents, 2)
        there = jnp.concatenate([jnp.broadcast_to(landmark, (agents, agents, 2)), position[others]], 1)
        return jnp.concatenate([velocity, position, (there - position[:, None]).reshape(agents, -1)], 1)

    def moved(state: Array, action: Array) -> tuple[Array, Array, Array]:
        position, velocity, landmark = state.reshape(3, agents, 2)
        force = _STRENGTH * jnp.clip(action, -1, 1) + _contact(position, others)
        velocity = (1 - _DAMPING) * velocity + _SECONDS * force
        position = position + _SECONDS * velocity
        uncovered = _length(landmark[:, None] - position).min(1).sum()
        touching = (_length(position[:, None] - position[others]) < 2 * _RADIUS).sum(1).mean()
        return jnp.stack([position, velocity, landmark]).reshape(-1), -uncovered - touching, jnp.zeros((), bool)

    spread = np.repeat([1.0, 0.0, 1.0], 2 * agents)
    return System(tuple(spread.tolist()), None, 1.0, 25, observed, moved, (agents, 2))


def _contact(position: Array, others: Array) -> Array:
    """The forces [A, 2] by which agents that touch push each other apart; none between two that are in one place."""
    apart = position[:, None] - position[others]
    distance = _length(apart)
    depth = _MARGIN * jax.nn.softplus((2 * _RADIUS - distance) / _MARGIN)
    return (_CONTACT * (depth / jnp.maximum(distance, _SMALLEST))[..., None] * apart).sum(1)


def _length(vectors: Array) -> Array:
    return jnp.sqrt((vectors**2).sum(-1))
