"""What a derivation comes to: where each parameter lives, where it is used, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
"""The mesh axes, slowest links first: `data` and `fsdp` split the batch, `fsdp` and `tensor` the parameters."""
BATCH_AXES = (DATA, FSDP)

DimShardings = tuple[tuple[str, ...], ...]
"""For each dim of an array the mesh axes that split it, major first: a `PartitionSpec` without its short forms."""


def as_dims(spec: PartitionSpec | Sequence[Any], rank: int = 0) -> DimShardings:
    """A `PartitionSpec`, or the same as a sequence, spelled out for an array of `rank` dims."""
    dims = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec)
    return (*dims, *((),) * (rank - len(dims)))


def as_spec(dims: DimShardings) -> PartitionSpec:
    """The mesh axes of each dim as a `PartitionSpec`, in its shortest form."""
    entries: list[Any] = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


@dataclass(frozen=True)
class Partition:
    """Contiguous pieces of one dim.

    Attributes:
        dim: which.
        sizes: of the pieces, in order.
    """

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """How a parameter is used where `tensor` splits it, besides where.

    Attributes:
        alone: what splits a dim that matmuls sum over, but not the arrays that it is multiplied with.
        parts: how many projections are one after the other in the dim that is split, each of them by itself.
        cut: where it is taken apart; None where it is used whole.
        pieces: of each piece, where it is used, and how.
    """

    alone: PartitionSpec = field(default_factory=PartitionSpec)
    parts: int = 1
    cut: Partition | None = None
    pieces: tuple[tuple[PartitionSpec, Usage], ...] = ()

    def without(self, gone: Collection[int]) -> Usage:
        """How an array is used that has some dims less, such as one layer of a stack."""
        cut = self.cut and replace(self.cut, dim=self.cut.dim - sum(dim < self.cut.dim for dim in gone))
        pieces = tuple((_without(spec, gone), usage.without(gone)) for spec, usage in self.pieces)
        return replace(self, alone=_without(self.alone, gone), cut=cut, pieces=pieces)


def _without(spec: PartitionSpec, gone: Collection[int]) -> PartitionSpec:
    return as_spec(tuple(axes for dim, axes in enumerate(as_dims(spec)) if dim not in gone))


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        path: its place in the tree, keys joined by `/`.
        shape: sizes of its dims.
        dtype: such as `float32`.
        spec: where it lives.
        gathered: where it is used.
        reason: why it is split so, or why it is not.
        bytes: of the whole parameter.
        bytes_per_device: of one device's shard.
        holds: how many parameters it is, where that is not its number of elements: packed codes are two each.
        usage: how it is used there.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    gathered: PartitionSpec
    reason: str
    bytes: int
    bytes_per_device: int
    holds: int | None = None
    usage: Usage = field(default_factory=Usage)

    @property
    def count(self) -> int:
        """How many parameters it is."""
        return math.prod(self.shape) if self.holds is None else self.holds

    def described(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        known = {key: value for key, value in asdict(self).items() if value is not None and key != "usage"}
        return {**known, "spec": _entries(self.spec), "gathered": _entries(self.gathered)}


@dataclass(frozen=True)
class Collective:
    """One kind of communication in a step: forward, backward and gradients.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`.
        axis: the mesh axis it runs over; several joined by `+`.
        what: what is moved, in the model's terms.
        count: how often in a step.
        bytes: result bytes on one device, all of them together; in a report, what one device sends for them in a ring.
        devices: how many take part in one; None for all along the axis.
    """

    kind: str
    axis: str
    what: str
    count: int
    bytes: int
    devices: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a program's parameters are split over a mesh.

    Attributes:
        mesh: axis to size.
        specs: like the parameters, a `PartitionSpec` each: where it lives.
        gathered: the same: where it is used, without the `fsdp` axis but for tables whose rows move.
        usage: the same, a `Usage` each: how it is used there.
        rows: one for each parameter, in tree order.
        collectives: what a step moves, predicted.
        warnings: what a user should know before a run.
    """

    mesh: Mapping[str, int]
    specs: Any
    gathered: Any
    usage: Any
    rows: tuple[Row, ...]
    collectives: tuple[Collective, ...]
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Of all parameters."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Of all parameters on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    def described(self) -> dict[str, Any]:
        """The plan as plain JSON values, without the trees."""
        return {
            "mesh": dict(self.mesh),
            "parameters": [row.described() for row in self.rows],
            "collectives": [asdict(collective) for collective in self.collectives],
            "warnings": list(self.warnings),
        }


def _entries(spec: PartitionSpec) -> list[str | None]:
    """The mesh axes of each dim, several joined by `+`."""
    return ["+".join(entry) if isinstance(entry, tuple) else entry for entry in spec]
