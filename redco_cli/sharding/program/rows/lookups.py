"""Rows that a program looks up: which dims are taken whole, in what precision they are used, and among how many."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import core


@dataclass(frozen=True)
class Lookup:
    """How an equation looks rows up in a table.

    Attributes:
        features: dims of the result to the dims of the table that they are: those that are taken whole.
        ids: the first dim of the result that comes from the ids.
    """

    features: Mapping[int, int]
    ids: int


def lookup(equation: Any) -> Lookup | None:
    """How an equation looks rows up by ids [B, ..]; None where it does something else."""
    if equation.primitive.name != "gather":
        return None
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, result = equation.invars[0].aval.shape, equation.outvars[0].aval
    whole = [dim for dim in range(len(shape)) if dim not in numbers.collapsed_slice_dims]
    is_by_id = not numbers.operand_batching_dims and equation.invars[1].aval.ndim > 1
    if not is_by_id or any(sizes[dim] != shape[dim] for dim in whole) or len(whole) == len(shape):
        return None
    features = dict(zip(numbers.offset_dims, whole, strict=True))
    return Lookup(features, min(set(range(result.ndim)) - set(features)))


_ADDED = frozenset({"scatter-add", "scatter-max", "scatter-min"})


def neighbours(equation: Any) -> tuple[Any, Any] | None:
    """Nodes [N, ..] and rows [E, ..], where an equation takes rows of nodes by number, or adds rows to them.

    Returns:
        Their variables; None where rows are fewer numbers than nodes, or the equation does something else.
    """
    if equation.primitive.name == "gather":
        numbers, rows = equation.params["dimension_numbers"], equation.outvars[0]
        by_number, alone = numbers.start_index_map, numbers.collapsed_slice_dims
    elif equation.primitive.name in _ADDED:
        numbers, rows = equation.params["dimension_numbers"], equation.invars[2]
        by_number, alone = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
    else:
        return None
    nodes = equation.invars[0]
    is_by_number = 0 in by_number and 0 in alone and not numbers.operand_batching_dims
    fewer = math.prod(nodes.aval.shape) <= math.prod(rows.aval.shape)
    return (nodes, rows) if is_by_number and fewer else None


def casts(closed: Any) -> dict[Any, Any]:
    """In what other precision alone rows are used that a program looks up: by their variable.

    Args:
        closed: what `jax.make_jaxpr` returned.
    """
    found, pending = {}, [closed.jaxpr]
    while pending:
        jaxpr = pending.pop()
        users = defaultdict(list)
        for equation in jaxpr.eqns:
            pending += core.jaxprs_in_params(equation.params)
            for atom in equation.invars:
                if not isinstance(atom, core.Literal):
                    users[atom].append(equation)
        for rows in (equation.outvars[0] for equation in jaxpr.eqns if equation.primitive.name == "gather"):
            used = [user.primitive.name for user in users[rows]]
            if used == ["convert_element_type"] and not any(rows is result for result in jaxpr.outvars):
                found[rows] = users[rows][0].params["new_dtype"]
    return found
