"""How much of an image is left at each time of a diffusion, and what a network predicts of what is seen then.

    x_t = alpha_t x_0 + sigma_t epsilon          alpha_t^2 + sigma_t^2 = 1,  epsilon normal,  t = 0 .. T - 1
    v   = alpha_t epsilon - sigma_t x_0

Shape letters: T times of the schedule, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Prediction = Literal["x0", "epsilon", "v"]
"""What a network tells: the image, the noise, or the velocity between them (Salimans and Ho, 2022)."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The shares of image and noise by time. Made by `from_betas` or `cosine`.

    Attributes:
        alpha: of the image [T], falling from nearly 1.
        sigma: of the noise [T].
    """

    alpha: Floats
    sigma: Floats

    def __len__(self) -> int:
        """T."""
        return len(self.alpha)

    def at(self, timesteps: Any, dims: int = 0) -> tuple[jax.Array, jax.Array]:
        """Shares of image and noise at times from 0 to T - 1, traced or not, with dims of 1 up to `dims` in all."""
        shape = (*jnp.shape(timesteps), *[1] * (dims - jnp.ndim(timesteps)))
        alpha, sigma = (jnp.asarray(one, jnp.float32)[timesteps].reshape(shape) for one in (self.alpha, self.sigma))
        return alpha, sigma


def from_betas(betas: Any) -> Schedule:
    """The schedule whose step t replaces a share betas[t] of the variance by noise: alpha_t^2 = prod_s (1 - beta_s)."""
    kept = np.cumprod(1 - np.asarray(betas, np.float64))
    return Schedule(np.sqrt(kept), np.sqrt(1 - kept))


def linear(count: int, first: float, last: float) -> Schedule:
    """The schedule of Ho et al. (2020): betas rise evenly."""
    return from_betas(np.linspace(first, last, count))


def scaled_linear(count: int, first: float, last: float) -> Schedule:
    """The schedule of latent diffusion (Rombach et al., 2022): the roots of betas rise evenly."""
    return from_betas(np.linspace(first**0.5, last**0.5, count) ** 2)


def without_signal(schedule: Schedule) -> Schedule:
    """The same, but at its last time nothing of the image is left (Lin et al., 2024, algorithm 1)."""
    first, last = schedule.alpha[0], schedule.alpha[-1]
    alpha = (schedule.alpha - last) * first / (first - last)
    return Schedule(alpha, np.sqrt(1 - alpha**2))


def cosine(count: int = 1000, offset: float = 0.008, most: float = 0.999) -> Schedule:
    """The schedule of Nichol and Dhariwal (2021): alpha^2 falls as a squared cosine.

    Args:
        count: T.
        offset: keeps the first betas from being nearly 0.
        most: that a beta may be; without a bound the last would be 1.
    """
    kept = np.cos((np.arange(count + 1) / count + offset) / (1 + offset) * np.pi / 2) ** 2
    return from_betas(np.minimum(1 - kept[1:] / kept[:-1], most))


def target_of(kind: Prediction, clean: jax.Array, noise: jax.Array, alpha: jax.Array, sigma: jax.Array) -> jax.Array:
    """What a network is to predict, of images and noise of one shape."""
    return {"x0": clean, "epsilon": noise, "v": alpha * noise - sigma * clean}[kind]


def clean_of(kind: Prediction, predicted: jax.Array, noisy: jax.Array, alpha: jax.Array, sigma: jax.Array) -> jax.Array:
    """The images x_0 that a prediction stands for, where `noisy` is seen."""
    if kind == "x0":
        return predicted
    return (noisy - sigma * predicted) / alpha if kind == "epsilon" else alpha * noisy - sigma * predicted


def snr_weight(kind: Prediction, alpha: jax.Array, sigma: jax.Array, most: float) -> jax.Array:
    """How much the squared error of a prediction counts, so that of x_0 counts min(snr, most) (Hang et al., 2023).

    With snr = (alpha / sigma)^2 the squared error of epsilon is snr times that of x_0, and that of v snr + 1 times.

    Args:
        kind: what is predicted.
        alpha: share of the image at each time.
        sigma: share of the noise.
        most: gamma, beyond which a clearer image counts no more; 5 in the paper.
    """
    snr = (alpha / sigma) ** 2
    times_that_of_clean = {"x0": jnp.ones_like(snr), "epsilon": snr, "v": snr + 1}[kind]
    return jnp.minimum(snr, most) / times_that_of_clean
