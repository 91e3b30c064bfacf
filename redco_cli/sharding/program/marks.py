"""What a program says of its own arrays, beyond what it computes with them."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from redco_cli.sharding.axes import factors
from redco_cli.sharding.program import primitives  # noqa: F401  which has a rule for all names, before the one here
from redco_cli.sharding.program.events import Value
from redco_cli.sharding.program.walk import Walk, call, rule, viewed

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


def summed_as(x: Any, y: Any) -> Any:
    """The same array `x`, marked: partial sums of it, and of its gradient, are moved as large as `y`.

    A program says so of what it sums over devices by itself: what it makes of `x` before is linear, and has the shape
    of `y` in the end. What it makes of several arrays with the same `y` is added up before, and moved once.

    >>> import jax.numpy as jnp
    >>> from redco_cli.sharding.program.reading import read
    >>> params = {"a": jnp.zeros((8, 16)), "b": jnp.zeros((16, 8))}
    >>> def loss(params, batch):
    ...     rows = summed_as(batch["x"][batch["at"]], batch["x"])
    ...     return summed_as(jnp.tanh(rows @ params["a"]) @ params["b"], batch["x"]).sum()
    >>> batch = {"x": jnp.zeros((4, 8)), "at": jnp.zeros(32, int)}
    >>> [[axis.size for dim in one.moved for axis in dim] for one in read(loss, params, batch).collectives][0]
    [4, 8]
    """
    marked: Any = jax.jit(_summed_as)(x, y)
    return marked


def _summed_as(x: Any, y: Any) -> Any:
    return x


SUMMED_AS = _summed_as.__name__


def gradient_first(weight: Any, x: Any) -> tuple[Any, Any]:
    """The same arrays, marked: the gradient of `weight` is added up over devices before that of `x` is used.

    A weight at the end of a program, such as a head, has its gradient first. On TPUs XLA may add it up at the very end,
    with all of it on every device while the backward pass goes through the layers.
    """
    marked: tuple[Any, Any] = jax.jit(_gradient_first)(weight, x)
    return marked


def _gradient_first(weight: Any, x: Any) -> tuple[Any, Any]:
    return weight, x


GRADIENT_FIRST = _gradient_first.__name__
"""Name of the call that is made of a mark."""


def usual_branch(equation: Any) -> int | None:
    """The branch that an equation marks as the usual one; None for any other equation."""
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    return int(name.removeprefix(_USUALLY)) if name and name.startswith(_USUALLY) else None


@rule("jit", "pjit")
def _jit(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    if equation.params["name"] == SUMMED_AS:
        summed, like = operands
        walk.moved_as.append((summed.dims, like))
    return call(walk, equation, operands)


@rule("name")
def _name(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (operand,) = operands
    name = equation.params["name"]
    if name.startswith(_WHOLE):
        for axis in factors(operand.dims[int(name.removeprefix(_WHOLE))]):
            axis.whole = True
    return [viewed(operand, operand.dims)]
