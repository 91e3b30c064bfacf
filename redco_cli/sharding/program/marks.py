"""What a program says of its own arrays, beyond what it computes with them."""

from __future__ import annotations

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from redco_cli.sharding.axes import factors
from redco_cli.sharding.program import primitives  # noqa: F401  which has a rule for all names, before the one here
from redco_cli.sharding.program.events import Value
from redco_cli.sharding.program.walk import Walk, rule, viewed

_WHOLE = "redco: whole dim "
_USUALLY = "redco: usually "


def keep_whole(x: Any, dim: int) -> Any:
    """The same array, with one dim marked as one that is never split: a rank, of which a part says nothing.

    A product over a split dim whose result has such a dim is taken for one that is not moved: the program keeps its
    partial sums until what follows has been multiplied, and moves the gradient of that factor instead
    (`adapters.products`).

    >>> import jax, jax.numpy as jnp
    >>> from redco_cli.sharding.program.reading import read
    >>> a, b = jnp.zeros((8, 4)), jnp.zeros((4, 8))
    >>> loss = lambda params, batch: (batch["x"] @ keep_whole(params["a"], 1) @ params["b"]).sum()
    >>> [[axis.whole for axis in dim] for dim in read(loss, {"a": a, "b": b}, {"x": a.T}).parameters[0].dims]
    [[False], [True]]
    """
    return checkpoint_name(x, f"{_WHOLE}{dim % x.ndim}")


def usually(index: Any, branch: int) -> Any:
    """The same index of a branch, marked with what it is in the usual case.

    What a conditional on it costs is what that branch costs, wherever that is asked.

    >>> import jax, jax.numpy as jnp
    >>> from redco_cli.sharding.program.branches import branch_shares
    >>> def clipped(x):
    ...     return jax.lax.cond(usually(x.max() > 1e3, 0), lambda x: x / x.max(), lambda x: x, x)
    >>> list(branch_shares(jax.make_jaxpr(clipped)(jnp.zeros(4))).values())
    [(1.0, 0.0)]
    """
    return checkpoint_name(index, f"{_USUALLY}{branch}")


def usual_branch(equation: Any) -> int | None:
    """The branch that an equation marks as the usual one; None for any other equation."""
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    return int(name.removeprefix(_USUALLY)) if name and name.startswith(_USUALLY) else None


@rule("name")
def _name(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (operand,) = operands
    name = equation.params["name"]
    if name.startswith(_WHOLE):
        for axis in factors(operand.dims[int(name.removeprefix(_WHOLE))]):
            axis.whole = True
    return [viewed(operand, operand.dims)]
