"""Ending a run early: so many evaluations in a row that were no better than the best one before them.

How many there were follows from the evaluations in `metrics.jsonl`, of which a run that resumes keeps those until then:
so a run that was stopped ends where the uninterrupted one does, and goes on if `eval.patience` is raised.
"""

from __future__ import annotations

from redco_cli.console import note
from redco_cli.recipe.schema import EvalSection
from redco_cli.runtime.peers.multihost import is_main_process, process_allgather
from redco_cli.training.records.metrics import METRICS_NAME, read_records
from redco_cli.training.saving.ranking import count_unimproved
from redco_cli.training.saving.resume import Start


class Patience:
    """Counts the evaluations since the best one.

    Attributes:
        unimproved: how many there were.
    """

    def __init__(self, limit: int | None, unimproved: int) -> None:
        """Patience that ends at `limit`; None for never."""
        self.unimproved, self._limit = unimproved, limit

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return self._limit is not None and self.unimproved >= self._limit

    def count(self, improved: bool, step: int) -> None:
        """Takes note of the evaluation of a step, and says so when it is the last."""
        self.unimproved = 0 if improved else self.unimproved + 1
        if self.is_over:
            note(f"the run ends with step {step}, {self}")

    def __str__(self) -> str:
        return f"after {self.unimproved} evaluations in a row without a better one (eval.patience)"


def find_patience(start: Start, section: EvalSection) -> Patience:
    """What is left of its patience where a run starts: the same on all processes, by what the first reads.

    Raises:
        StorageError: the records cannot be read.
    """
    if section.patience is None:
        return Patience(None, 0)
    file, count = start.directory / METRICS_NAME, 0
    if is_main_process() and start.source is not None and file.exists():
        until = start.step if start.put_off else start.step + 1  # what is put off will be done again
        records = [record for record in read_records(file) if record["step"] < until]
        count = count_unimproved(records, section.best_metric, section.best_mode)
    return Patience(section.patience, process_allgather("unimproved", count)[0])
