"""Runs whose batches change their shape: told, counted, and ended with their work saved."""

from pathlib import Path

import pytest

from redco_cli.errors import PluginError
from redco_cli.run import train
from redco_cli.training.records.metrics import read_records

SETTINGS = ["eval.predict=false", "eval.at_start=false", "eval.every=20", "checkpoint.every=20", "train.steps=8"]


def pad(project: Path, width: str) -> None:
    """Has `collate_fn` give the features, of which the model reads the first, a width of its own."""
    text = (project / "plugin.py").read_text()
    text = text.replace('name="hidden")(x)', 'name="hidden")(x[:, :FEATURES])')
    stacked = 'np.stack([e["x"] for e in examples])'
    text = text.replace(stacked, f"np.pad({stacked}, ((0, 0), (0, {width})))")
    (project / "plugin.py").write_text(text)


def compilations() -> list[int]:
    return [r["compilations"] for r in read_records(Path("run/metrics.jsonl")) if r["kind"] == "train"]


@pytest.mark.slow
def test_a_few_shapes_are_told_and_counted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pad(project, 'examples[0]["id"] % 2')
    train("recipe.yaml", [*SETTINGS, "train.max_compilations=2"])
    assert compilations()[0] == 1
    assert compilations()[-1] == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert sum("compiles the train step anew: batch['x'] was" in line for line in told) == 1
    assert sum("compiles the eval step anew: batch['x'] was" in line for line in told) <= 1


@pytest.mark.slow
def test_too_many_shapes_end_the_run_and_lose_nothing(project: Path) -> None:
    pad(project, 'examples[0]["id"] if ctx.stage == "train" else 0')
    with pytest.raises(PluginError, match="batches came in more than 3 shapes, and each compiles the train step"):
        train("recipe.yaml", [*SETTINGS, "train.max_compilations=3"])
    (saved,) = Path("run").glob("checkpoint-*")
    assert int(saved.name.split("-")[1]) >= 3
    outcome = train("recipe.yaml", [*SETTINGS, "train.max_compilations=16"])
    assert outcome.step == 8
    assert [r["step"] for r in read_records(Path("run/metrics.jsonl")) if r["kind"] == "train"][-1] == 8


@pytest.mark.slow
def test_evaluations_of_any_size_count_as_one_shape(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """21 examples on two devices: batches of 8, 4 and, on each device alike, 1."""
    train("recipe.yaml", [*SETTINGS, "train.max_compilations=1", "mesh.data=2", "eval.batch_size=8"])
    assert set(compilations()) == {1}
    assert "compiles" not in capsys.readouterr().err
