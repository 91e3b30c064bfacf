"""What runs spend, how much noise that needs, and which examples their steps draw."""

from collections import Counter

import numpy as np
import pytest

from redco_cli.errors import RecipeError
from redco_cli.privacy import accounting, libraries
from redco_cli.privacy.accounting import OVERFLOW, Budget, calibrated, plan_budget
from redco_cli.privacy.sampling import poisson_draws
from redco_cli.recipe.schema import Recipe
from redco_cli.training.saving.resume import FREE_TO_CHANGE

EXAMPLES, BATCH, DELTA, STEPS = 60_000, 256, 1e-5, 15 * 60_000 // 256


def recipe_of(privacy, **train):
    given = {"plugin": {"module": "digits"}, "output_dir": "run", "privacy": {"delta": 1e-5, "clip": 1.0, **privacy}}
    return Recipe.model_validate({**given, "train": {"global_batch_size": 32, **train}})


def budget_of(privacy, examples=1000, steps=20, **train):
    found = plan_budget(recipe_of(privacy, **train), examples, steps, lambda key: f"r.yaml: {key}")
    assert found is not None
    return found


def refused(*arguments, **more):
    with pytest.raises(RecipeError) as error:
        budget_of(*arguments, **more)
    return str(error.value)


def test_the_noise_of_the_reference_run_by_rdp():
    sigma = calibrated("rdp", 4.0, DELTA * (1 - OVERFLOW), BATCH / EXAMPLES, STEPS, "")
    assert round(sigma, 4) == 0.7036


@pytest.mark.slow
def test_the_noise_of_the_reference_run_by_pld_is_between_two_neighbours():
    spent = [accounting._epsilon("pld", sigma, BATCH / EXAMPLES, STEPS, DELTA) for sigma in (0.66675, 0.6666)]
    assert spent[0] <= 4.0 < spent[1]


@pytest.mark.slow
def test_the_noise_of_the_reference_run_by_pld():
    assert round(calibrated("pld", 4.0, DELTA * (1 - OVERFLOW), BATCH / EXAMPLES, STEPS, ""), 4) == 0.6667


@pytest.mark.slow
def test_room_for_a_batch_costs_no_more_than_its_share_of_delta():
    """Truncated batches have an accountant of their own, slow and tight: ours must not promise more than it does."""
    import dp_accounting as dp

    budget = budget_of({"noise_multiplier": 1.0}, steps=50)
    event = dp.TruncatedSubsampledGaussianDpEvent(
        dataset_size=1000,
        sampling_probability=0.032,
        truncated_batch_size=budget.capacity,
        noise_multiplier=1.0,
    )
    tight = dp.pld.PLDAccountant().compose(event, 50).get_epsilon(1e-5)
    assert budget.capacity < 1000
    assert budget.epsilon == pytest.approx(tight, abs=1e-4)
    assert budget.epsilon >= tight - 1e-6


def test_epsilon_follows_from_noise_and_noise_from_epsilon():
    given = budget_of({"noise_multiplier": 1.5, "accountant": "rdp"})
    found = budget_of({"epsilon": given.epsilon, "accountant": "rdp"})
    assert found.noise_multiplier == pytest.approx(1.5, abs=2e-5)
    assert found.epsilon <= given.epsilon
    assert found.capacity == given.capacity
    assert found.described()["epsilon"] == pytest.approx(given.epsilon, rel=1e-3)


def test_what_is_spent_grows_to_epsilon_and_is_never_told_too_small(monkeypatch):
    monkeypatch.setattr(accounting, "_epsilon", lambda accountant, sigma, q, steps, delta: steps**0.5 / sigma)
    budget = budget_of({"noise_multiplier": 1.5, "accountant": "rdp"}, steps=120)
    told = [budget.spent(step) for step in range(121)]
    assert told[0] == 0
    assert told == sorted(told)
    assert told[-1] == budget.epsilon
    assert all(told[step] >= budget.epsilon_after(step) for step in (1, 2, 59, 119))
    assert len(set(told)) <= 51


def test_a_batch_has_room_for_all_but_a_millionth_of_delta():
    from scipy.stats import binom

    budget = budget_of({"noise_multiplier": 1.5, "accountant": "rdp"})
    eta = [20 * binom.sf(room, 1000, 0.032) for room in (budget.capacity, budget.capacity - 1)]
    least, less = [(1 + np.exp(budget.epsilon)) * one / 1e-5 for one in eta]
    assert least <= OVERFLOW < less
    assert [budget.rows(micro) for micro in (1, 16, 32)] == [budget.capacity, -(-budget.capacity // 16) * 16, 96]


def test_each_step_draws_each_example_alike_and_the_same_again():
    budget = budget_of({"noise_multiplier": 1.5, "accountant": "rdp"}, examples=100)
    one, other = (poisson_draws(budget, seed=3) for _ in range(2))
    drawn = [one(step) for step in range(400)]
    assert [other(step) for step in (7, 0, 399)] == [drawn[7], drawn[0], drawn[399]]
    assert poisson_draws(budget, seed=4)(0) != drawn[0]
    assert all(len(set(step)) == len(step) <= budget.capacity for step in drawn)
    sizes, times = [len(step) for step in drawn], Counter(index for step in drawn for index in step)
    assert np.mean(sizes) == pytest.approx(32, abs=4 * np.sqrt(100 * 0.32 * 0.68 / 400))
    assert np.var(sizes) == pytest.approx(100 * 0.32 * 0.68, rel=0.3)
    assert max(abs(times[index] - 128) for index in range(100)) < 5 * np.sqrt(400 * 0.32 * 0.68)


def test_runs_that_are_trained_otherwise_have_other_noise():
    base = {"noise_multiplier": 1.5, "accountant": "rdp"}
    salt = budget_of(base).salt
    assert budget_of(base, micro_batch_size=8, remat="full", max_time="1h").salt == salt
    assert len({salt, budget_of(base, learning_rate=1e-3).salt, budget_of(base, examples=999).salt}) == 3
    free = {key.removeprefix("train.") for key in FREE_TO_CHANGE if key.startswith("train.")}
    assert free < accounting._UNSALTED


def test_data_that_batches_cannot_be_drawn_of_is_refused():
    assert refused({"noise_multiplier": 1.0}, examples=31) == (
        "r.yaml: train.global_batch_size: 32 examples are expected in a batch, but there are 31\n  -> lower it"
    )
    assert refused({"noise_multiplier": 1.0}, examples=None) == (
        "r.yaml: data.train: it has no known length, but beside privacy each example is drawn from all of a known "
        "number\n  -> give data of known length"
    )


def test_a_missing_extra_is_told_with_what_installs_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(libraries.importlib, "import_module", missing)
    assert refused({"noise_multiplier": 1.0}) == (
        "r.yaml: privacy: the package jax_privacy is not installed\n"
        "  -> install the extra privacy: pip install 'redco[privacy]'; or leave privacy out"
    )


def test_without_privacy_there_is_no_budget():
    given = Recipe.model_validate({"plugin": {"module": "digits"}, "output_dir": "run"})
    assert plan_budget(given, None, 20, str) is None
    assert isinstance(budget_of({"noise_multiplier": 1.0, "accountant": "rdp"}), Budget)
