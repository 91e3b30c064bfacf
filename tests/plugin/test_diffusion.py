"""Schedules and samplers of diffusion: beside diffusers' own steps, and where the answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import PluginError
from redco_cli.plugin.diffusion import (
    SOLVERS,
    clean_of,
    coefficients,
    cosine,
    from_betas,
    sample,
    snr_weight,
    target_of,
    trailing,
)

SCHEDULES = {"v": cosine(1000), "epsilon": from_betas(np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)}
STARTS = np.float32([-1.5, -0.5, 0.5, 1.5])
RECORDED = {
    ("ddim", "v"): [
        [-1.11698, -0.76806, 0.79684, 1.03122],
        [-0.71416, -0.37243, 0.9043, 1.302],
        [-0.77072, -0.09085, 0.46093, 1.01274],
        [-0.77851, -0.39578, 0.68539, 1.20009],
    ],
    ("ddim", "epsilon"): [
        [-3.44265, -3.75919, 3.94911, 2.8767],
        [-7.23463, -9.1077, 8.1354, 6.89142],
        [-11.9219, -14.45826, 13.36932, 10.3651],
        [-13.84176, -17.62295, 16.9486, 12.03929],
    ],
    ("dpm_solver++", "v"): [
        [-1.11698, -0.76806, 0.79684, 1.03122],
        [-0.72133, -0.34576, 0.9009, 1.34548],
        [-1.07046, -0.11269, 0.25274, 0.94681],
        [-0.72686, -0.43063, 0.27424, 1.19016],
    ],
    ("dpm_solver++", "epsilon"): [
        [-3.44265, -3.75919, 3.94911, 2.8767],
        [-7.43047, -9.01182, 7.49669, 7.52543],
        [-12.87016, -13.86928, 10.81061, 11.14065],
        [-16.35323, -16.19054, 13.40103, 14.23267],
    ],
}
"""What DDIMScheduler (clip_sample false) and DPMSolverMultistepScheduler of diffusers 0.39.0 with torch 2.13.0 make of
`STARTS` in four steps, timestep_spacing trailing, where the network says sin(3 x + t / 100): with v_prediction by
squaredcos_cap_v2, with epsilon by scaled_linear from 0.00085 to 0.012."""


@pytest.mark.parametrize(("solver", "kind"), RECORDED)
def test_each_step_is_that_of_diffusers(solver, kind):
    schedule = SCHEDULES[kind]
    timesteps = trailing(schedule, 4)
    assert timesteps.tolist() == [999, 749, 499, 249]
    noisy, before, seen = STARTS.astype(np.float64), 0.0, []
    for time, (a, b, c) in zip(timesteps, coefficients(schedule, timesteps, solver), strict=True):
        shares = schedule.alpha[time], schedule.sigma[time]
        clean = clean_of(kind, np.sin(3 * noisy + time / 100), noisy, *shares)
        noisy, before = a * noisy + b * clean + c * before, clean
        seen.append(noisy)
    np.testing.assert_allclose(seen, RECORDED[solver, kind], atol=2e-4)


def test_a_sample_is_the_last_of_these_steps():
    schedule = SCHEDULES["v"]

    def denoise(noisy, timestep):
        return clean_of("v", jnp.sin(3 * noisy + timestep / 100), noisy, *schedule.at(timestep))

    for solver in SOLVERS:
        drawn = jax.jit(lambda noise, solver=solver: sample(denoise, noise, schedule, trailing(schedule, 4), solver))
        np.testing.assert_allclose(drawn(STARTS), RECORDED[solver, "v"][-1], atol=1e-4)


def of_a_gaussian(noise, mean, deviation, steps, solver):
    """What is drawn by the ideal denoiser of N(mean, deviation^2), which is linear, from noise."""
    schedule = SCHEDULES["v"]
    timesteps = trailing(schedule, steps)
    noisy, before = noise, 0.0
    for time, (a, b, c) in zip(timesteps, coefficients(schedule, timesteps, solver), strict=True):
        alpha, sigma = schedule.alpha[time], schedule.sigma[time]
        gain = alpha * deviation**2 / ((alpha * deviation) ** 2 + sigma**2)
        clean = mean + gain * (noisy - alpha * mean)
        noisy, before = a * noisy + b * clean + c * before, clean
    return noisy


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("mean", "deviation"), [(0.7, 0.4), (-0.2, 1.5)])
def test_noise_becomes_the_gaussian_that_was_learned(mean, deviation, solver):
    """The ODE keeps (x - alpha mean) / sqrt(alpha^2 deviation^2 + sigma^2): noise z ends at mean + deviation z."""
    noise = np.random.default_rng(0).normal(size=10_000)
    many = of_a_gaussian(noise, mean, deviation, 1000, solver)
    np.testing.assert_allclose(many, mean + deviation * noise, atol=0.02)
    assert many.mean() == pytest.approx((mean + deviation * noise).mean(), abs=2e-3)
    assert many.std() == pytest.approx(deviation * noise.std(), rel=5e-3)


@pytest.mark.parametrize(("steps", "times"), [(5, 1), (10, 2), (20, 4)])
@pytest.mark.parametrize(("mean", "deviation"), [(0.7, 0.4), (-0.2, 1.5)])
def test_the_second_order_is_nearer_in_as_many_steps(mean, deviation, steps, times):
    noise = np.linspace(-2, 2, 9)
    wrong = {
        solver: np.abs(of_a_gaussian(noise, mean, deviation, steps, solver) - mean - deviation * noise).max()
        for solver in SOLVERS
    }
    assert wrong["dpm_solver++"] < wrong["ddim"] / times


@pytest.mark.parametrize("kind", ["x0", "epsilon", "v"])
def test_what_is_predicted_says_what_is_seen(kind):
    draw = np.random.default_rng(0)
    clean, noise = draw.normal(size=(2, 5, 3, 3, 1))
    alpha, sigma = (np.asarray(one) for one in SCHEDULES["v"].at(np.array([0, 10, 300, 600, 900]), dims=4))
    assert alpha.shape == (5, 1, 1, 1)
    noisy = alpha * clean + sigma * noise
    np.testing.assert_allclose(
        clean_of(kind, target_of(kind, clean, noise, alpha, sigma), noisy, alpha, sigma), clean, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["x0", "epsilon", "v"])
def test_min_snr_weighs_each_prediction_by_the_error_of_the_image_that_it_stands_for(kind):
    """The error of x_0 that follows from that of a prediction counts min(snr, 5), whatever is predicted."""
    alpha, sigma = SCHEDULES["v"].alpha[:999:111], SCHEDULES["v"].sigma[:999:111]
    clean, wrong = clean_of(kind, 0.0, 0.3, alpha, sigma), clean_of(kind, 1e-3, 0.3, alpha, sigma)
    of_clean = np.minimum((alpha / sigma) ** 2, 5) * ((wrong - clean) / 1e-3) ** 2
    np.testing.assert_allclose(snr_weight(kind, alpha, sigma, 5.0), of_clean, rtol=1e-5)


def test_schedules_have_the_values_of_diffusers():
    """alphas_cumprod of DDIMScheduler, of diffusers 0.39.0, in float32."""
    kept = cosine(1000).alpha ** 2
    places = [0, 1, 250, 500, 750, 998, 999]
    wanted = [0.99995869, 0.99991256, 0.84588802, 0.49228504, 0.14317866, 2.4287663e-06, 2.428735e-09]
    np.testing.assert_allclose(kept[places], wanted, rtol=2e-5)
    for schedule in SCHEDULES.values():
        np.testing.assert_allclose(schedule.alpha**2 + schedule.sigma**2, 1, rtol=1e-12)
        assert (np.diff(schedule.alpha) < 0).all()


@pytest.mark.parametrize("count", [0, 1001])
def test_more_steps_than_times_are_refused(count):
    with pytest.raises(PluginError, match=f"{count} steps were asked for, but the schedule has 1000 times") as refused:
        trailing(cosine(1000), count)
    assert "draw in 1 to 1000 steps" in str(refused.value)
