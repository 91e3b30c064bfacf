"""Recipes whose mark is a figure of their own: three seeds of each reach it on what training never saw."""

import operator

import pytest

from tests.plugins.trained import trained

MARKS = {
    "dates": ("exact_match", operator.ge, 0.95),  # copying the written form: 0.05
    "digits": ("accuracy", operator.ge, 0.98),  # the nearest mean of a class: 0.90
    "pairs": ("accuracy", operator.ge, 0.65),  # either class: 0.5
    "private": ("accuracy", operator.ge, 0.85),  # by chance: 0.1
    "quickstart": ("loss", operator.le, 1.45),  # by the byte before: 2.29
    "similarity": ("spearman", operator.ge, 0.8),
    "tagging": ("f1", operator.ge, 0.95),  # each word by what it mostly is: 0.82
    "text_classification": ("accuracy", operator.ge, 0.9),
    "text_regression": ("pearson", operator.ge, 0.9),  # by the length of a line: 0.51
}
"""Recipe to a metric and what it has to be; recipes of several marks have files of their own."""


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("recipe", MARKS)
def test_a_recipe_reaches_its_mark(recipe, seed, tmp_path):
    metric, compared, mark = MARKS[recipe]
    found = trained(recipe, tmp_path, [f"seed={seed}"])[-1]
    assert compared(found[metric], mark), found
