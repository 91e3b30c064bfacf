"""How many rows were cut, empty or without loss: counted while they are collated, told once, without another pass.

Each row of the first epoch of training counts once, or of as much of it as the run reads, and each row that is
predicted; each process counts its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from redco_cli.row_notes import Notes, RowCounts
from redco_cli.runtime.peers.multihost import process_allgather


class RowCensus:
    """Counts the rows of a run until it has met all of them once.

    Attributes:
        stop: the position in the order of rows where counting ends.
        total: the counts of all processes; None until then.
    """

    def __init__(self, stop: int, tell: Callable[[RowCounts], None], read: RowCounts | None = None) -> None:
        """Counts nothing yet.

        Args:
            stop: the position where counting ends.
            tell: takes the counts of all processes.
            read: counted by whoever reads the data, all of it on each process, and told instead.
        """
        self.stop = stop
        self.total: RowCounts | None = None
        self._mine, self._tell, self._read = RowCounts(), tell, read

    def add(self, own: Sequence[bool], positions: Sequence[int], notes: Notes) -> None:
        """Adds the rows of a batch.

        Args:
            own: of each row, whether this process counts it, if several collate it.
            positions: of the rows, in their order; those from `stop` on do not count.
            notes: what is noted of them.
        """
        pairs = zip(own, positions, strict=True)
        self._mine.add([is_own and position < self.stop for is_own, position in pairs], notes)

    def finish(self) -> None:
        """Adds up the processes, which all call this at the same step, and tells; once."""
        if self.total is None:
            mine = {"rows": self._mine.rows, "noted": self._mine.noted}
            every = process_allgather("rows", mine)
            noted = sum((Counter(one["noted"]) for one in every), Counter[str]())
            self.total = self._read or RowCounts(sum(one["rows"] for one in every), noted)
            self._tell(self.total)

    def so_far(self) -> RowCounts:
        """The counts of all processes, or before they are known those of this one."""
        return self.total or self._read or self._mine
