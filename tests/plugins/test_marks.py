"""Recipes whose plugins have no file of marks: three seeds of each reach what the header says, about."""

import pytest

from tests.plugins.trained import trained

MARKS = {
    "digits": ("accuracy", 0.98),  # the nearest mean of a class: 0.90
    "private": ("accuracy", 0.85),  # by chance: 0.1
}
"""Recipe to a metric and the least of it."""


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("recipe", MARKS)
def test_a_recipe_reaches_its_mark(recipe, seed, tmp_path):
    metric, least = MARKS[recipe]
    assert trained(recipe, tmp_path, [f"seed={seed}"])[-1][metric] >= least
