"""Plans and readings in short: `- t` is a matrix whose second dim is over `tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from redco_cli.sharding import Plan, Reading


def abbreviated(spec: PartitionSpec, rank: int) -> str:
    """For each dim `-`, or the first letters of the mesh axes that split it, major first."""
    entries = [*spec, *[None] * (rank - len(spec))]
    names = [(entry,) if isinstance(entry, str) else entry or ("-",) for entry in entries]
    return " ".join("".join(axis[0] for axis in dim) for dim in names)


def stored(plan: Plan) -> dict[str, str]:
    """Path to where it is stored."""
    return {row.path: abbreviated(row.spec, len(row.shape)) for row in plan.rows}


def gathered(plan: Plan) -> dict[str, str]:
    """Path to where it is used."""
    return {row.path: abbreviated(row.gathered, len(row.shape)) for row in plan.rows}


def reasons(plan: Plan) -> dict[str, str]:
    """Path to why."""
    return {row.path: row.reason for row in plan.rows}


def axis_kinds(reading: Reading) -> dict[str, str]:
    """Path to the factors of each dim: sizes, `h` of heads, `!` within a head, `e` experts, `r` rows, `'` layers."""
    letters = (("h", reading.heads), ("!", reading.within_heads), ("e", reading.experts), ("r", reading.lookup_axes))

    def factor(axis: Any) -> str:
        return f"{axis.size}" + "".join(letter for letter, axes in letters if axis in axes) + "'" * axis.layer

    def dim(axes: Sequence[Any]) -> str:
        return "*".join(map(factor, axes)) or "1"

    return {one.path: " ".join(map(dim, one.dims)) for one in reading.parameters}
