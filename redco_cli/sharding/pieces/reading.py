"""Which weights a program takes apart, and the logical axes of their pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from redco_cli.sharding.axes import factors
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.pieces.arrays import pieces_of
from redco_cli.sharding.pieces.rules import of_pieces
from redco_cli.sharding.plan import Partition
from redco_cli.sharding.program.reading import Reading, Traced, read_traced

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
    found = ((i, one, _cut(one, reading)) for i, one in enumerate(reading.parameters))
    cuts = {i: cut for i, one, cut in found if cut is not None and may(one, cut)}
    key = read_in_pieces, tuple(cuts.items())
    if key not in reading.memo:
        reading.memo[key] = _read(reading, cuts)
    known: InPieces | None = reading.memo[key]
    return known


def _read(reading: Reading, cuts: Mapping[int, Partition]) -> InPieces | None:
    """The same of some cuts, without those of weights that are used whole somewhere, too."""
    while cuts:
        closed, uncut = of_pieces(reading.traced.closed, cuts)
        if not uncut:
            found = read_traced(reading.traced._replace(closed=closed, params=_apart(reading.traced, cuts)))
            return InPieces(found, {reading.parameters[i].path: cut for i, cut in cuts.items()})
        cuts = {i: cut for i, cut in cuts.items() if i not in uncut}
    return None


def _cut(parameter: Parameter, reading: Reading) -> Partition | None:
    """Where products of a weight are taken apart, or what it is multiplied with is joined."""
    matmuls = reading.matmuls.get(parameter.path, ())
    used = {factors(dim) for matmul in matmuls for dim in (*matmul.contracted, *matmul.produced)}
    for place, dim in enumerate(parameter.dims):
        if dim not in reading.cuts or dim not in used or any(axis.layer or axis.whole for axis in dim):
            continue
        if not reading.within_heads.issuperset(dim):
            ends = sorted(reading.cuts[dim] | {0, parameter.shape[place]})
            sizes = tuple(end - start for start, end in pairwise(ends))
            is_even = len(dim) > 1 and len(set(sizes)) == 1  # and is told apart by `decide.projections`
            if 1 < len(sizes) <= _MOST and not is_even:
                return Partition(place, sizes)
    return None


def _apart(traced: Traced, cuts: Mapping[int, Partition]) -> Any:
    """Shapes of the parameters, a tuple for each that is in pieces."""
    leaves, tree = jax.tree.flatten(traced.params)
    apart = [pieces_of(leaf, cuts[i]) if i in cuts else leaf for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, apart)
