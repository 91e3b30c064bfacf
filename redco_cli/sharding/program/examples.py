"""Where the examples of a batch are in a traced program: which of its arrays have them in their leading dim.

An array has when it is computed from the batch and its leading dim is the number of examples, or a multiple of it where
dims were merged; and when nothing took them elsewhere on their way, such as a transpose that puts time first. One that
is computed from positions alone has none, whatever its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from redco_cli.sharding.program.matrices import OF_LAST_DIMS, leading
from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.scans import scan_counts

Dim = int | None
"""Which dim of an array the examples are; None where that is not known."""
_WITHIN = -1
"""Examples are part of a dim, behind others."""
_SAME = frozenset(ELEMENTWISE.split()) | {
    "copy",
    "copy_p",
    "stop_gradient",
    "optimization_barrier",
    "name",
    "reduce_precision",
    "device_put",
}
_ALONG = frozenset({"slice", "dynamic_slice", "pad", "rev", "cumsum", "cumlogsumexp", "cummax", "cumprod", "split"})
"""Of as many dims; those that keep their size have the same entries in the same order."""


@dataclass(frozen=True)
class Examples:
    """What of a program is computed from its batch.

    Attributes:
        dims: by variable of the program and of the programs inside it, those computed from the batch: which of its dims
            the examples are.
        counts: the leading dims of the batch's own arrays.
        repeated: what is not computed from the batch, but of which each example goes on with one of its own, as with
            the weights that it adapts.
    """

    dims: Mapping[Any, Dim]
    counts: frozenset[int]
    repeated: frozenset[Any] = frozenset()

    def lead(self, variable: Any) -> bool:
        """Whether examples are the leading dim of an array, given by its variable in the program."""
        shape = variable.aval.shape
        may = bool(shape) and variable in self.dims and self.dims[variable] in (0, None)
        return may and any(shape[0] % count == 0 for count in self.counts)


def find_examples(closed: Any, is_of_batch: Sequence[bool]) -> Examples:
    """Follows the batch through a program.

    Args:
        closed: what `jax.make_jaxpr` returned.
        is_of_batch: for each of its inputs.
    """
    found = follow_dims(closed, [0 if yes else None for yes in is_of_batch])
    given = [variable.aval.shape for variable, mine in zip(closed.jaxpr.invars, is_of_batch, strict=True) if mine]
    counts = frozenset(shape[0] for shape in given if shape and shape[0])
    return Examples(found, counts, frozenset(_repeated(closed.jaxpr, found, counts)))


def _repeated(jaxpr: Any, dims: Mapping[Any, Dim], counts: Collection[int]) -> Iterator[Any]:
    """Variables of what is repeated for each example, and then meets what examples have, or becomes it in a loop."""
    for inner in itertools.chain.from_iterable(core.jaxprs_in_params(one.params) for one in jaxpr.eqns):
        yield from _repeated(inner, dims, counts)
    made = {one.outvars[0] for one in jaxpr.eqns if _repeats(one, counts)} - dims.keys()
    for equation in jaxpr.eqns if made else ():
        for x, becomes in _entry_by_entry(equation):
            if not isinstance(x, core.Literal) and x in made and dims.get(becomes, _WITHIN) == 0:
                yield x


def _repeats(equation: Any, counts: Collection[int]) -> bool:
    """Whether an equation repeats an array along a new dim in front, as often as there are examples."""
    if equation.primitive.name != "broadcast_in_dim":
        return False
    shape = equation.params["shape"]
    return bool(shape) and shape[0] in counts and 0 not in equation.params["broadcast_dimensions"]


def _entry_by_entry(equation: Any) -> Iterable[tuple[Any, Any]]:
    """Pairs of operands and results of an equation of which one has the places of the other."""
    if equation.primitive.name == "scan":
        first, carried = scan_counts(equation.params)
        return zip(equation.invars[first : first + carried], equation.outvars, strict=False)
    return [(x, equation.outvars[0]) for x in equation.invars if equation.primitive.name in _SAME]


def follow_dims(closed: Any, dims: Sequence[Dim]) -> Mapping[Any, Dim]:
    """Follows a dim of some of its inputs through a program.

    Args:
        closed: what `jax.make_jaxpr` returned.
        dims: which one, of each input; None for an input that is not followed.

    Returns:
        By variable of the program and of the programs inside it, those computed from these inputs: which of its dims
        that is; None where that is not known.
    """
    found: dict[Any, Dim] = {}
    _follow(closed.jaxpr, [None if dim is None else _Met(dim) for dim in dims], found)
    return found


@dataclass(frozen=True)
class _Met:
    """Something that is computed from the inputs that are followed, and in which dim what is followed is."""

    dim: Dim


_Given = _Met | None


def _join(one: _Given, other: _Given) -> _Given:
    """What is known of an array that is now this, now that."""
    if one is None or other is None:
        return one or other
    return one if one == other else _Met(None)


def _follow(jaxpr: Any, given: Sequence[_Given], found: dict[Any, Dim]) -> list[_Given]:
    """Adds what depends on the given inputs to `found`; which outputs do."""

    def met(atom: Any) -> _Given:
        return _Met(found[atom]) if not isinstance(atom, core.Literal) and atom in found else None

    def add(variables: Sequence[Any], values: Sequence[_Given]) -> None:
        for variable, value in zip(variables, values, strict=True):
            joined = _join(met(variable), value)
            if joined is not None:
                found[variable] = joined.dim

    add(jaxpr.invars, given)
    for equation in jaxpr.eqns:
        operands = [met(atom) for atom in equation.invars]
        if any(operand is not None for operand in operands):
            add(equation.outvars, _through(equation, operands, found))
    return [met(atom) for atom in jaxpr.outvars]


def _through(equation: Any, operands: list[_Given], found: dict[Any, Dim]) -> Sequence[_Given]:
    """What the results of an equation have of its operands; those of unknown control flow all depend on the batch."""
    inside, name = list(core.jaxprs_in_params(equation.params)), equation.primitive.name
    if name == "scan":
        return _through_scan(equation.params, inside[0], operands, found)
    if name == "cond":
        which, *given = operands
        branches = [_follow(jaxpr, given, found) for jaxpr in inside]
        joined = branches[0]
        for of_one in branches[1:]:
            joined = [_join(a, b) for a, b in zip(joined, of_one, strict=True)]
        return [value or (_Met(None) if which is not None else None) for value in joined]
    count = len(equation.outvars)
    if len(inside) == 1 and (len(inside[0].invars), len(inside[0].outvars)) == (len(operands), count):
        return _follow(inside[0], operands, found)
    for jaxpr in inside:
        _follow(jaxpr, [_Met(None)] * len(jaxpr.invars), found)
    return [_Met(None if inside else _dim(equation, operands, place)) for place in range(count)]


def _through_scan(params: Any, body: Any, operands: list[_Given], found: dict[Any, Dim]) -> Sequence[_Given]:
    first, carried = scan_counts(params)
    slices = [_moved(value, -1) for value in operands[first + carried :]]
    given = operands[: first + carried]
    while True:
        results = _follow(body, [*given, *slices], found)
        now = [_join(a, b) for a, b in zip(given[first:], results[:carried], strict=True)]
        if now == given[first:]:
            return [*now, *(_moved(value, 1) for value in results[carried:])]
        given = [*given[:first], *now]


def _moved(value: _Given, by: int) -> _Given:
    """With one dim more, or one less, in front."""
    if value is None or value.dim is None or value.dim == _WITHIN:
        return value
    return _Met(value.dim + by if value.dim + by >= 0 else None)


def _dim(equation: Any, operands: Sequence[_Given], place: int) -> Dim:
    """Which dim of one of its results the examples are."""
    name, params, shape = equation.primitive.name, equation.params, equation.outvars[place].aval.shape
    met = [(x.dim, atom.aval.shape) for x, atom in zip(operands, equation.invars, strict=True) if x is not None]
    known = {dim for dim, its in met if its}
    dim, its = known.pop() if len(known) == 1 else None, met[0][1]
    if name in _SAME or (name == "concatenate" and dim != params["dimension"]):
        return dim
    if name == "stack" and dim is not None:
        return dim if dim == _WITHIN else dim + (params["axis"] <= dim)
    if name == "dot_general":
        found = [_of_product(params["dimension_numbers"], side, x, equation) for side, x in enumerate(operands)]
        return min((one for one in found if one is not None), default=None)
    if name == "gather":
        return _of_rows(params["dimension_numbers"], operands, equation)
    if name == "transpose" and dim is None and params["permutation"][0] != 0:  # of what may lead, which then does not
        return tuple(map(int, params["permutation"])).index(0)
    if dim is None or len(met) > 1 or name == "concatenate":
        return None
    if name == "reshape":
        return _reshaped(dim, its, shape)
    if dim == _WITHIN:
        return _WITHIN if name in ("transpose", "broadcast_in_dim") or name in _ALONG else None
    if name == "transpose":
        return tuple(map(int, params["permutation"])).index(dim)
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][dim])
    if name in ("squeeze", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_and", "reduce_or"):
        gone = params["dimensions" if name == "squeeze" else "axes"]
        return None if dim in gone else dim - sum(one < dim for one in gone)
    if name in OF_LAST_DIMS:
        return dim if dim < leading(name, params, len(its)) else None
    return dim if name in _ALONG and shape[dim] == its[dim] else None


def _of_product(numbers: Any, side: int, value: _Given, equation: Any) -> Dim:
    """Which dim of a product's result those of one of its operands are."""
    contracted, batched = numbers
    if value is None or value.dim is None or value.dim in contracted[side]:
        return None
    if value.dim in batched[side]:
        return int(tuple(batched[side]).index(value.dim))
    free = [
        [dim for dim in range(atom.aval.ndim) if dim not in contracted[which] and dim not in batched[which]]
        for which, atom in enumerate(equation.invars)
    ]
    if value.dim == _WITHIN:
        return _WITHIN
    return len(batched[0]) + side * len(free[0]) + free[side].index(value.dim)


def _of_rows(numbers: Any, operands: Sequence[_Given], equation: Any) -> Dim:
    """Which dim of the rows that are looked up those of their ids are; none of what examples have themselves."""
    table, ids = operands[:2]
    rows = [dim for dim in range(equation.outvars[0].aval.ndim) if dim not in numbers.offset_dims]
    if table is not None or ids is None or ids.dim not in range(len(rows)):
        return None
    return None if ids.dim is None else rows[ids.dim]


def _reshaped(dim: int, old: Sequence[int], new: Sequence[int]) -> Dim:
    """Where a dim of one shape is in another: by itself, in front of others, or behind some."""
    if dim == _WITHIN or not math.prod(old):
        return None
    before = math.prod(old[:dim])
    for place in range(len(new)):
        ahead = math.prod(new[:place])
        if ahead == before and new[place] % old[dim] == 0 and new[place] > 1:
            return place
        if ahead <= before < ahead * new[place] and new[place] % (before // ahead * old[dim]) == 0:
            return _WITHIN
    return None
