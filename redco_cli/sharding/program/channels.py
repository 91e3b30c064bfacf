"""Which convolutions make channels that are taken apart, as an array and its gate are, and used for nothing else."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.program.rewrite import INLINED, variables_of

_OF_EACH = frozenset(ELEMENTWISE.split())


def cut_channels(jaxpr: Any) -> Iterator[Any]:
    """The results of such convolutions, variables of a program and of the programs inside it.

    Their channels pass through what is done to each entry alone, and end where they are cut into parts.

    Args:
        jaxpr: the program.
    """
    for inner in itertools.chain.from_iterable(core.jaxprs_in_params(one.params) for one in jaxpr.eqns):
        yield from cut_channels(inner)
    convolutions = [one for one in jaxpr.eqns if one.primitive.name == "conv_general_dilated"]
    if not convolutions:
        return
    path = _Path.of(jaxpr, dict.fromkeys(variables_of(jaxpr.outvars), ()))
    for equation in convolutions:
        (made,), numbers = equation.outvars, equation.params["dimension_numbers"]
        if equation.params["feature_group_count"] == 1 and path.ends_in_parts(made, numbers.out_spec[1]):
            yield made


@dataclass(frozen=True, eq=False)
class _Path:
    """What becomes of the variables of a program.

    Attributes:
        readers: the equations that read each.
        results: those that are its results: where these are read, in a program around it, and as what.
    """

    readers: Mapping[Any, Sequence[Any]]
    results: Mapping[Any, Sequence[tuple[_Path, Any]]]

    @classmethod
    def of(cls, jaxpr: Any, results: Mapping[Any, Sequence[tuple[_Path, Any]]]) -> _Path:
        """That of a program."""
        readers = defaultdict(list)
        for equation in jaxpr.eqns:
            for x in variables_of(equation.invars):
                readers[x].append(equation)
        return cls(readers, results)

    def ends_in_parts(self, x: Any, dim: int) -> bool:
        """Whether all that becomes of a dim of an array, entry by entry, is that it is cut into parts."""
        pending, seen = [(self, x)], set[tuple[_Path, Any]]()
        while pending:
            path, x = pending.pop()
            if (path, x) not in seen:
                seen.add((path, x))
                outside = path.results.get(x, ())
                becomes = [path._becomes(one, x, dim) for one in path.readers.get(x, ())]
                if None in becomes or not (becomes or outside) or (x in path.results and not outside):
                    return False
                pending += [*outside, *itertools.chain.from_iterable(filter(None, becomes))]
        return True

    def _becomes(self, equation: Any, x: Any, dim: int) -> Sequence[tuple[_Path, Any]] | None:
        """What an equation makes of an array, entry by entry: nothing where it cuts it, None if it does otherwise."""
        name, params, shape = equation.primitive.name, equation.params, x.aval.shape
        if name == "split":
            return [] if params["axis"] == dim else None
        if name == "slice":
            return [] if params["limit_indices"][dim] - params["start_indices"][dim] < shape[dim] else None
        inside = list(core.jaxprs_in_params(params))
        if name in INLINED and len(inside) == 1:  # it is entered where the program is rewritten
            (inner,), ends = inside, zip(inside[0].outvars, equation.outvars, strict=True)
            outside = {own: [(self, there)] for own, there in ends if not isinstance(own, core.Literal)}
            path, pairs = _Path.of(inner, outside), zip(equation.invars, inner.invars, strict=True)
            return [(path, own) for atom, own in pairs if atom is x]
        if name not in _OF_EACH or equation.outvars[0].aval.shape != shape:
            return None
        return [(self, result) for result in equation.outvars]
