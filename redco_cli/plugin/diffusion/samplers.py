"""Images drawn from noise: DDIM and DPM-Solver++ (2M), which are one recurrence.

Both solve the ODE of a diffusion from t to an earlier time s, given what the network says of x_0:

    x_s = a x_t + b x_0(x_t) + c x_0(x_u)        u the time before t; a, b, c known beforehand

With lambda = log(alpha / sigma) and h = lambda_s - lambda_t, DDIM (Song et al., 2021, eta 0) takes x_0 as constant:

    a = sigma_s / sigma_t,   b = alpha_s (1 - exp(-h)) = alpha_s - sigma_s alpha_t / sigma_t,   c = 0

and DPM-Solver++ (Lu et al., 2022, algorithm 2) as linear in lambda, from its last two values: with DDIM's b and
r = (lambda_t - lambda_u) / h it has b (1 + 1 / 2r) and c = -b / 2r. Its first step is DDIM's, and so is the last, where
no noise is left and h is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from redco_cli.errors import PluginError
from redco_cli.plugin.diffusion.schedules import Floats, Schedule

Solver = Literal["ddim", "dpm_solver++"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)
"""Their names."""
Pair = tuple[jax.Array, jax.Array]
Denoise = Callable[[jax.Array, jax.Array], jax.Array]
"""Noisy images [B, ...] and their one timestep, an int32 scalar, to the images x_0 [B, ...] that the network sees."""


def trailing(schedule: Schedule, count: int) -> NDArray[np.int32]:
    """The times to draw at: `count` of them, from the last of the schedule down, evenly.

    They begin where nothing but noise is seen, as a sampler does ("trailing" in Lin et al., 2024).

    Raises:
        PluginError: the schedule does not have so many.

    >>> from redco_cli.plugin.diffusion.schedules import cosine
    >>> trailing(cosine(1000), 4).tolist()
    [999, 749, 499, 249]
    """
    if not 1 <= count <= len(schedule):
        problem = f"{count} steps were asked for, but the schedule has {len(schedule)} times"
        raise PluginError("trailing", problem, f"draw in 1 to {len(schedule)} steps")
    return np.round(len(schedule) * (1 - np.arange(count) / count)).astype(np.int32) - 1


def coefficients(
    schedule: Schedule, timesteps: NDArray[np.int32], solver: Solver, after: tuple[Floats, Floats] | None = None
) -> Floats:
    """a, b and c of each step [N, 3].

    Args:
        schedule: that the network was trained with.
        timesteps: N times, falling.
        solver: of which they are.
        after: shares of image and noise that each step leads to, each [N]; by default those of the next timestep, and
            of the last no noise.
    """
    alpha, sigma = schedule.alpha[timesteps], schedule.sigma[timesteps]
    next_alpha, next_sigma = (np.append(alpha[1:], 1.0), np.append(sigma[1:], 0.0)) if after is None else after
    a = next_sigma / sigma
    b = next_alpha - a * alpha
    c = np.zeros_like(b)
    if solver == "dpm_solver++" and len(timesteps) > 2:
        steps = np.diff(np.log(alpha / sigma))
        c[1:-1] = -b[1:-1] * steps[1:] / steps[:-1] / 2
    return np.stack([a, b - c, c], axis=-1)


def sample(
    denoise: Denoise,
    noise: jax.Array,
    schedule: Schedule,
    timesteps: NDArray[np.int32],
    solver: Solver,
    after: tuple[Floats, Floats] | None = None,
) -> jax.Array:
    """Images from noise; the same noise gives the same images. Traceable: one program, whatever the number of steps.

    Args:
        denoise: what the network says of x_0; guidance and bounds of pixels are its own.
        noise: normal numbers [B, ...].
        schedule: that the network was trained with.
        timesteps: where to ask it, falling; see `trailing`.
        solver: `ddim`, or `dpm_solver++`, which needs fewer steps.
        after: see `coefficients`.
    """

    def step(carried: Pair, at: Pair) -> tuple[Pair, None]:
        (noisy, before), (timestep, weights) = carried, at
        clean = denoise(noisy, timestep)
        return (weights[0] * noisy + weights[1] * clean + weights[2] * before, clean), None

    weights = jnp.asarray(coefficients(schedule, timesteps, solver, after), noise.dtype)
    (drawn, _), _ = jax.lax.scan(step, (noise, jnp.zeros_like(noise)), (jnp.asarray(timesteps), weights))
    return drawn
