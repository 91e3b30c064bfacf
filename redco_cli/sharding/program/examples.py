"""Where the examples of a batch are in a traced program: which of its arrays have them in their leading dim.

An array has when it is computed from the batch and its leading dim is the number of examples, or a multiple of it where
dims were merged. One that is computed from positions alone has none, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from redco_cli.sharding.scans import scan_counts


@dataclass(frozen=True)
class Examples:
    """What of a program is computed from its batch.

    Attributes:
        variables: of the program and of the programs inside it, computed from the batch.
        counts: the leading dims of the batch's own arrays.
    """

    variables: frozenset[Any]
    counts: frozenset[int]

    def lead(self, variable: Any) -> bool:
        """Whether examples are the leading dim of an array, given by its variable in the program."""
        shape = variable.aval.shape
        return bool(shape) and variable in self.variables and any(shape[0] % count == 0 for count in self.counts)


def find_examples(closed: Any, is_of_batch: Sequence[bool]) -> Examples:
    """Follows the batch through a program.

    Args:
        closed: what `jax.make_jaxpr` returned.
        is_of_batch: for each of its inputs.
    """
    found: set[Any] = set()
    _follow(closed.jaxpr, is_of_batch, found)
    given = [variable.aval.shape for variable, mine in zip(closed.jaxpr.invars, is_of_batch, strict=True) if mine]
    return Examples(frozenset(found), frozenset(shape[0] for shape in given if shape and shape[0]))


def _follow(jaxpr: Any, given: Sequence[bool], found: set[Any]) -> list[bool]:
    """Adds what depends on the given inputs to `found`; which outputs do."""

    def depends(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in found

    found.update(variable for variable, yes in zip(jaxpr.invars, given, strict=True) if yes)
    for equation in jaxpr.eqns:
        operands = [depends(atom) for atom in equation.invars]
        if any(operands):
            results = _through(equation, operands, found)
            found.update(variable for variable, yes in zip(equation.outvars, results, strict=True) if yes)
    return [depends(atom) for atom in jaxpr.outvars]


def _through(equation: Any, operands: list[bool], found: set[Any]) -> list[bool]:
    """Which results of an equation depend on its operands; those of unknown control flow all do."""
    inside = list(core.jaxprs_in_params(equation.params))
    if equation.primitive.name == "scan":
        first, carried = scan_counts(equation.params)
        while True:
            results = _follow(inside[0], operands, found)
            now = [a or b for a, b in zip(operands[first : first + carried], results[:carried], strict=True)]
            if now == operands[first : first + carried]:
                return results
            operands = [*operands[:first], *now, *operands[first + carried :]]
    count = len(equation.outvars)
    if equation.primitive.name == "cond":
        which, *given = operands
        branches = [_follow(jaxpr, given, found) for jaxpr in inside]
        return [which or any(of_one) for of_one in zip(*branches, strict=True)]
    if len(inside) == 1 and (len(inside[0].invars), len(inside[0].outvars)) == (len(operands), count):
        return _follow(inside[0], operands, found)
    for jaxpr in inside:
        _follow(jaxpr, [True] * len(jaxpr.invars), found)
    return [True] * count
