"""Runs that failed in their plugin or recipe and were repaired, against the uninterrupted run."""

from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import train
from redco_cli.training.saving.checkpoint import Checkpoints
from tests.training.tiny import assert_same_run, final_state, recorded

METRIC = 'return {"exact":'


def break_after_one_evaluation(project: Path) -> str:
    """Makes `metric_fn` fail from its second call on; returns the whole plugin."""
    file = project / "plugin.py"
    whole = file.read_text()
    assert METRIC in whole
    failing = f"calls.append(1)\n    if len(calls) > 1:\n        raise KeyError('target')\n    {METRIC}"
    file.write_text(f"calls = []\n{whole.replace(METRIC, failing)}")
    return whole


def evaluations(run: str) -> list[int]:
    return [row["step"] for row in recorded(run) if row["kind"] == "eval"]


def metric_of(run: str, step: int) -> float | None:
    """The value that ranks a checkpoint."""
    checkpoints = Checkpoints(Path(run).resolve(), 99, "min")
    metric = checkpoints.meta(step).metric
    checkpoints.close()
    return metric


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(4, id="midway"), pytest.param(12, id="at the end")])
def test_an_evaluation_that_failed_is_done_once_the_plugin_is_repaired(project: Path, step: int) -> None:
    """It fails twice: the second time where the run continues with it."""
    settings = [f"eval.every={step}", "train.learning_rate=3.0", "train.warmup=0"]  # no evaluation is the best one
    train("recipe.yaml", ["output_dir=whole", *settings])
    whole = break_after_one_evaluation(project)
    with pytest.raises(RedcoError, match=r"plugin.py:\d+: metric_fn: metric_fn raised KeyError"):
        train("recipe.yaml", settings)
    assert [path.name for path in Path("run").glob(f"checkpoint-{step}")] == [f"checkpoint-{step}"]
    assert evaluations("run") == [0]
    (project / "plugin.py").write_text(f"calls = [1]\n{(project / 'plugin.py').read_text().removeprefix('calls = []')}")
    with pytest.raises(RedcoError, match="metric_fn raised KeyError"):
        train("recipe.yaml", settings)
    (project / "plugin.py").write_text(whole)
    outcome = train("recipe.yaml", settings)
    assert [at for at, _ in outcome.evaluations] == list(range(0, 13, step))
    assert_same_run("run", "whole")
    assert metric_of("run", 12) == metric_of("whole", 12)
    assert metric_of("run", 12) is not None
    records = recorded("run")
    assert train("recipe.yaml", settings).was_finished
    assert recorded("run") == records


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_an_evaluation_without_the_metric_that_ranks_it_is_done_again_and_recorded_once() -> None:
    settings = ["eval.at_start=false", "eval.every=12"]
    train("recipe.yaml", ["output_dir=whole", "eval.best_metric=exact", "eval.best_mode=max", *settings])
    with pytest.raises(RedcoError, match="evaluation gives no exactly"):
        train("recipe.yaml", ["eval.best_metric=exactly", "eval.best_mode=max", *settings])
    assert evaluations("run") == []
    assert final_state("run", 12).keys() == final_state("whole", 12).keys()
    outcome = train("recipe.yaml", ["eval.best_metric=exact", "eval.best_mode=max", *settings])
    assert evaluations("run") == [12]
    assert outcome.best == 12
    assert_same_run("run", "whole")
