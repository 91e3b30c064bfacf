"""The recipe `lora` on a run of `instruct`: an adapter learns what its base was not taught."""

import pytest

from tests.plugins.trained import trained

SHARED = ["plugin.options.eval_examples=100"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("instruct") / "run"
    quick = ["eval.predict=false", "eval.best_metric=loss", "eval.best_mode=min"]
    trained("instruct", path, [*SHARED, *quick])
    return path


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quantize", ["null", "nf4"])
def test_an_adapter_learns_what_its_base_was_not_taught(base, quantize, tmp_path):
    settings = [*SHARED, f"model.params={base}", f"adapter.quantize={quantize}", "eval.every=120"]
    before, after = (values["exact_match"] for values in trained("lora", tmp_path, settings))
    assert before < 0.1
    assert after > 0.7
