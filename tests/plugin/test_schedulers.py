"""Configs of diffusers' schedulers: each sample beside that of the scheduler itself, and what is refused."""

import json

import jax
import numpy as np
import pytest

from redco_cli.errors import PluginError
from redco_cli.plugin.diffusion import load_scheduler, read_scheduler

SD1 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SD1 |= {"clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "trained_betas": None}
V = {"prediction_type": "v_prediction"}
LINEAR = {"beta_schedule": "linear", "beta_end": 0.02}
CASES = {
    "pndm": ("PNDMScheduler", SD1),
    "pndm, v": ("PNDMScheduler", {**SD1, **V}),
    "pndm, to one": ("PNDMScheduler", {**SD1, "set_alpha_to_one": True, "timestep_spacing": "trailing"}),
    "pndm, linspace": ("PNDMScheduler", {**SD1, "timestep_spacing": "linspace"}),
    "ddim": ("DDIMScheduler", SD1),
    "ddim, v": ("DDIMScheduler", {**SD1, **V}),
    "ddim, trailing": ("DDIMScheduler", {**SD1, **V, "timestep_spacing": "trailing", "set_alpha_to_one": True}),
    "ddim, linspace": ("DDIMScheduler", {**SD1, **LINEAR, "timestep_spacing": "linspace"}),
    "ddim, no signal": (
        "DDIMScheduler",
        {**SD1, **V, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
    ),
    "dpm": ("DPMSolverMultistepScheduler", SD1),
    "dpm, v": ("DPMSolverMultistepScheduler", {**SD1, **V, "timestep_spacing": "leading"}),
    "dpm, trailing": ("DPMSolverMultistepScheduler", {**SD1, "timestep_spacing": "trailing"}),
    "dpm, no signal": ("DPMSolverMultistepScheduler", {**SD1, **V, "rescale_betas_zero_snr": True}),
    "dpm, cosine": ("DPMSolverMultistepScheduler", {**V, "beta_schedule": "squaredcos_cap_v2"}),
    "dpm, trained": ("DPMSolverMultistepScheduler", {"trained_betas": np.linspace(1e-4, 2e-2, 500).tolist()}),
}


def wave(noisy, timestep, numbers):
    """What stands for a network: smooth, bounded, and other at each time."""
    return numbers.sin(3 * noisy + timestep / 100.0)


STARTS = np.float32([-1.5, -0.5, 0.5, 1.5])
RECORDED = {
    "pndm": [-6.02065, -2.26281, 2.06038, 8.90836],
    "pndm, v": [-0.37326, -0.72407, 0.99452, 0.51778],
    "ddim": [-7.20753, -1.20369, 1.26703, 9.22374],
    "ddim, v": [-0.8887, -0.5154, 0.63494, 0.88236],
    "dpm": [-16.35935, -16.14993, 13.3321, 14.11605],
    "dpm, v": [-0.49523, -0.45, 1.0599, 1.12398],
}
"""What diffusers 0.39.0 with torch 2.13.0 makes of `STARTS` in four steps, where the network says `wave`."""


def drawn(case, noise, steps):
    """What the scheduler of a case makes of noise."""
    name, config = CASES[case]
    scheduler = read_scheduler({"_class_name": name, **config}, "config")
    return jax.jit(lambda noise: scheduler.sample(lambda x, t: wave(x, t, jax.numpy), noise, steps))(noise)


@pytest.mark.parametrize("case", RECORDED)
def test_four_steps_are_those_of_diffusers(case):
    np.testing.assert_allclose(drawn(case, STARTS, 4), RECORDED[case], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("steps", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_steps_is_that_of_diffusers(case, steps):
    diffusers, torch = pytest.importorskip("diffusers"), pytest.importorskip("torch")
    name, config = CASES[case]
    count = len(config.get("trained_betas") or range(1000))
    theirs = getattr(diffusers, name).from_config({"num_train_timesteps": count, **config})
    theirs.set_timesteps(steps)
    noise = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    noisy = torch.from_numpy(noise)
    for timestep in theirs.timesteps:
        noisy = theirs.step(wave(noisy, timestep, torch), timestep, noisy).prev_sample
    ours = read_scheduler(json.loads(theirs.to_json_string()), "config")
    asked = ours.timesteps(steps).tolist()
    assert theirs.timesteps.tolist() == ([*asked[:2], *asked[1:]] if name == "PNDMScheduler" else asked)
    np.testing.assert_allclose(drawn(case, noise, steps), noisy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changed", "problem"),
    [
        ("EulerDiscreteScheduler", {}, "_class_name 'EulerDiscreteScheduler': images are drawn by DDIMScheduler"),
        ("DDIMScheduler", {"clip_sample": True}, "clip_sample True: only False is computed here"),
        ("PNDMScheduler", {"skip_prk_steps": False}, "skip_prk_steps False: only True is computed here"),
        ("PNDMScheduler", {"beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid': known are linear, scaled_linear"),
        ("DDIMScheduler", {"prediction_type": "sample"}, "prediction_type 'sample': known are epsilon, v_prediction"),
        ("DDIMScheduler", {"rescale_betas_zero_snr": True}, "noise alone does not tell it"),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "solver_order 3: only 2 is computed here"),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, "use_karras_sigmas True: only False"),
        ("PNDMScheduler", {"stochasticity": 1}, "stochasticity 1: no scheduler that is computed here reads it"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changed, problem):
    with pytest.raises(PluginError) as refused:
        read_scheduler({"_class_name": name, **SD1, **changed}, "here/scheduler_config.json")
    assert f"here/scheduler_config.json: {problem}" in str(refused.value) or problem in str(refused.value)


def test_another_solver_draws_with_the_schedule_of_a_class_that_does_not_count():
    scheduler = read_scheduler(
        {"_class_name": "EulerDiscreteScheduler", "interpolation_type": "linear", **SD1}, "", "ddim"
    )
    assert (scheduler.solver, scheduler.spacing) == ("ddim", "leading")
    assert scheduler.timesteps(4).tolist() == [751, 501, 251, 1]


def test_a_directory_without_a_scheduler_is_refused(tmp_path):
    with pytest.raises(PluginError, match="cannot be read as a config of a scheduler"):
        load_scheduler(str(tmp_path))


def test_more_steps_than_times_are_refused():
    with pytest.raises(PluginError, match="1001 steps were asked for, leading, but the schedule has 1000 times"):
        read_scheduler({"_class_name": "DDIMScheduler", **SD1}, "").timesteps(1001)
