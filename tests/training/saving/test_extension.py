"""Runs whose length changes, against runs that had it from the start, and against extensions without a stop."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.errors import RecipeError, RedcoError
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict_examples, train, validate
from redco_cli.training.optimizer import join_segments
from redco_cli.training.records.runs import summarize
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.extension import Extension, extended, leave_behind
from redco_cli.training.saving.meta import Meta
from redco_cli.training.timeline import make_timeline
from tests.training.tiny import EXAMPLES, assert_same_run, interrupted, recorded, write_project

QUICK = ["eval.predict=false", "eval.at_start=false"]


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return " ".join(capfd.readouterr().err.split())


def rates(run: str) -> list[float]:
    return [row["learning_rate"] for row in recorded(run) if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_finished_run_goes_on_as_if_its_length_had_been_asked_for_at_once(
    schedule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [*QUICK, f"train.schedule={schedule}"]
    train("recipe.yaml", ["output_dir=whole", *settings])
    train("recipe.yaml", ["train.steps=4", *settings])
    assert said(capfd).count("goes on") == 0
    outcome = train("run", ["train.steps=8"])
    expected = "train.steps 4 -> 8: the run goes on exactly as if that had been asked for at once continuing from run/"
    assert expected in said(capfd)
    assert (outcome.step, outcome.was_finished) == (8, False)
    interrupted(10, *settings)  # to the 12 steps of the recipe
    train("recipe.yaml", settings)
    assert_same_run("run", "whole")
    assert train("recipe.yaml", settings).was_finished
    with pytest.raises(RedcoError) as refused:
        train("run", ["train.steps=8"])
    assert str(refused.value) == (
        "command line: train.steps: 8 steps, but checkpoint-12 has done 12 steps of 12\n"
        "  -> restore the value, or choose another output_dir for a new run"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_wsd_goes_on_from_before_its_decay(capfd: pytest.CaptureFixture[str]) -> None:
    """And the shorter run, with its decay, is still there as a run of its own."""
    settings = [*QUICK, "train.schedule=wsd", "train.decay=50%", "eval.every=8", "checkpoint.every=3"]
    train("recipe.yaml", ["output_dir=whole", *settings])
    shorter = train("recipe.yaml", ["train.steps=8", "checkpoint.keep=2", *settings])
    before, decayed = recorded("run"), predict_examples("run", [{"x": np.ones(8, np.float32), "y": 0, "id": 0}])
    assert sorted(path.name for path in Path("run").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (4, 6, 8)
    ]
    told = (
        "train.steps 8 -> 12: the run goes on exactly from checkpoint-4, the newest from before its learning rate "
        "decayed; checkpoint-6, checkpoint-8 and a copy of its records go to run/steps-8, which is a run of its own"
    )
    said(capfd)
    validate("recipe.yaml", settings)
    assert told in said(capfd)
    assert not Path("run/steps-8").exists()
    interrupted(7, *settings)
    assert told in said(capfd)
    train("recipe.yaml", settings)
    assert "train.steps" not in said(capfd)
    assert_same_run("run", "whole")
    assert recorded("run/steps-8") == before
    assert (summarize(Path("run/steps-8")).state, train("run/steps-8").best) == ("finished", shorter.best)
    assert predict_examples("run/steps-8", [{"x": np.ones(8, np.float32), "y": 0, "id": 0}]) == decayed


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("choice", ["restart", "stretch"])
def test_other_schedules_are_asked_about_and_then_extended_once(choice: str, capfd: pytest.CaptureFixture[str]) -> None:
    settings = [*QUICK, "train.schedule=linear"]
    longer = [*settings, "train.steps=10"]
    for run in ("run", "whole"):
        train("recipe.yaml", ["train.steps=6", f"output_dir={run}", *settings])
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", longer)
    with pytest.raises(RedcoError, match=re.escape(str(refused.value))):
        validate("recipe.yaml", longer)
    assert str(refused.value) == (
        "command line: train.steps: 10 steps, but checkpoint-6 was trained for 6: the learning rate (schedule: linear) "
        "would have been another from step 4 on\n  -> set checkpoint.extend: restart (warm up again to the peak from "
        "here) or stretch (the schedule of the new length from here on)"
    )
    said(capfd)
    train("whole", ["train.steps=10", f"checkpoint.extend={choice}"])
    after = {"restart": "0.0e+00 at step 7, and up to 1.0e-02 at step 9", "stretch": "5.0e-03 at step 7"}[choice]
    jump = f"train.steps 6 -> 10: checkpoint.extend: {choice}: the learning rate goes from 2.5e-03 at step 6 to {after}"
    assert jump in said(capfd)
    first = [0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3]
    then = {"restart": [0, 5e-3, 1e-2, 5e-3], "stretch": [5e-3, 3.75e-3, 2.5e-3, 1.25e-3]}[choice]
    np.testing.assert_allclose(rates("whole"), first + then, rtol=1e-5)
    interrupted(8, *longer, f"checkpoint.extend={choice}")
    train("recipe.yaml", longer)  # what is extended needs not be told again
    assert_same_run("run", "whole", 10)
    assert train("run").was_finished
    interrupted(11, *settings, "checkpoint.extend=restart")
    train("run")
    train("whole", ["train.steps=12", "checkpoint.extend=restart"])
    assert_same_run("run", "whole", 12)
    np.testing.assert_allclose(rates("run"), [*first, *then, 0, 5e-3], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_patience_counts_on_in_a_longer_run(capfd: pytest.CaptureFixture[str]) -> None:
    worse = [*QUICK, "eval.every=1", "eval.patience=2", "train.learning_rate=1.5", "train.schedule=constant"]
    ended = train("recipe.yaml", worse)
    assert ended.step < 12
    again = train("run", ["train.steps=20"])
    assert (again.step, again.was_finished) == (ended.step, True)
    assert f"it ended with step {ended.step}, after 2 evaluations in a row" in said(capfd)
    assert train("run", ["train.steps=20", "eval.patience=3"]).step > ended.step


@pytest.mark.slow
def test_an_outer_loop_that_returned_is_called_again(project: Path) -> None:
    """It alone knows whether there is more to do, as with its cap."""
    plain = (project / "plugin.py").read_text()
    settings = [*QUICK, "train.schedule=wsd", "train.decay=50%"]
    (project / "plugin.py").write_text(
        f"{plain}\n\ndef run_fn(run):\n    [(run.train(steps=2), run.save()) for _ in '12345']"
    )
    every = [*settings, "eval.every=2", "checkpoint.every=2"]
    train("recipe.yaml", ["output_dir=whole", "train.steps=8", *every])
    train("recipe.yaml", ["train.steps=4", *every])
    outcome = train("run", ["train.steps=8"])
    assert outcome.step == 8
    assert sorted(path.name for path in Path("run/steps-4").glob("checkpoint-*")) == ["checkpoint-4"]
    assert_same_run("run", "whole", 8)


@pytest.mark.usefixtures("project")
def test_a_finished_run_says_how_to_go_on() -> None:
    train("recipe.yaml", ["train.steps=2", "train.warmup=0", *QUICK])
    done = CliRunner().invoke(app, ["train", "run", "--json"])
    assert json.loads(done.stdout)["next"]["train longer"] == "redco train run train.steps=N"


def test_a_move_that_was_killed_is_completed(tmp_path: Path) -> None:
    """By the time of the second attempt the records may have been cut already: their copy stays as it is."""
    checkpoints = Checkpoints(tmp_path, 3, "min")
    for step in (6, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "metrics.jsonl").write_text("all")
    leave_behind(checkpoints, (6,), tmp_path / "steps-8", ("metrics.jsonl", "recipe.resolved.yaml"))
    (tmp_path / "metrics.jsonl").write_text("cut")
    leave_behind(checkpoints, (8,), tmp_path / "steps-8", ("metrics.jsonl", "recipe.resolved.yaml"))
    checkpoints.close()
    names = ["checkpoint-6", "checkpoint-8", "metrics.jsonl"]
    assert sorted(path.name for path in (tmp_path / "steps-8").iterdir()) == names
    assert (tmp_path / "steps-8" / "metrics.jsonl").read_text() == "all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "steps-8"]


class Saved(Checkpoints):
    """Checkpoints that are said to be there."""

    def __init__(self, *metas: Meta) -> None:
        super().__init__(Path("run").resolve(), 3, "min")
        self.said = {meta.step: meta for meta in metas}

    def meta(self, step: int) -> Meta:
        return self.said[step]

    def damage(self, step: int, items: Sequence[str] = ()) -> str | None:
        return None


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)


def metas(steps: Sequence[int], skipped: int, *overrides: str) -> list[Meta]:
    """Checkpoints as an earlier version wrote them: without the segments."""
    recipe = load_recipe("recipe.yaml", overrides).recipe.model_dump(mode="json")
    return [Meta(step, None, None, False, recipe, skipped=skipped) for step in steps]


def found(saved: Saved, *overrides: str) -> Extension:
    loaded, steps = load_recipe("recipe.yaml", overrides), sorted(saved.said)
    timeline = make_timeline(loaded.recipe, EXAMPLES, loaded.where)
    return extended(loaded, timeline, saved, steps[-1], steps[:-1])


@pytest.mark.usefixtures("written")
def test_shares_of_a_run_grow_with_it() -> None:
    settings = ["train.schedule=constant", "train.warmup=10%"]
    saved = Saved(*metas([20], 0, "train.steps=20", *settings))
    with pytest.raises(RecipeError) as refused:
        found(saved, "train.steps=40", *settings)
    assert str(refused.value) == (
        "command line: train.steps: 40 steps, but checkpoint-20 was trained for 20: the learning rate (schedule: "
        "constant) would have been another from step 2 on, as warm-up of 10% is 4 steps now\n"
        "  -> give train.warmup: 2, as it was, to go on exactly; or set checkpoint.extend: restart (warm up again to "
        "the peak from here) or stretch (the schedule of the new length from here on)"
    )
    extension = found(saved, "train.steps=40", settings[0], "train.warmup=2")
    assert extension.is_exact
    assert extension.timeline.segments[0].warmup == 2
    extension = found(saved, "train.steps=50", "checkpoint.extend=restart", *settings)
    assert [vars(one) for one in extension.timeline.segments] == [
        {"begin": 0, "offset": 0, "steps": 20, "warmup": 2, "decay": 4},
        {"begin": 20, "offset": 20, "steps": 50, "warmup": 3, "decay": 6},
    ]
    assert not found(saved, "train.steps=20", settings[0], "train.warmup=5").is_exact  # which `find_start` refuses
    with pytest.raises(RecipeError, match=r"warmup: 9 is 9 steps, longer than the 5 steps that are left"):
        found(saved, "train.steps=25", settings[0], "train.warmup=9", "checkpoint.extend=restart")


@pytest.mark.usefixtures("written")
def test_epochs_are_told_in_steps() -> None:
    saved = Saved(*metas([4], 0, "train.steps=3 epochs", "train.schedule=cosine"))  # 20 examples in batches of 16
    with pytest.raises(
        RecipeError, match=r"train.steps: 6 epochs, which is 8 steps, but checkpoint-4 was trained for 4:"
    ):
        found(saved, "train.steps=6 epochs", "train.schedule=cosine")
    assert (
        found(saved, "train.steps=6 epochs", "train.schedule=cosine", "checkpoint.extend=stretch").timeline.steps == 8
    )


@pytest.mark.usefixtures("written")
def test_an_unfinished_run_may_change_its_length_either_way() -> None:
    wsd = ["train.schedule=wsd", "train.decay=20%"]
    for steps in (60, 200):
        assert found(Saved(*metas([40], 0, "train.steps=100", *wsd)), f"train.steps={steps}", *wsd).is_exact
    saved = Saved(*metas([60, 70, 90], 0, "train.steps=100", *wsd))
    extension = found(saved, "train.steps=200", *wsd)
    assert (extension.step, extension.left, extension.folder) == (70, (90,), "steps-100")
    with pytest.raises(RecipeError, match=r"another from step 78 on\n"):
        found(saved, "train.steps=95", *wsd)
    with pytest.raises(RecipeError, match=r"another from step 82 on, and no checkpoint from before that is left\n"):
        found(Saved(*metas([90], 0, "train.steps=100", *wsd)), "train.steps=200", *wsd)


@pytest.mark.slow
@pytest.mark.usefixtures("written")
def test_steps_that_were_skipped_count_as_no_update() -> None:
    """Three of 20: the schedule has come to 17, where the next segment begins; and an extension may be extended."""
    saved = Saved(*metas([20], 3, "train.steps=20", "train.schedule=cosine"))
    extension = found(saved, "train.steps=40", "train.schedule=cosine", "checkpoint.extend=restart")
    segments = extension.timeline.segments
    assert (segments[1].begin, segments[1].offset) == (17, 17)
    assert extension.said.endswith("at step 20 to 0.0e+00 at step 21, and up to 1.0e-02 at step 23")
    (meta,) = metas([30], 3, "train.steps=40", "train.schedule=cosine")
    saved = Saved(Meta(**{**vars(meta), "segments": [vars(one) for one in segments]}))
    assert found(saved, "train.steps=40", "train.schedule=cosine").timeline.segments == segments
    again = found(saved, "train.steps=60", "train.schedule=cosine", "checkpoint.extend=stretch").timeline.segments
    assert again[:2] == segments
    assert (again[2].begin, again[2].offset, again[2].steps) == (27, 17, 60)
    train_section = load_recipe("recipe.yaml", ["train.schedule=cosine"]).recipe.train
    before, after = (join_segments(train_section, one) for one in (segments, again))
    assert all(float(before(count)) == float(after(count)) for count in range(27))
    assert float(after(27)) > float(before(27))
