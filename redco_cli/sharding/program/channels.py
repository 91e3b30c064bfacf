"""Which convolutions make channels that are taken apart, as an array and its gate are, and used for nothing else."""

from __future__ import annotations

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
    path = _Path.of(jaxpr, dict.fromkeys(variables_of(jaxpr.outvars), ()))
    for equation in jaxpr.eqns:
        for inner in core.jaxprs_in_params(equation.params):
            yield from cut_channels(inner)
        params = equation.params
        if equation.primitive.name == "conv_general_dilated" and params["feature_group_count"] == 1:
            (made,) = equation.outvars
            if path.ends_in_parts(made, params["dimension_numbers"].out_spec[1]):
                yield made


@dataclass(frozen=True)
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
        readers, outside = self.readers.get(x, ()), self.results.get(x, ())
        if (x in self.results and not outside) or not (readers or outside):
            return False
        return all(path.ends_in_parts(own, dim) for path, own in outside) and all(
            self._cuts(one, x, dim) for one in readers
        )

    def _cuts(self, equation: Any, x: Any, dim: int) -> bool:
        name, params, shape = equation.primitive.name, equation.params, x.aval.shape
        if name == "split":
            return bool(params["axis"] == dim)
        if name == "slice":
            return bool(params["limit_indices"][dim] - params["start_indices"][dim] < shape[dim])
        inside = list(core.jaxprs_in_params(params))
        if name in INLINED and len(inside) == 1:  # it is entered where the program is rewritten
            ends = zip(inside[0].outvars, equation.outvars, strict=True)
            path = _Path.of(inside[0], {own: [(self, there)] for own, there in ends if not _is_number(own)})
            pairs = zip(equation.invars, inside[0].invars, strict=True)
            return all(path.ends_in_parts(own, dim) for atom, own in pairs if atom is x)
        if name not in _OF_EACH or equation.outvars[0].aval.shape != shape:
            return False
        return all(self.ends_in_parts(result, dim) for result in equation.outvars)


def _is_number(atom: Any) -> bool:
    return isinstance(atom, core.Literal)
