"""PiSSA: a path that begins with the principal part of its weight, which is subtracted beside it.

    A0·B0 = U_r·S_r·V_r / s                     of W = U·S·V, its r largest singular values (arXiv 2404.02948)
    y = x·W + s·(x·A)·B - s·(x·A0)·B0           A = A0, B = B0 before the first step

PEFT keeps W - s·A0·B0 in the place of W. Here the weight stays as it is, in whatever type it is stored, and A0 and B0
are constants beside A and B: a run that is continued reads them from its checkpoint rather than factorise again, the
model without its adapter is the model itself, and what is exported is a plain path of twice the rank for the weights as
they were (PEFT's `path_initial_model_for_weight_conversion` makes the same of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from redco_cli.adapters.uses import Use
from redco_cli.errors import RecipeError

Array = Any


def principal_factors(weight: Array, drawn: Array, scale: float, iterations: int | None) -> tuple[Array, Array]:
    """A0 [..., in, r] and B0 [..., r, out] in float32, of which each has the root of the singular values. Traceable.

    Args:
        weight: [..., in, out], in any type.
        drawn: random numbers [..., in, r], where iterations begin.
        scale: s.
        iterations: None for a whole singular value decomposition, else as `torch.svd_lowrank` with so many.
    """
    matrix, rank = weight.astype(jnp.float32), drawn.shape[-1]
    if iterations is None:
        u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
    else:
        basis = _basis(matrix, drawn, iterations)
        u, s, v = jnp.linalg.svd(matrix @ basis, full_matrices=False)
        v = v @ basis.mT
    root = jnp.sqrt(s[..., :rank] / scale)
    return u[..., :rank] * root[..., None, :], root[..., None] * v[..., :rank, :]


def _basis(matrix: Array, start: Array, iterations: int) -> Array:
    """Orthogonal columns [out, r] that nearly hold the rows of a matrix [in, out] (Halko et al., 2009, 4.4)."""
    basis = jnp.linalg.qr(matrix.mT @ start)[0]
    for _ in range(iterations):
        basis = jnp.linalg.qr(matrix @ basis)[0]
        basis = jnp.linalg.qr(matrix.mT @ basis)[0]
    return basis


def refuse_no_parts(uses: Mapping[str, Use], ranks: Mapping[str, int], where: Callable[[str], str]) -> None:
    """Refuses weights that have no principal part of some rank.

    Args:
        uses: path of a weight to how it is used.
        ranks: of its path.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: rows of one are looked up, or it has fewer singular values.
    """
    for path, use in uses.items():
        most = min(use.inputs, use.outputs)
        if use.kind == "lookup":
            problem = f"{path} is a table of which rows are looked up, which PiSSA does not know"
            raise RecipeError(where("adapter.targets"), problem, "leave it out; or set adapter.init: default")
        if ranks[path] > most:
            problem = f"{path} is {use.inputs} x {use.outputs}: it has {most} singular values, and rank {ranks[path]}"
            remedy = f"give it a rank up to {most} in adapter.rank_pattern, or set adapter.init: default"
            raise RecipeError(where("adapter.rank"), f"{problem} is asked for", remedy)
