"""What is looked at of each step's metrics: whether they are finite, what is recorded of them, and their means."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from redco_cli.console import TrainProgress
from redco_cli.job import Job
from redco_cli.privacy.accounting import Budget
from redco_cli.privacy.refusals import EPSILON
from redco_cli.runtime.peers.census import RowCensus
from redco_cli.training.nonfinite import handle_skipped_step, refuse_to_learn_nothing
from redco_cli.training.records.metrics import Recorder
from redco_cli.training.records.speed import Meter
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.timeline import Timeline

_NOT_AVERAGED = frozenset({"grad_norm", "learning_rate", "loss_scale"})


class Observer:
    """Looks at the metrics of steps, each once, in order."""

    def __init__(
        self,
        job: Job,
        timeline: Timeline,
        recorder: Recorder,
        progress: TrainProgress,
        checkpoints: Checkpoints,
        meter: Meter,
        census: RowCensus,
        privacy: Budget | None,
    ) -> None:
        """Nothing is seen yet.

        Args:
            job: its recipe says how many steps in a row may be not finite.
            timeline: says which steps are recorded.
            recorder: writes `metrics.jsonl`.
            progress: the live line.
            checkpoints: the last of which is named when a run ends for losses that are not finite.
            meter: measures speed.
            census: what was counted of the rows.
            privacy: what the steps spend; None without differential privacy.
        """
        self._privacy = privacy
        self._job, self._timeline, self._recorder, self._progress = job, timeline, recorder, progress
        self._checkpoints, self._meter, self._census = checkpoints, meter, census
        self._piece: defaultdict[str, list[float]] = defaultdict(list)
        self._totals: dict[str, tuple[float, int]] = {}

    def see(self, step: int, device_metrics: Any) -> None:
        """Waits for the metrics of a step, and for how many shapes it was compiled by then, and looks at them.

        Raises:
            TrainingError: too many steps in a row were not finite.
            DataError: no row of an epoch, or of a shorter run, has anything to learn.
        """
        metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
        skipped, streak, weight = int(metrics.pop("skipped")), int(metrics.pop("streak")), metrics.pop("weight")
        compilations = int(metrics.pop("compilations"))
        for name, value in metrics.items():
            if name not in _NOT_AVERAGED and math.isfinite(value):
                self._piece[name].append(value)
        if streak:
            scale = metrics.get("loss_scale")
            loss = metrics["loss"]
            handle_skipped_step(self._job, step, streak, weight, loss, self._checkpoints, self._census, scale)
            refuse_to_learn_nothing(self._job, step, skipped, weight, self._census)
        if step % self._timeline.log_every and step != self._timeline.steps:
            return
        rates = self._meter.read()
        speed = {"examples_per_second": rates.examples_per_second, "input_wait": rates.input_wait}
        if rates.tokens_per_second is not None:
            speed["tokens_per_second"] = rates.tokens_per_second
        padding = {} if rates.padding is None else {"padding": rates.padding}
        counted = {"weight": weight, "skipped": skipped, "compilations": compilations}
        spent = {} if self._privacy is None else {EPSILON: self._privacy.spent(step)}
        self._recorder.record(step, "train", {**metrics, **counted, **speed, **padding, **spent})
        self._progress.update(
            step,
            metrics["loss"],
            metrics["learning_rate"],
            rates.tokens_per_second,
            rates.examples_per_second,
            spent,
            padding=rates.padding,
        )

    def end_piece(self) -> dict[str, float]:
        """The means of loss and metrics since the last call, over steps in which they were finite."""
        means = {name: float(np.mean(values)) for name, values in self._piece.items()}
        for name, values in self._piece.items():
            total, count = self._totals.get(name, (0.0, 0))
            self._totals[name] = total + sum(values), count + len(values)
        self._piece.clear()
        return means

    @property
    def means(self) -> dict[str, float]:
        """The means over all pieces that have ended."""
        return {name: total / count for name, (total, count) in self._totals.items()}
