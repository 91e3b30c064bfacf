"""Numbers that a plugin draws without JAX while it is traced are refused; what libraries draw is not."""

import random
from pathlib import Path

import numpy as np
import pytest

from redco_cli.errors import PluginError
from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from tests.training.cuts.test_findings import LINE, PLUGIN, RECIPE

DRAWS = {
    "numpy's own": "np.random.normal(size=b)",
    "a legacy generator": "LEGACY.normal(size=b)",
    "a generator": "HELD.normal(size=b)",
    "one without a seed": "np.random.default_rng().normal(size=b)",
    "Python's own": "random.uniform(0, 1)",
}
HELD = "\nimport random\nHELD, LEGACY = np.random.default_rng(0), np.random.RandomState(0)\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)


def proved(body: str) -> None:
    Path("plugin.py").write_text(f"{PLUGIN}    {body}{HELD}")
    prepare(load_recipe("recipe.yaml"), stages=("train",))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_the_plugin_draws_is_refused_with_its_line(draw: str) -> None:
    with pytest.raises(PluginError, match=rf"^plugin\.py:{LINE}: loss_fn: \S+ .*the same in every step"):
        proved(f"return Loss((losses * {draw}).sum(), b)")


def test_a_generator_with_a_seed_is_the_plugins_to_have() -> None:
    proved("w = np.random.default_rng(0).normal(size=6)\n    return Loss((losses * (x @ w)).sum(), b)")


def test_what_a_library_draws_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages" / "layers.py"
    library.parent.mkdir()
    library.write_text("import random\n\ndef is_left_out(share):\n    return random.uniform(0, 1) < share\n")
    monkeypatch.syspath_prepend(library.parent)
    proved("import layers\n    return Loss(losses.sum() * (not layers.is_left_out(0.0)), b)")


def test_generators_are_as_before_afterwards() -> None:
    before = (np.random.normal, np.random.default_rng, random.random)
    with pytest.raises(PluginError):
        proved("return Loss((losses * np.random.normal(size=b)).sum(), b)")
    assert (np.random.normal, np.random.default_rng, random.random) == before
