"""State of a plugin, a teacher and an outer loop in runs of several processes: as in one."""

from pathlib import Path

import numpy as np
import pytest

from redco_cli.run import train
from tests.runtime.multiprocess.processes import run_several
from tests.training.test_models import DISTILLED
from tests.training.test_outer_loop import FEDERATED
from tests.training.test_state import AVERAGED
from tests.training.tiny import final_state, recorded, write_project

PLAIN = ["eval.predict=false", "eval.at_start=false", "checkpoint.keep=9"]
KNOWN = {"loss", "grad_norm", "at", "updated", "apart", "round", "spread"}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def extended(directory: Path, text: str) -> None:
    with (directory / "plugin.py").open("a") as file:
        file.write(text)


def assert_like(directory: str, expected: str, step: int) -> None:
    """Records, and the state after a step."""
    mine, theirs = recorded(directory), recorded(expected)
    assert [(one["kind"], one["step"]) for one in mine] == [(one["kind"], one["step"]) for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        for name in KNOWN & other.keys():
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-5), (one["step"], name)
    found, wanted = final_state(directory, step), final_state(expected, step)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_state_and_a_teacher(tiny: Path) -> None:
    train("recipe.yaml", [*PLAIN, "mesh.data=1", "output_dir=teacher", "train.steps=6"])
    extended(tiny, AVERAGED.split("def predict_fn")[0].replace("ctx.model(params,", 'ctx.model(params["model"],'))
    text = (tiny / "plugin.py").read_text()
    text = text.replace("_loss = loss_fn", DISTILLED.split("def predict_fn")[0] + "\n_loss = loss_fn")
    text = text.replace('ctx.model(ctx.state["target"],', 'ctx.model(ctx.state["target"]["model"],')
    (tiny / "plugin.py").write_text(text)
    given = [*PLAIN, "models={teacher: {params: teacher}}"]
    train("recipe.yaml", [*given, "mesh.data=1", "output_dir=one"])
    cube = [*given, "mesh={data: 1, fsdp: 2, tensor: 2}", "output_dir=many"]
    run_several(["train", "recipe.yaml", *cube, "train.max_time=1h"], 2, 2)
    assert_like("many", "one", 12)
    half = [*cube[:-1], "output_dir=half", "checkpoint.resume=one/checkpoint-6"]
    run_several(["train", "recipe.yaml", *half], 2, 2)
    found, wanted = final_state("half", 12), final_state("one", 12)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_an_outer_loop(tiny: Path) -> None:
    extended(tiny, FEDERATED)
    given = [*PLAIN, "train.steps=16", "eval.every=4", "checkpoint.every=4"]
    train("recipe.yaml", [*given, "mesh.data=1", "output_dir=one"])
    run_several(["train", "recipe.yaml", *given, "mesh={data: 2}", "output_dir=many"], 2, 1)
    assert_like("many", "one", 16)
