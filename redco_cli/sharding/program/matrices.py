"""Transforms and decompositions of the last dims of an array, each matrix by itself: FFT, Cholesky, SVD, QR, ...

Dims before them are as they are elsewhere, and may be split.
"""

from __future__ import annotations

from typing import Any

from redco_cli.sharding.axes import fresh_dims, unify
from redco_cli.sharding.program import primitives  # noqa: F401  which has a rule for all names, before those here
from redco_cli.sharding.program.events import Value
from redco_cli.sharding.program.walk import Walk, combined, rule

OF_LAST_DIMS = (
    *("fft", "cholesky", "eig", "eigh", "svd", "qr", "geqrf", "householder_product", "lu", "lu_pivots_to_permutation"),
    *("schur", "hessenberg", "tridiagonal", "triangular_solve"),
)
"""Primitives that take the last dims of their operands whole."""


def leading(name: str, params: Any, rank: int) -> int:
    """How many dims of the first operand, of this rank, come before those that are taken whole."""
    if name == "fft":
        return rank - len(params["fft_lengths"])
    return rank - (1 if name == "lu_pivots_to_permutation" else 2)


@rule(*OF_LAST_DIMS)
def _of_last_dims(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    name, first = equation.primitive.name, operands[0].dims
    lead = leading(name, equation.params, len(first))
    for x, atom in zip(operands, equation.invars, strict=True):
        for mine, its in zip(first[:lead], x.dims[:lead], strict=True):
            unify(mine, its)
        walk.needs_whole(x.dims[lead:], x, atom.aval, f"operand of {name}")
    shapes = [variable.aval.shape for variable in equation.outvars]
    return [combined(operands, [*first[:lead], *fresh_dims(shape[lead:])]) for shape in shapes]
