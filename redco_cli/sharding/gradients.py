"""Through which arrays of a program no gradient goes back.

    loss(online(x), stop_gradient(target(x)))        none to what the target network makes, nor to its weights

JAX differentiates none of it, so nothing of it is added up or moved in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from redco_cli.sharding.scans import scan_counts

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"})


def without_gradient(jaxpr: Any) -> frozenset[Any]:
    """Variables that no result depends on but through a `stop_gradient` or through integers and booleans.

    Those of programs within are among them where JAX differentiates what is written there: in calls, loops of known
    length and conditionals. What has a derivative of its own is taken to have one by all its operands.

    Args:
        jaxpr: an open one, of the function whose results are differentiated; where it has none, nothing is said.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from redco_cli.sharding.gradients import without_gradient
        >>> def loss(target, online):
        ...     return online * jax.lax.stop_gradient(jnp.exp(target))
        >>> jaxpr = jax.make_jaxpr(loss)(1.0, 2.0).jaxpr
        >>> [variable in without_gradient(jaxpr) for variable in jaxpr.invars]
        [True, False]
    """
    met, reached = set[Any](), set[Any]()
    _go_back(jaxpr, [True] * len(jaxpr.outvars), met, reached)
    return frozenset(met - reached if jaxpr.outvars else ())


def _go_back(jaxpr: Any, flows: Sequence[bool], met: set[Any], reached: set[Any]) -> list[bool]:
    """Goes from results, each with a gradient or not, to the operands: which of these have one.

    Args:
        jaxpr: an open one.
        flows: of its results.
        met: gets all variables.
        reached: gets those with a gradient.
    """
    met.update(jaxpr.invars, *(equation.outvars for equation in jaxpr.eqns))
    here = {atom for atom, flow in zip(jaxpr.outvars, flows, strict=True) if flow and _is_differentiated(atom)}
    for equation in reversed(jaxpr.eqns):
        wanted = [variable in here for variable in equation.outvars]
        if any(wanted) and equation.primitive.name != "stop_gradient":
            back = _operands(equation, wanted, met, reached)
            operands = zip(equation.invars, back, strict=True)
            here.update(atom for atom, flow in operands if flow and _is_differentiated(atom))
    reached |= here
    return [variable in here for variable in jaxpr.invars]


def _operands(equation: Any, wanted: list[bool], met: set[Any], reached: set[Any]) -> list[bool]:
    """Which operands of an equation have a gradient where these of its results do."""
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        (program,) = core.jaxprs_in_params(params)
        return _go_back(program, wanted, met, reached)
    if name == "cond":
        branches = [_go_back(branch.jaxpr, wanted, met, reached) for branch in params["branches"]]
        return [False, *(any(flows) for flows in zip(*branches, strict=True))]
    if name == "scan":
        consts, carried = scan_counts(params)
        carry, stacked = wanted[:carried], wanted[carried:]
        while True:
            back = _go_back(params["jaxpr"].jaxpr, carry + stacked, met, reached)
            before = [a or b for a, b in zip(carry, back[consts : consts + carried], strict=True)]
            if before == carry:
                return [*back[:consts], *carry, *back[consts + carried :]]
            carry = before
    return [True] * len(equation.invars)


def _is_differentiated(atom: Any) -> bool:
    return not isinstance(atom, core.Literal) and jnp.issubdtype(getattr(atom.aval, "dtype", int), jnp.inexact)
