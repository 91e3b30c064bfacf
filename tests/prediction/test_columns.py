"""Columns that `prepare_fn` computes once: a run with them is the run that computes the same in every step."""

from pathlib import Path

import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import evaluate, predict_examples, train, validate
from tests.training.tiny import assert_same_run, interrupted, recorded, write_project

EACH_STEP = """
def apart(own, other):
    import jax
    return ((own - jax.lax.stop_gradient(other)) ** 2).sum()


def loss_fn(ctx, params, batch, rng, train):
    own = ctx.model(params["model"], batch["x"])
    other = ctx.models["reference"](params["reference"], batch["x"])
    return Loss(apart(own + 1, other), len(batch["x"]), {"other": other.sum()})


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params["model"], batch["x"]).argmax(-1)
"""
ONCE = """
def prepare_fn(ctx, params, batch):
    assert set(params) == {"reference"}
    return {"other": ctx.models["reference"](params["reference"], batch["x"])}


collated = collate_fn


def collate_fn(ctx, examples):
    batch = collated(ctx, examples)
    return {**batch, "other": np.stack([e["other"] for e in examples])} if ctx.stage in ("train", "eval") else batch


def loss_fn(ctx, params, batch, rng, train):
    own = ctx.model(params["model"], batch["x"])
    return Loss(apart(own + 1, batch["other"]), len(batch["x"]), {"other": batch["other"].sum()})
"""
REFERENCE = "models={reference: {frozen: true}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "each.py").write_text((tmp_path / "plugin.py").read_text() + EACH_STEP)
    (tmp_path / "once.py").write_text((tmp_path / "each.py").read_text() + ONCE)
    return tmp_path


def losses(run: str) -> list[tuple[str, int, float, float]]:
    return [(row["kind"], row["step"], row["loss"], row["other"]) for row in recorded(run) if "loss" in row]


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("mesh", ["mesh.data=1", "mesh={data: 2, fsdp: 2}"])
def test_what_is_computed_once_is_what_every_step_would_compute(mesh):
    for name in ("each", "once"):
        train("recipe.yaml", [REFERENCE, mesh, f"plugin.module={name}.py", f"output_dir={name}"])
    found, wanted = losses("once"), losses("each")
    assert len(wanted) == 12 + 4
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    np.testing.assert_allclose([row[2:] for row in found], [row[2:] for row in wanted], rtol=1e-5)
    assert len({round(row[3], 3) for row in wanted}) > 4
    assert evaluate("once").values["loss"] == pytest.approx(found[-1][2], rel=1e-5)
    example = {"x": np.ones(8, np.float32), "y": 0, "id": 0}
    assert predict_examples("once", [example])[0]["prediction"] in range(8)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_run_that_continues_computes_the_same_columns():
    plain = [REFERENCE, "mesh.data=1", "plugin.module=once.py"]
    train("recipe.yaml", [*plain, "output_dir=whole"])
    interrupted(5, *plain)
    train("recipe.yaml", plain)
    assert_same_run("run", "whole")


@pytest.mark.parametrize(
    ("added", "overrides", "problem"),
    [
        ("", [], "prepare_fn of once.py computes with models that are never updated, and there are none"),
        ("", [REFERENCE, "plugin.options.stream=true"], "computes columns of every example beforehand; these have no"),
        ("\ndef run_fn(run): run.train()", [REFERENCE], "has prepare_fn and run_fn, but columns are joined to"),
        ("\ndef prepare_fn(ctx, params, batch): return 3", [REFERENCE], "once.py: prepare_fn: returned 3, no dict of"),
        (
            "\ndef prepare_fn(ctx, params, batch): return {'sum': batch['x'].sum()}",
            [REFERENCE],
            "the column 'sum' has shape [] on the batch",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused(folder, added, overrides, problem):
    with (folder / "once.py").open("a") as file:
        file.write(added)
    with pytest.raises(RedcoError) as refused:
        validate("recipe.yaml", ["plugin.module=once.py", *overrides])
    assert problem in str(refused.value)


@pytest.mark.usefixtures("folder")
def test_a_recipe_with_columns_is_valid_before_they_are_computed():
    summary, shown = validate("recipe.yaml", [REFERENCE, "plugin.module=once.py"])
    assert summary["examples"]["train"] == 20
    assert shown == []
