"""The recipes `instruct` and `lora`, one on the run of the other: an adapter learns what its base was not taught."""

import pytest

from tests.plugins.trained import trained


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_an_adapter_learns_what_its_base_was_not_taught(seed, tmp_path):
    base = tmp_path / "instruct"
    assert trained("instruct", base, [f"seed={seed}"])[-1]["exact_match"] >= 0.95  # the commonest answers: 0.17
    for quantize in ("null", "nf4"):
        settings = [f"seed={seed}", f"model.params={base}", f"adapter.quantize={quantize}"]
        evaluations = trained("lora", tmp_path / quantize, settings)
        assert evaluations[0]["exact_match"] < 0.1
        assert evaluations[-1]["exact_match"] >= 0.85
