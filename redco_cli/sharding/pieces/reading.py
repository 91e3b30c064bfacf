"""Which weights a program takes apart, and the logical axes of their pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.sharding.axes import Dim, factors
from redco_cli.sharding.ownership import owners
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.pieces.arrays import pieces_of
from redco_cli.sharding.pieces.rules import of_pieces
from redco_cli.sharding.plan import Partition
from redco_cli.sharding.program.reading import Reading, read_traced

_MOST = 8
"""Pieces of a weight: of more, each product is small beside what it takes to begin it."""


@dataclass(frozen=True)
class InPieces:
    """A program of pieces.

    Attributes:
        reading: of parameters that are tuples of their pieces, where they have any.
        cuts: paths of these parameters to where they are taken apart.
    """

    reading: Reading
    cuts: Mapping[str, Partition]


def read_in_pieces(reading: Reading, may: Callable[[Parameter, Partition], bool]) -> InPieces | None:
    """What a program is of pieces of its weights; None where it takes none of them apart.

    Args:
        reading: of the program.
        may: whether a weight may be taken apart so.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from redco_cli.sharding.pieces.reading import read_in_pieces
        >>> from redco_cli.sharding.program.reading import read
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((jnp.concatenate([jnp.tanh(batch["x"]), batch["x"]], 1) @ params["w"]) ** 2)
        >>> found = read_in_pieces(read(loss_fn, {"w": jnp.ones((16, 4))}, {"x": jnp.ones((32, 8))}), lambda *_: True)
        >>> found.cuts, [parameter.path for parameter in found.reading.parameters]
        ({'w': Partition(dim=0, sizes=(8, 8))}, ['w/0', 'w/1'])
    """
    cuts = {i: cut for i, cut in _cuts(reading).items() if may(reading.parameters[i], cut)}
    key = read_in_pieces, tuple(cuts.items())
    if key not in reading.memo:
        reading.memo[key] = _read(reading, cuts)
    known: InPieces | None = reading.memo[key]
    return known


def _read(reading: Reading, cuts: Mapping[int, Partition]) -> InPieces | None:
    """The same of some cuts, without those of weights that are used whole somewhere, too."""
    traced, paths = reading.traced, [parameter.path for parameter in reading.parameters]
    first, alike = len(jax.tree.leaves((traced.params, traced.batch))), _copies(reading)
    every = dict(cuts) | {first + i: cuts[own] for i, own in alike.items() if own in cuts}
    while any(i < len(paths) for i in every):
        closed, uncut = of_pieces(traced.closed, every)
        if not uncut:
            params, others = _apart(traced.params, every, 0), _apart(traced.others, every, first)
            found = read_traced(traced._replace(closed=closed, params=params, others=others))
            return InPieces(found, {path: every[i] for i, path in enumerate(paths) if i in every})
        every = {i: cut for i, cut in every.items() if uncut.isdisjoint((i, alike.get(i - first, i)))}
    return None


def _copies(reading: Reading) -> dict[int, int]:
    """Arrays that are another copy of a parameter, such as a teacher's, and are used as it is; see `used_alike`."""
    others = jax.tree.leaves(reading.traced.others)
    pairs = enumerate(zip(others, owners(reading.traced.others, reading.traced.params), strict=True))
    return {
        i: own.parameter
        for i, (leaf, own) in pairs
        if own is not None and reading.parameters[own.parameter].shape == tuple(leaf.shape)
    }


def _cuts(reading: Reading) -> dict[int, Partition]:
    """Of weights that make what is taken apart or multiply what is joined, and of those that share such a dim."""
    made, summed = (
        {
            path: {factors(dim) for matmul in matmuls for dim in getattr(matmul, dims)}
            for path, matmuls in reading.matmuls.items()
        }
        for dims in ("produced", "contracted")
    )

    def cut(parameter: Parameter, dims: Callable[[str], set[Dim]]) -> Partition | None:
        is_float = jnp.issubdtype(parameter.dtype, jnp.floating)
        own = dims(parameter.path) if parameter.path in reading.matmuls and is_float else ()
        places = (place for place, dim in enumerate(parameter.dims) if dim in own)
        return next(filter(None, (_pieces(parameter, place, reading) for place in places)), None)

    found = {
        i: first
        for i, one in enumerate(reading.parameters)
        if (first := cut(one, lambda path: made[path] & set(reading.cuts) | summed[path] & set(reading.joined)))
    }
    taken = {reading.parameters[i].dims[one.dim] for i, one in found.items()}
    others = (i for i in range(len(reading.parameters)) if i not in found)
    along = {i: cut(reading.parameters[i], lambda path: (made[path] | summed[path]) & taken) for i in others}
    return found | {i: one for i, one in along.items() if one is not None}


def _pieces(parameter: Parameter, place: int, reading: Reading) -> Partition | None:
    dim = parameter.dims[place]
    if any(axis.layer or axis.whole for axis in dim) or reading.within_heads.issuperset(dim):
        return None
    ends = {0, parameter.shape[place], *reading.cuts.get(dim, ()), *reading.joined.get(dim, ())}
    sizes = tuple(end - start for start, end in pairwise(sorted(ends)))
    each = parameter.shape[place] // dim[0].size
    are_several = len(dim) > 1 and dim[0].size <= _MOST and all(size % each == 0 for size in sizes)
    # Several of one size, such as queries and keys beside values, are told apart by `decide.projections`.
    return Partition(place, sizes) if 1 < len(sizes) <= _MOST and not are_several else None


def _apart(tree: Any, cuts: Mapping[int, Partition], first: int) -> Any:
    """Shapes of arrays, of which `first` is the number of the first, a tuple for each that is in pieces."""
    leaves, structure = jax.tree.flatten(tree)
    apart = [pieces_of(leaf, cuts[i]) if i in cuts else leaf for i, leaf in enumerate(leaves, first)]
    return jax.tree.unflatten(structure, apart)
