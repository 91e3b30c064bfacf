"""Images drawn from noise by pseudo linear multistep (PNDM; Liu et al., 2022), as Stable Diffusion 1 is shipped with.

DDIM's step, of a mean of the last four predictions e instead of the last one (Adams-Bashforth):

    1 step seen     e_0                                     3    (23 e_2 - 16 e_1 + 5 e_0) / 12
    2               (3 e_1 - e_0) / 2                       4    (55 e_3 - 59 e_2 + 37 e_1 - 9 e_0) / 24

The first step is taken twice: once to ask the network where it leads, and again from its start by the mean of both
answers, of which the second is then forgotten. N steps thus ask the network N + 1 times.

Shape letters: N steps, K = N + 1 times that the network is asked (1 of 1 step), B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from redco_cli.plugin.diffusion.schedules import Floats, Prediction, Schedule

Predict = Callable[[jax.Array, jax.Array], jax.Array]
"""Noisy images [B, ...] and their one timestep, an int32 scalar, to what the network predicts [B, ...]."""
_MEANS = np.array(
    [
        [1, 0, 0, 0],
        [1 / 2, 1 / 2, 0, 0],
        [3 / 2, -1 / 2, 0, 0],
        [23 / 12, -16 / 12, 5 / 12, 0],
        [55 / 24, -59 / 24, 37 / 24, -9 / 24],
    ]
)
_AGAIN = 1
"""Which answer begins the first step anew."""


@dataclass(frozen=True, eq=False)
class Steps:
    """What each answer of the network comes to: x_s = a x_t + b (weights . answers, the newest first).

    Attributes:
        timesteps: where it is asked [K].
        weights: of this answer and the three before [K, 4].
        scales: a and b [K, 2].
    """

    timesteps: NDArray[np.int32]
    weights: Floats
    scales: Floats


def steps_of(
    schedule: Schedule, kind: Prediction, timesteps: NDArray[np.int32], apart: int, last: tuple[float, float]
) -> Steps:
    """The steps of a schedule.

    Args:
        schedule: that the network was trained with.
        kind: `epsilon` or `v`.
        timesteps: N times, falling.
        apart: how many times each step goes down.
        last: shares of image and noise where that is below 0.
    """
    asked = np.concatenate([timesteps[:2], timesteps[1:]])
    start = asked.copy()
    start[_AGAIN : _AGAIN + 1] += apart
    alpha, sigma = schedule.alpha[start], schedule.sigma[start]
    alpha_after, sigma_after = shares_after(schedule, start, apart, last)
    a = sigma_after / sigma
    b = alpha_after - a * alpha
    by_clean = np.stack([1 / alpha, -sigma / alpha] if kind == "epsilon" else [alpha, -sigma])  # x_0 of x_t and answer
    scales = np.stack([a + b * by_clean[0], b * by_clean[1]], axis=-1)
    return Steps(asked, _MEANS[np.minimum(np.arange(len(asked)), len(_MEANS) - 1)], scales)


def shares_after(
    schedule: Schedule, timesteps: NDArray[np.int32], apart: int, last: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Shares of image and noise at times `apart` below some, and `last` where those are below 0; each [N]."""
    after = timesteps - apart
    alpha, sigma = (
        np.where(after < 0, end, share[np.maximum(after, 0)])
        for share, end in zip((schedule.alpha, schedule.sigma), last, strict=True)
    )
    return alpha, sigma


def sample_multistep(predict: Predict, noise: jax.Array, steps: Steps) -> jax.Array:
    """Images from noise; the same noise gives the same images. Traceable: one program, whatever the number of steps."""

    def step(carried: Any, at: Any) -> tuple[Any, None]:
        noisy, before, answers = carried
        index, timestep, weights, scales = at
        answers_now = jnp.concatenate([predict(noisy, timestep)[None], answers])
        again = index == _AGAIN
        start = jnp.where(again, before, noisy)
        drawn = scales[0] * start + scales[1] * jnp.tensordot(weights, answers_now, 1)
        return (drawn, noisy, jnp.where(again, answers, answers_now[:-1])), None

    numbers = (jnp.asarray(one, noise.dtype) for one in (steps.weights, steps.scales))
    along = (jnp.arange(len(steps.timesteps)), jnp.asarray(steps.timesteps), *numbers)
    none = jnp.zeros((_MEANS.shape[1] - 1, *noise.shape), noise.dtype)
    (drawn, _, _), _ = jax.lax.scan(step, (noise, noise, none), along)
    return drawn
