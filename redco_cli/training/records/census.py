"""How many rows were cut, empty or without loss: counted while they are collated, told once, without another pass.

Each row of the first epoch counts once, or of as much of it as the run reads; each process counts its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from redco_cli.console import note, warn
from redco_cli.job import Job
from redco_cli.row_notes import RowCounts
from redco_cli.runtime.peers.multihost import is_main_process, process_allgather


def open_census(job: Job, steps: int, step: int) -> RowCensus:
    """A census of the run's own data.

    Args:
        job: recipe and data.
        steps: where the run ends.
        step: where it begins or goes on.
    """
    size = job.recipe.train.global_batch_size
    epoch = steps * size if job.train_size is None else step * size + job.train_size

    def tell(counts: RowCounts) -> None:
        if line := counts.line():
            say = warn if counts.rows in counts.noted.values() and is_main_process() else note
            say(f"{job.where('data.train')}: {line}")

    return RowCensus(min(epoch, steps * size), tell)


class RowCensus:
    """Counts the rows of a run until it has met all of them once.

    Attributes:
        stop: the position in the training stream where counting ends.
        total: the counts of all processes; None until then.
    """

    def __init__(self, stop: int, tell: Callable[[RowCounts], None]) -> None:
        """Counts nothing yet; `tell` takes the counts of all processes."""
        self.stop = stop
        self.total: RowCounts | None = None
        self._mine, self._tell = RowCounts(), tell

    def add(self, counted: Sequence[bool], notes: Mapping[str, Sequence[int]]) -> None:
        """Adds the rows of a batch; those that do not count are rows of another process, or beyond the end."""
        self._mine.add(counted, notes)

    def finish(self) -> None:
        """Adds up the processes, which all call this at the same step, and tells; once."""
        if self.total is None:
            mine = {"rows": self._mine.rows, "noted": self._mine.noted}
            every = process_allgather("rows", mine)
            noted = sum((Counter(one["noted"]) for one in every), Counter[str]())
            self.total = RowCounts(sum(one["rows"] for one in every), noted)
            self._tell(self.total)

    def so_far(self) -> RowCounts:
        """The counts of all processes, or before they are known those of this one."""
        return self.total or self._mine
