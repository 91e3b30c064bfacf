"""Runs that end before their last step: by patience, for good; by their time, to be continued."""

import os
import signal
from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import train
from redco_cli.training.loop import TrainingRun
from redco_cli.training.records.runs import summarize
from tests.training.tiny import assert_same_run, recorded, write_project

WORSE = ["eval.every=1", "eval.patience=2", "train.learning_rate=1.5", "eval.predict=false"]
"""The loss is best after step 2, and worse after steps 3 and 4."""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stopped_at(step: int, *overrides: str) -> None:
    is_milestone = TrainingRun._is_milestone

    def interrupting(self: TrainingRun, at: int) -> bool:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return is_milestone(self, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "_is_milestone", interrupting)
        with pytest.raises(RedcoError, match=f"stopped by a signal after step {step}; saved"):
            train("recipe.yaml", overrides)


@pytest.mark.slow
def test_patience_ends_a_run_for_good(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = train("recipe.yaml", ["output_dir=whole", *WORSE])
    why = "the run ends with step 4, after 2 evaluations in a row without a better one (eval.patience)\n"
    assert capfd.readouterr().err.endswith(why)
    assert (outcome.step, outcome.best, outcome.checkpoint.name) == (4, 2, "checkpoint-4")
    assert [row["step"] for row in recorded("whole") if row["kind"] == "eval"] == [0, 1, 2, 3, 4]
    assert summarize(Path("whole")).state == "finished"
    assert train("recipe.yaml", ["output_dir=whole", *WORSE]).was_finished
    assert capfd.readouterr().err == (
        "whole is finished: it ended with step 4, after 2 evaluations in a row without a better one (eval.patience); "
        "nothing is trained\n"
    )
    for step in (3, 4):  # at 4 the evaluation that ends the run is put off
        stopped_at(step, *WORSE)
        assert summarize(Path("run")).state == "stopped"
    outcome = train("run", ["checkpoint.keep=3"])
    assert (outcome.step, outcome.was_finished) == (4, False)
    assert_same_run("run", "whole", 4)
    outcome = train("run", ["eval.patience=9"])
    assert outcome.step > 4


def test_patience_is_for_runs_that_redco_ends(project: Path) -> None:
    with (project / "plugin.py").open("a") as file:
        file.write("\n\ndef run_fn(run):\n    run.train()\n")
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", WORSE)
    assert str(refused.value) == (
        "command line: eval.patience: plugin.py has a run_fn, which alone decides when its run ends\n"
        "  -> leave it out, and let run_fn compare what run.evaluate() returns"
    )


@pytest.mark.slow
def test_a_run_whose_time_is_over_is_continued(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["eval.at_start=false", "eval.predict=false"]
    train("recipe.yaml", ["output_dir=whole", *settings])
    capfd.readouterr()
    with pytest.raises(RedcoError, match=r"stopped by train.max_time 0.5s after step \d+; saved") as stopped:
        train("recipe.yaml", [*settings, "train.max_time=0.5s", "plugin.options.seconds=0.2"])
    assert stopped.value.exit_code == 75
    assert "train.max_time 0.5s is over: stopping and saving after this step\n" in capfd.readouterr().err
    assert summarize(Path("run")).state == "stopped"
    train("recipe.yaml", ["plugin.options.seconds=0.2", *settings])
    assert_same_run("run", "whole")
