"""Plans, readings and abstract arrays in short: `- t` is a matrix whose second dim is over `tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from redco_cli.sharding import Plan, Reading


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract array of float32."""
    return jax.ShapeDtypeStruct(shape, "float32")


def shaped(shapes: Any, dtype: Any = "float32") -> Any:
    """A tree of abstract arrays from a tree of shapes."""
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)


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
