"""How a program of pieces computes what it did of whole arrays: split(x @ w) as x @ w1, x @ w2, ..

Where an equation needs an array that is in pieces whole, they are joined in front of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.sharding.pieces.arrays import Pieces, Weight, each, having_params, pieces_of
from redco_cli.sharding.plan import Partition
from redco_cli.sharding.program.primitives import OF_EACH_ENTRY
from redco_cli.sharding.program.rewrite import bind, loop, rewritten
from redco_cli.sharding.scans import scan_counts

_REDUCED = ("reduce_sum", "reduce_max", "reduce_min")
_CONVOLUTION = "conv_general_dilated"
PRODUCTS = ("dot_general", _CONVOLUTION)


@dataclass(frozen=True)
class _InPieces:
    """The rewriting.

    Attributes:
        cuts: how weights are taken apart: what is joined in such pieces, or some of them, stays apart.
    """

    cuts: Collection[Partition]
    enters: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()
    everywhere: bool = False

    def is_tracked(self, operand: Any) -> bool:
        """Whether it is in pieces, or can be."""
        return isinstance(operand, Weight | Pieces)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation, in pieces where they can be."""
        name, found = equation.primitive.name, None
        if name == "scan" and any(map(self.is_tracked, operands)):
            # What every iteration uses is whole: its gradient is added up once for all of them.
            first = scan_counts(equation.params)[0]
            return loop(equation.params, [*map(_whole, operands[:first]), *operands[first:]], self)
        if name == "concatenate":
            found = self._joined(equation, [_whole(x) if isinstance(x, Weight) else x for x in operands])
        elif name in PRODUCTS:
            found = _product(equation, [x.pieces() if isinstance(x, Weight) else x for x in operands])
        elif any(isinstance(x, Pieces) for x in operands):
            found = _on_pieces(equation, [_whole(x) if isinstance(x, Weight) else x for x in operands])
        return bind(equation, list(map(_whole, operands))) if found is None else found

    def _joined(self, equation: Any, operands: Sequence[Any]) -> list[Pieces] | None:
        """What a program joins, in pieces where a weight is."""
        dim, arrays = equation.params["dimension"], list[Any]()
        for x in operands:
            arrays += x.arrays if isinstance(x, Pieces) and x.dim == dim else [_whole(x)]
        found = Pieces(tuple(arrays), dim)
        sizes = found.cut.sizes
        runs = (cut.sizes[i : i + len(sizes)] for cut in self.cuts for i in range(len(cut.sizes)))
        return [found] if sizes in runs else None


def in_pieces(closed: Any, cuts: Mapping[int, Partition]) -> Any:
    """A program that takes some of its arguments apart where it uses them.

    Args:
        closed: what `jax.make_jaxpr` returned.
        cuts: of its inputs, by their numbers.

    Returns:
        The same, as `jax.make_jaxpr` returns it, of the same arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from redco_cli.sharding.pieces.rules import in_pieces
        >>> from redco_cli.sharding.plan import Partition
        >>> def heads(w, x):
        ...     return jnp.split(x @ w, [4], axis=1)
        >>> closed = jax.make_jaxpr(heads)(jnp.ones((8, 5)), jnp.ones((2, 8)))
        >>> [one.primitive.name for one in in_pieces(closed, {0: Partition(1, (4, 1))}).eqns]
        ['split', 'dot_general', 'dot_general']
    """
    rewriting = _InPieces(cuts.values())

    def apart(*arguments: Any) -> list[Any]:
        weights = [Weight(x, cuts[i], i) if i in cuts else x for i, x in enumerate(arguments)]
        return rewritten(closed, weights, rewriting)

    return jax.make_jaxpr(apart)(*closed.in_avals)


def of_pieces(closed: Any, cuts: Mapping[int, Partition]) -> tuple[Any, frozenset[int]]:
    """The same of arguments that are in pieces.

    Returns:
        The program, of tuples of pieces in place of some of its arguments; and the numbers of those that it uses whole
        somewhere, too.
    """
    rewriting, uncut = _InPieces(cuts.values()), set[int]()

    def apart(*arguments: Any) -> list[Any]:
        weights = [Weight(x, cuts[i], i, uncut) if i in cuts else x for i, x in enumerate(arguments)]
        return rewritten(closed, weights, rewriting)

    arguments = [pieces_of(aval, cuts[i]) if i in cuts else aval for i, aval in enumerate(closed.in_avals)]
    return jax.make_jaxpr(apart)(*arguments), frozenset(uncut)


def _whole(x: Any) -> Any:
    return x.array() if isinstance(x, Weight | Pieces) else x


def _product(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    """A product of two that are summed over in the same pieces, or whose result is in the pieces of one of them."""
    summed, free = _dims_of_product(equation)
    first, second = operands
    if isinstance(first, Pieces) and isinstance(second, Pieces):
        if (first.dim, second.dim) not in summed or first.cut.sizes != second.cut.sizes:
            return None
        both = zip(first.arrays, second.arrays, strict=True)
        return [functools.reduce(operator.add, (bind(equation, pair)[0] for pair in both))]
    for place, x in enumerate(operands):
        if isinstance(x, Pieces) and x.dim in free[place]:
            pairs = [(one, second) if place == 0 else (first, one) for one in x.arrays]
            return [Pieces(tuple(bind(equation, pair)[0] for pair in pairs), free[place][x.dim])]
    return None


def _dims_of_product(equation: Any) -> tuple[set[tuple[int, int]], tuple[dict[int, int], dict[int, int]]]:
    """Pairs of dims of both operands that are summed over; and of each, to which dims of the result others lead."""
    params = equation.params
    if equation.primitive.name == _CONVOLUTION:
        numbers = params["dimension_numbers"]
        if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
            return set(), ({}, {})
        return {(numbers.lhs_spec[1], numbers.rhs_spec[1])}, ({}, {numbers.rhs_spec[0]: numbers.out_spec[1]})
    contracted, batch = params["dimension_numbers"]
    if params.get("out_sharding") is not None:
        return set(), ({}, {})
    free, place = list[dict[int, int]](), len(batch[0])
    for atom, *taken in zip(equation.invars, contracted, batch, strict=True):
        own = [dim for dim in range(atom.aval.ndim) if dim not in taken[0] and dim not in taken[1]]
        free.append({dim: place + i for i, dim in enumerate(own)})
        place += len(own)
    return set(zip(*contracted, strict=True)), (free[0], free[1])


def _on_pieces(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    """The results of an equation of arrays in pieces; None where it needs them joined."""
    name, params = equation.primitive.name, equation.params
    x = next(x for x in operands if isinstance(x, Pieces))
    if name in OF_EACH_ENTRY and len(equation.outvars) == 1:
        return _of_each(equation, operands, x.cut)
    if name == "split" and params["axis"] == x.dim and all(params["sizes"]):
        return _grouped(x, [int(size) for size in params["sizes"]])
    if name == "slice" and params["strides"] is None:
        ends = zip(params["start_indices"], params["limit_indices"], equation.invars[0].aval.shape, strict=True)
        cut = {dim: one for dim, one in enumerate(ends) if one[:2] != (0, one[2])}
        if set(cut) != {x.dim}:
            return None
        start, end, size = cut[x.dim]
        found = _grouped(x, [start, end - start, size - end]) if end > start else None
        return None if found is None else found[1:2]
    if name in _REDUCED and x.dim not in params["axes"] and params.get("out_sharding") is None:
        return [Pieces(each([equation] * len(x.arrays), x.arrays), x.dim - sum(i < x.dim for i in params["axes"]))]
    if name == "broadcast_in_dim" and params.get("sharding") is None:
        place, shape = params["broadcast_dimensions"][x.dim], params["shape"]
        sizes = ({**params, "shape": (*shape[:place], size, *shape[place + 1 :])} for size in x.cut.sizes)
        return [Pieces(each([having_params(equation, own) for own in sizes], x.arrays), place)]
    return None


def _of_each(equation: Any, operands: Sequence[Any], cut: Partition) -> list[Any] | None:
    """The result of an equation that treats all elements alike; None where its operands are in other pieces."""
    columns = []
    for x in operands:
        if isinstance(x, Pieces):
            if x.cut != cut:
                return None
            columns.append(x.arrays)
        elif jnp.ndim(x) and x.shape[cut.dim] > 1:
            columns.append(tuple(jax.lax.split(x, cut.sizes, cut.dim)))
        else:  # the same for all
            columns.append((x,) * len(cut.sizes))
    return [Pieces(tuple(bind(equation, row)[0] for row in zip(*columns, strict=True)), cut.dim)]


def _grouped(x: Pieces, sizes: Sequence[int]) -> list[Any] | None:
    """Contiguous parts of an array, each of some of its pieces, or None; None where one begins within a piece."""
    left, found = list(x.arrays), list[Any]()
    for size in sizes:
        own = list[Any]()
        while left and sum(one.shape[x.dim] for one in own) < size:
            own.append(left.pop(0))
        if sum(one.shape[x.dim] for one in own) != size:
            return None
        found.append(own[0] if len(own) == 1 else Pieces(tuple(own), x.dim) if own else None)
    return found
