"""A run that is given by its directory: continued where it was stopped, and left alone once it is finished."""

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.errors import RedcoError
from redco_cli.run import train
from redco_cli.training.loop import TrainingRun
from tests.training.tiny import assert_same_run, write_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_by_its_directory_from_anywhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("recipe.yaml", ["output_dir=whole"])
    is_milestone = TrainingRun._is_milestone

    def interrupting(self: TrainingRun, at: int) -> bool:
        if at == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return at == 5 or is_milestone(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_is_milestone", interrupting)
        with pytest.raises(RedcoError, match="stopped by a signal after step 5; saved"):
            train("recipe.yaml")
    (project / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    outcome = train("../run", ["logging.every=1"])
    assert (outcome.step, outcome.was_finished, outcome.output_dir) == (12, False, project / "run")
    assert not any(Path().iterdir())
    monkeypatch.chdir(project)
    assert_same_run("run", "whole")
    with pytest.raises(RedcoError, match=r"command line: train.learning_rate: 0.5, but checkpoint-12 was trained with"):
        train("run", ["train.learning_rate=0.5"])


def test_a_finished_run_is_left_alone(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = train("recipe.yaml", ["train.steps=4", "eval.predict=false"])
    left = contents(project / "run")
    capfd.readouterr()
    for target, overrides in (("run", []), ("recipe.yaml", ["train.steps=4", "eval.predict=false", "logging.every=2"])):
        outcome = train(target, overrides)
        assert outcome.was_finished
        assert capfd.readouterr().err == "run is finished: all 4 steps were done before; nothing is trained\n"
        assert outcome.evaluations == before.evaluations
        assert (outcome.step, outcome.best, outcome.checkpoint) == (before.step, before.best, before.checkpoint)
    done = CliRunner().invoke(app, ["train", "run"])
    assert done.exit_code == 0
    assert "checkpoint       checkpoint-4\nnext\n" in done.stdout
    assert "  predict                       redco predict run\n" in done.stdout
    assert "redco export run --output DIR" in done.stdout
    document = json.loads(CliRunner().invoke(app, ["train", "run", "--json"]).stdout)
    assert (document["was_finished"], document["step"], document["train"]) == (True, 4, {})
    assert contents(project / "run") == left
