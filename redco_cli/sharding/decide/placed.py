"""Where a parameter lives, where and how it is used, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from redco_cli.sharding.decide.choose import ByRows
from redco_cli.sharding.plan import TENSOR, DimShardings, Partition, Usage, as_spec


@dataclass(frozen=True)
class Layout:
    """One parameter on the mesh.

    Attributes:
        stored: where it lives.
        gathered: where it is used.
        reason: in the model's terms.
        by_rows: where it is split over `tensor` and nothing else along with it.
        parts: see `Usage`.
        cut: see `Usage`.
        pieces: how each is laid out.
    """

    stored: DimShardings
    gathered: DimShardings
    reason: str
    by_rows: ByRows | None = None
    parts: int = 1
    cut: Partition | None = None
    pieces: tuple[Layout, ...] = ()

    def ways(self, sizes: Mapping[str, int]) -> int:
        """Number of shards that it is stored in."""
        return math.prod(sizes[axis] for dim in self.stored for axis in dim)

    @property
    def usage(self) -> Usage:
        """How it is used."""
        alone = [(TENSOR,) if self.by_rows and self.by_rows.place == i else () for i in range(len(self.gathered))]
        pieces = tuple((as_spec(piece.gathered), piece.usage) for piece in self.pieces)
        return Usage(as_spec(tuple(alone)), self.parts, self.cut, pieces)
