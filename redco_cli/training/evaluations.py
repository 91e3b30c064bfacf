"""What a run knows of its evaluations: their values, which is the best, and which is still to be done."""

from __future__ import annotations

import math
from collections.abc import Mapping

from redco_cli.console import TrainProgress, warn
from redco_cli.job import Job
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.training.evaluate import check_has
from redco_cli.training.patience import Patience
from redco_cli.training.records.metrics import Recorder
from redco_cli.training.saving.outer_state import OuterState
from redco_cli.training.saving.ranking import Best, finite, improves
from redco_cli.training.saving.resume import Start


class Evaluations:
    """The evaluations of a run.

    Attributes:
        best: step and value of the best one; None without any.
        pending: the step whose evaluation a signal or an error left undone; None without one.
        patience: ends the run after evaluations that were no better.
        logged: what an outer loop logged since its last boundary.
        history: step and values of each of this process.
    """

    def __init__(self, job: Job, recorder: Recorder, progress: TrainProgress, start: Start, patience: Patience) -> None:
        """Nothing is evaluated yet.

        Args:
            job: its recipe says which metric ranks.
            recorder: writes `metrics.jsonl`.
            progress: says what was found.
            start: where the run starts.
            patience: what is left of it.
        """
        self.best: Best = start.best
        self.pending = start.step if start.put_off else None
        self.patience = patience
        self.history: list[tuple[int, Mapping[str, float]]] = []
        self._job, self._recorder, self._progress = job, recorder, progress
        self._metric, self._mode = job.recipe.eval.best_metric, job.recipe.eval.best_mode
        self._ranked: Best = None if start.metric is None else (start.step, start.metric)  # the last that was
        self._evaluated: int | None = None  # the last step that was
        self.logged: dict[str, float] = {}
        self._names: set[str] = set()  # of all that was ever logged

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Records an evaluation on the recipe's data.

        Raises:
            RecipeError: it has not the metric that ranks it, and there is no outer loop that may log it.
        """
        if self._job.plugin.run_fn is None:
            check_has(values, self._metric, self._job)
        self.history.append((step, values))
        self._evaluated = step
        self._recorder.record(step, "eval", values)
        improved = self._rank(step, values)
        self._progress.evaluated(step, values, improved)
        unknown = [name for name in dict.fromkeys(("loss", self._metric)) if not math.isfinite(values.get(name, 0))]
        if unknown and is_main_process():
            ranks = "; it ranks no checkpoint" if self._metric in unknown else ""
            warn(f"step {step}: {' and '.join(unknown)} of the evaluation: not finite{ranks}")
        self.patience.count(improved, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records values of an outer loop, one of which may be the metric that ranks."""
        self._recorder.record(step, "run", values)
        self._progress.logged(values)
        self.logged |= values
        self._names |= values.keys()

    def settle(self, step: int) -> None:
        """Ranks a boundary of an outer loop by what was evaluated at it and logged since the last.

        Raises:
            RecipeError: it was evaluated, which does not give the metric that ranks it, and nobody ever logged it.
        """
        evaluated = self.history[-1][1] if self.history and self.history[-1][0] == step else {}
        known = {**self.logged, **evaluated}
        if evaluated and self._metric not in self._names:
            check_has(known, self._metric, self._job)
        self._rank(step, known)

    def restore(self, outer: OuterState, step: int) -> None:
        """Goes on from a checkpoint of an outer loop: what was due at its boundary is done but for what is pending."""
        if self.pending is not None:
            self.logged |= outer.logged
        self._evaluated = step if outer.is_evaluated else None

    def begin(self) -> None:
        """Forgets what was logged: a boundary is behind."""
        self.logged.clear()

    def has(self, step: int) -> bool:
        """Whether the recipe's data were evaluated at a step."""
        return self._evaluated == step

    def metric_at(self, step: int) -> float | None:
        """The value that ranks a checkpoint of this step; None when it was not evaluated."""
        return self._ranked[1] if self._ranked is not None and self._ranked[0] == step else None

    def _rank(self, step: int, values: Mapping[str, float]) -> bool:
        if self._metric in values:
            value = finite(values[self._metric])
            self._ranked = None if value is None else (step, value)
        improved = improves(values.get(self._metric), self.best, self._mode)
        if improved:
            self.best = (step, float(values[self._metric]))
        return improved
