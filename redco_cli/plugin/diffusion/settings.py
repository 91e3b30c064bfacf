"""What `scheduler_config.json` of diffusers says: how a network was trained, and how images are drawn with it.

A key is honoured, or refused by name where it asks for something else than is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from redco_cli.errors import PluginError
from redco_cli.plugin.diffusion.multistep import Predict, sample_multistep, shares_after, steps_of
from redco_cli.plugin.diffusion.samplers import sample
from redco_cli.plugin.diffusion.schedules import (
    Prediction,
    Schedule,
    clean_of,
    cosine,
    from_betas,
    linear,
    scaled_linear,
    without_signal,
)

Drawn = Literal["ddim", "dpm_solver++", "pndm"]
"""How images are drawn."""
CONFIG = "scheduler/scheduler_config.json"
"""Where a model of diffusers keeps it."""
_SOLVERS: Mapping[str, Drawn] = {
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpm_solver++",
    "PNDMScheduler": "pndm",
}
_PREDICTIONS: Mapping[str, Prediction] = {"epsilon": "epsilon", "v_prediction": "v"}
_SCHEDULES = {"linear": linear, "scaled_linear": scaled_linear, "squaredcos_cap_v2": lambda count, *_: cosine(count)}
_SPACINGS = ("leading", "trailing", "linspace")
_DEFAULTS: Mapping[Drawn, Mapping[str, Any]] = {
    "ddim": {"clip_sample": True, "set_alpha_to_one": True, "timestep_spacing": "leading"},
    "dpm_solver++": {"set_alpha_to_one": True, "timestep_spacing": "linspace"},
    "pndm": {"skip_prk_steps": False, "set_alpha_to_one": False, "timestep_spacing": "leading"},
}
_COMMON: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "steps_offset": 0,
    "rescale_betas_zero_snr": False,
}
_ONLY: Mapping[str, tuple[Drawn | None, Any]] = {
    "clip_sample": ("ddim", False),
    "thresholding": (None, False),
    "skip_prk_steps": ("pndm", True),
    "algorithm_type": ("dpm_solver++", "dpmsolver++"),
    "solver_order": ("dpm_solver++", 2),
    "solver_type": ("dpm_solver++", "midpoint"),
    "final_sigmas_type": ("dpm_solver++", "zero"),
    "lambda_min_clipped": ("dpm_solver++", -np.inf),
    "variance_type": ("dpm_solver++", None),
    **{f"use_{name}": ("dpm_solver++", False) for name in ("karras_sigmas", "exponential_sigmas", "beta_sigmas")},
    **{f"use_{name}": ("dpm_solver++", False) for name in ("lu_lambdas", "flow_sigmas", "dynamic_shifting")},
}
"""The one value that is computed here, of the solver that reads it (None: of all)."""
_IDLE = {"clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value", "flow_shift", "time_shift_type"}
_IDLE |= {"lower_order_final", "euler_at_final"}
"""What says nothing beside those values: the last step of DPM-Solver++ is of first order where no noise is left."""


@dataclass(frozen=True, eq=False)
class Scheduler:
    """How a network was trained, and how images are drawn with it.

    Attributes:
        schedule: shares of image and noise by time.
        prediction: what the network tells, `epsilon` or `v`.
        solver: how images are drawn.
        spacing: how the times to draw at are chosen: `leading`, `trailing` or `linspace`.
        offset: what is added to them where they are `leading`.
        last: shares of image and noise that the last step of DDIM and PNDM leads to.
    """

    schedule: Schedule
    prediction: Prediction
    solver: Drawn
    spacing: str
    offset: int
    last: tuple[float, float]

    def timesteps(self, count: int) -> NDArray[np.int32]:
        """The `count` times to draw at, falling, as diffusers chooses them.

        Raises:
            PluginError: the schedule does not have so many.
        """
        size = len(self.schedule)
        points = count + (self.solver == "dpm_solver++")  # which counts the end, where no noise is left
        if self.spacing == "trailing":
            times: NDArray[Any] = np.round(size * (1 - np.arange(count) / max(count, 1))) - 1
        elif self.spacing == "linspace":
            times = np.linspace(0, size - 1, points).round()[::-1][:count]
        else:
            times = (np.arange(points) * float(size // max(points, 1)) + self.offset)[::-1][:count]
        if count < 1 or count > size or times.max() >= size:
            problem = f"{count} steps were asked for, {self.spacing}, but the schedule has {size} times"
            raise PluginError("scheduler", problem, "draw in fewer steps, but at least 1")
        return times.astype(np.int32)

    def sample(self, predict: Predict, noise: jax.Array, count: int) -> jax.Array:
        """Images from noise in `count` steps; the same noise gives the same images. Traceable.

        Args:
            predict: what the network tells of noisy images at a time, guidance included.
            noise: normal numbers [B, ...].
            count: of steps.
        """
        schedule, timesteps = self.schedule, self.timesteps(count)
        apart = len(schedule) // count
        if self.solver == "pndm":
            steps = steps_of(schedule, self.prediction, timesteps, apart, self.last)
            return sample_multistep(predict, noise, steps)

        def denoise(noisy: jax.Array, timestep: jax.Array) -> jax.Array:
            return clean_of(self.prediction, predict(noisy, timestep), noisy, *schedule.at(timestep))

        if self.solver == "dpm_solver++":
            return sample(denoise, noise, schedule, timesteps, self.solver)
        after = shares_after(schedule, timesteps, apart, self.last)
        return sample(denoise, noise, schedule, timesteps, self.solver, after)


def load_scheduler(name: str, revision: str | None = None, solver: Drawn | None = None) -> Scheduler:
    """The scheduler of a model in diffusers' layout, from a directory or a hub.

    Args:
        name: of the directory or of the repository, in which `scheduler/scheduler_config.json` is.
        revision: of the repository.
        solver: to draw with instead of its own.

    Raises:
        PluginError: there is none, or it asks for what is not computed here.
    """
    path = Path(name, CONFIG)
    if not Path(name).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(name, CONFIG, revision=revision))
        except (OSError, ValueError) as error:
            problem = f"{name} is no directory, and no hub gives its {CONFIG}: {error}"
            raise PluginError("scheduler", problem, "name a model in diffusers' layout") from error
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        remedy = "name a model in diffusers' layout, which has a scheduler beside its unet"
        raise PluginError(str(path), f"cannot be read as a config of a scheduler: {error}", remedy) from error
    return read_scheduler(given, str(path), solver)


def read_scheduler(config: Mapping[str, Any], where: str, solver: Drawn | None = None) -> Scheduler:
    """The scheduler that a config means.

    Args:
        config: what `scheduler_config.json` holds.
        where: its place, for errors.
        solver: to draw with instead of its own, as diffusers' `from_config` of another class.

    Raises:
        PluginError: naming what is not computed here.
    """
    own = config.get("_class_name")
    chosen = solver or _SOLVERS.get(str(own))
    if chosen is None:
        problem = f"_class_name {own!r}: images are drawn by {', '.join(_SOLVERS)}"
        raise PluginError(where, problem, f"choose one of {', '.join(_DEFAULTS)} as the solver")
    given = {**_COMMON, **_DEFAULTS[chosen], **{key: one for key, one in config.items() if not key.startswith("_")}}
    _check(given, chosen, where, foreign=own not in _SOLVERS)
    count, betas = given["num_train_timesteps"], given["trained_betas"]
    make = _SCHEDULES[given["beta_schedule"]]
    schedule = make(count, given["beta_start"], given["beta_end"]) if betas is None else from_betas(betas)
    if given["rescale_betas_zero_snr"] and chosen != "pndm":
        schedule = without_signal(schedule)
        if chosen == "dpm_solver++":  # whose steps are in log(alpha / sigma)
            schedule.alpha[-1], schedule.sigma[-1] = 2.0**-12, np.sqrt(1 - 2.0**-24)
    last = (1.0, 0.0) if given["set_alpha_to_one"] else (float(schedule.alpha[0]), float(schedule.sigma[0]))
    prediction = _PREDICTIONS[given["prediction_type"]]
    return Scheduler(schedule, prediction, chosen, given["timestep_spacing"], given["steps_offset"], last)


def _check(given: Mapping[str, Any], solver: Drawn, where: str, *, foreign: bool) -> None:
    """Refuses, by name, what is not computed here; of other classes of diffusers only what this solver reads."""
    known = {"beta_schedule": _SCHEDULES, "prediction_type": _PREDICTIONS, "timestep_spacing": _SPACINGS}
    for key, value in given.items():
        reader, only = _ONLY.get(key, (None, value))
        if key in known and value not in known[key]:
            problem = f"{key} {value!r}: known are {', '.join(known[key])}"
        elif reader in (None, solver) and value != only:
            problem = f"{key} {value!r}: only {only!r} is computed here"
        elif not foreign and key not in {*known, *_COMMON, *_DEFAULTS[solver], *_ONLY, *_IDLE, "set_alpha_to_one"}:
            problem = f"{key} {value!r}: no scheduler that is computed here reads it"
        elif key == "rescale_betas_zero_snr" and value and solver == "ddim" and given["prediction_type"] == "epsilon":
            problem = f"{key} {value!r}: where nothing of the image is left, noise alone does not tell it"
        else:
            continue
        raise PluginError(where, problem, "correct the config, or choose another solver")
