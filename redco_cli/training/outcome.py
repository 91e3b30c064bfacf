"""What a run leaves behind, and how one is recognised that has nothing left to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redco_cli.console import note
from redco_cli.job import Job
from redco_cli.recipe.load import shown
from redco_cli.training.patience import find_patience
from redco_cli.training.records.metrics import METRICS_NAME, measured, read_records
from redco_cli.training.saving.resume import Start
from redco_cli.training.timeline import Timeline


@dataclass(frozen=True)
class TrainResult:
    """What a training run leaves behind.

    Attributes:
        output_dir: its directory.
        step: optimizer steps done.
        began: the step that this process began at.
        train: means over the steps from there on: `loss` and the plugin's metrics.
        evaluations: step and values of each evaluation of this process; of the whole run, if it was finished before.
        best: step of the best checkpoint; None when nothing was evaluated.
        checkpoint: the newest checkpoint.
        was_finished: whether the run had ended before, so that nothing was trained.
    """

    output_dir: Path
    step: int
    began: int
    train: Mapping[str, float]
    evaluations: Sequence[tuple[int, Mapping[str, float]]]
    best: int | None
    checkpoint: Path
    was_finished: bool = False


def finished(start: Start, job: Job, timeline: Timeline) -> TrainResult | None:
    """What a run that has ended left behind, and says so; None for one that goes on. Writes nothing.

    Only the outer loop of a plugin with `run_fn` knows whether it has ended: such a run always goes on.

    Raises:
        StorageError: its records or its checkpoints cannot be read.
    """
    kept, is_own = start.checkpoints, start.source is start.checkpoints
    patience, at_its_end = find_patience(start, job.recipe.eval), start.step >= timeline.steps
    if not is_own or start.put_off or not (at_its_end or patience.is_over) or job.plugin.run_fn is not None:
        return None
    file = start.directory / METRICS_NAME
    records = read_records(file) if file.exists() else []
    evaluations = [
        (record["step"], {name: math.nan if value is None else value for name, value in measured(record).items()})
        for record in records
        if record["kind"] == "eval"
    ]
    why = f"all {start.step} steps were done before" if at_its_end else f"it ended with step {start.step}, {patience}"
    note(f"{shown(start.directory)} is finished: {why}; nothing is trained")
    return TrainResult(
        start.directory, start.step, start.step, {}, evaluations, kept.best(), kept.path(start.step), True
    )
