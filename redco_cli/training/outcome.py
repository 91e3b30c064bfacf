"""What a run leaves behind, and how one is recognised that has nothing left to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redco_cli.console import note
from redco_cli.job import Job
from redco_cli.recipe.load import shown
from redco_cli.training.patience import find_patience
from redco_cli.training.records.metrics import METRICS_NAME, measured, read_records
from redco_cli.training.saving.outer_state import OuterState
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
        evaluations: step and values of each evaluation of the run, those before a stop included.
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

    A run with a `run_fn` has ended when that has returned.

    Raises:
        StorageError: its records or its checkpoints cannot be read.
    """
    kept, is_own = start.checkpoints, start.source is start.checkpoints
    patience, at_its_end = find_patience(start, job.recipe.eval), start.step >= timeline.steps
    loops = job.plugin.run_fn is not None
    has_ended = kept_by_loop(start).is_over if loops else at_its_end or patience.is_over
    if not is_own or start.put_off or not has_ended:
        return None
    evaluations = recorded_evaluations(start.directory)
    ended = "where run_fn returned" if loops else patience
    why = f"all {start.step} steps were done before" if at_its_end else f"it ended with step {start.step}, {ended}"
    note(f"{shown(start.directory)} is finished: {why}; nothing is trained")
    return TrainResult(
        start.directory, start.step, start.step, {}, evaluations, kept.best(), kept.path(start.step), True
    )


def recorded_evaluations(directory: Path) -> list[tuple[int, Mapping[str, float]]]:
    """Step and values of each evaluation that a run has recorded.

    Raises:
        StorageError: its records cannot be read.
    """
    file = directory / METRICS_NAME
    return [
        (record["step"], {name: math.nan if value is None else value for name, value in measured(record).items()})
        for record in (read_records(file) if file.exists() else [])
        if record["kind"] == "eval"
    ]


def kept_by_loop(start: Start) -> OuterState:
    """What the outer loop of a run kept; it is over no more in another run, or with another length or code.

    Raises:
        StorageError: the checkpoint is damaged.
    """
    if start.source is None:
        return OuterState()
    kept, is_own = start.source.restore_outer(start.step), start.source is start.checkpoints
    is_new = bool(start.said) or any(change["what"] == "plugin" for change in start.continued.new)
    return dataclasses.replace(kept, is_over=kept.is_over and is_own and not is_new)
