"""Conditionals whose branches are rematerialised: nothing is kept of them but what they are given.

JAX makes two of a conditional that has a derivative. The first gives back whatever its branches keep for the second, of
one that is rematerialised what it was given: its weights, copied, and gathered before that where a compiler has them
whole already. Here the second is given what the first was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from redco_cli.sharding.program.rewrite import REMATERIALISED

Branch = Callable[..., list[Any]]


def is_rematerialised(equation: Any) -> bool:
    """Whether the branches of a conditional compute nothing but what the backward pass computes once more."""
    branches = [branch.jaxpr.eqns for branch in equation.params["branches"]]
    names = {one.primitive.name for eqns in branches for one in eqns if _uses_variables(one)}
    return bool(names) and names <= REMATERIALISED


def rematerialised_switch(which: Any, branches: Sequence[Branch], *given: Any) -> list[Any]:
    """As `jax.lax.switch`, whose backward pass computes the branch anew.

    Args:
        which: number of the branch.
        branches: functions of `given`, which close over no other array that has a gradient.
        given: trees of arrays.
    """
    leaves, tree = jax.tree.flatten(given)

    @jax.custom_vjp
    def run(which: Any, leaves: list[Any]) -> list[Any]:
        taken: list[Any] = jax.lax.switch(which, branches, *jax.tree.unflatten(tree, leaves))
        return taken

    def forward(which: Any, leaves: list[Any]) -> tuple[list[Any], Any]:
        moving, still = dict[int, Any](), dict[int, Any]()
        for number, leaf in enumerate(leaves):
            has_gradient = leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact)
            (moving if has_gradient else still)[number] = leaf.value
        return run(which.value, [leaf.value for leaf in leaves]), (which.value, moving, still)

    def backward(kept: Any, cotangents: list[Any]) -> tuple[None, list[Any]]:
        which, moving, still = kept
        cotangents = [jnp.zeros(one.shape, one.dtype) if isinstance(one, SymbolicZero) else one for one in cotangents]

        def pulled(branch: Branch) -> Callable[[dict[int, Any], list[Any]], dict[int, Any]]:
            def of_moving(moving: dict[int, Any]) -> list[Any]:
                every = still | moving
                return branch(*jax.tree.unflatten(tree, [every[number] for number in range(len(every))]))

            return lambda moving, cotangents: jax.vjp(of_moving, moving)[1](cotangents)[0]

        found = jax.lax.switch(which, [pulled(branch) for branch in branches], moving, cotangents)
        return None, [found.get(number) for number in range(len(moving) + len(still))]

    run.defvjp(forward, backward, symbolic_zeros=True)
    results: list[Any] = run(which, leaves)
    return results


def _uses_variables(equation: Any) -> bool:
    return any(not isinstance(atom, core.Literal) for atom in equation.invars)
