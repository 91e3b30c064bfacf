"""What the backward pass computes once more of a program that is rematerialised.

    x + dense(relu(dense(x)))        with a layer's input x saved

Of it, relu's input and output are computed again, as gradients need them; the last product is not, as a sum does not
need what it adds. What devices had to move to have a value, they move again for one that is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "remat2", "checkpoint"
})  # fmt: skip
_CONTROL_FLOW = frozenset({"scan", "while", "cond"})
_LINEAR = frozenset({
    "add", "add_any", "sub", "neg", "reshape", "transpose", "convert_element_type", "broadcast_in_dim", "reduce_sum",
    "squeeze", "expand_dims", "concatenate", "slice", "pad", "rev", "cumsum", "copy", "copy_p", "name",
    "sharding_constraint", "reduce_precision",
})  # fmt: skip
"""Primitives whose gradient needs none of their operands."""
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
"""Primitives in which the gradient of one operand needs the other alone."""
_BARRIER = "optimization_barrier"
_BY_OTHERS = {"select_n": slice(0, 1), "dynamic_slice": slice(1, None), "gather": slice(1, None)}
"""Primitives whose gradient needs some of their operands, none of which has a gradient itself."""
_RECOMPUTE = "RecomputeType"
"""What policies say besides False for what is not saved; JAX has no public name for it."""

Policy = Callable[..., Any]


def computed_again(jaxpr: Any, policy: Policy | None) -> frozenset[Any]:
    """The variables of a rematerialised program that its backward pass computes once more, of calls in it too.

    Control flow is computed again as a whole.

    Args:
        jaxpr: of `jax.checkpoint`, an open one.
        policy: its own; None saves nothing but the inputs.
    """
    return frozenset(_again(jaxpr, policy, set(), set())[0])


def _again(jaxpr: Any, policy: Policy | None, needed: set[Any], still: set[Any]) -> tuple[set[Any], set[Any]]:
    """What is computed again for gradients and for some results that are `needed`; and all that this needs.

    What is `still` has no gradient; nor has what is made of whole numbers.
    """
    found: set[Any] = set()
    needed, still = set(needed), _without_gradient(jaxpr, still)
    for equation in reversed(jaxpr.eqns):
        results = needed.intersection(equation.outvars)
        name, operands = equation.primitive.name, equation.invars
        if name in _CALLS:
            (inner,) = core.jaxprs_in_params(equation.params)
            wanted = {own for own, out in zip(inner.outvars, equation.outvars, strict=True) if out in results}
            given = {own for own, atom in zip(inner.invars, operands, strict=True) if _is_still(atom, still)}
            again, inside = _again(inner, policy, wanted, given)
            found |= again
            operands = [atom for own, atom in zip(inner.invars, operands, strict=True) if own in inside]
        elif name in _CONTROL_FLOW:
            for program in core.jaxprs_in_params(equation.params):
                found |= _again(program, policy, set(program.outvars), set())[0]
        elif name == _BARRIER and not _is_saved(equation, policy):
            found |= results
            operands = [atom for out, atom in zip(equation.outvars, operands, strict=True) if out in results]
        elif results and not _is_saved(equation, policy):
            found |= results
        else:
            operands = _residuals(equation, still)
        needed |= {atom for atom in operands if not isinstance(atom, core.Literal)}
    return found, needed


def _is_saved(equation: Any, policy: Policy | None) -> bool:
    operands = (atom.aval for atom in equation.invars)
    told = policy is not None and policy(equation.primitive, *operands, **equation.params)
    return bool(told) and type(told).__name__ != _RECOMPUTE


def _without_gradient(jaxpr: Any, still: set[Any]) -> set[Any]:
    found = set(still)
    for equation in jaxpr.eqns:
        if equation.primitive.name not in _CONTROL_FLOW and all(_is_still(atom, found) for atom in equation.invars):
            found.update(equation.outvars)
    return found


def _is_still(atom: Any, still: set[Any]) -> bool:
    return isinstance(atom, core.Literal) or atom in still or not jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _residuals(equation: Any, still: set[Any]) -> Collection[Any]:
    """The operands that the gradient of an equation needs."""
    name: str = equation.primitive.name
    operands: Sequence[Any] = equation.invars
    if all(_is_still(result, still) for result in equation.outvars):
        return ()
    if name in _PRODUCTS:
        return [one for one, other in (operands, operands[::-1]) if not _is_still(other, still)]
    if name in _LINEAR or (name == "div" and isinstance(operands[-1], core.Literal)):
        return ()
    return operands[_BY_OTHERS[name]] if name in _BY_OTHERS else operands
