"""Weights that are taken apart where they are used: in shards of another dim, so that their pieces are shards, too.

    lives       [D/(F·T), N1 + N2]
    pieces      [D/(F·T), N1], ..       nothing moves
    exchanged   [D/F, N1/T], ..         an all-to-all over `tensor`

From there each is gathered and used as any other weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from redco_cli.sharding.axes import factors
from redco_cli.sharding.decide.choose import OPERATIONS_PER_BYTE
from redco_cli.sharding.decide.layout import SMALL
from redco_cli.sharding.decide.placed import Layout
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.pieces.reading import InPieces
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, DimShardings, Partition
from redco_cli.sharding.program.reading import Reading


def in_shards(
    reading: Reading, apart: InPieces, layouts: Sequence[Layout], sizes: Mapping[str, int]
) -> tuple[list[Layout], list[Layout]]:
    """Layouts of pieces, and of the weights that they are of.

    Args:
        reading: the program.
        apart: the same of pieces.
        layouts: of its parameters, each for itself.
        sizes: of the mesh axes.

    Returns:
        Layouts of the parameters of `apart`, where they live as the weights do, and of those of `reading`.
    """
    given, pieces, whole = iter(layouts), list[Layout](), list[Layout]()
    for parameter in reading.parameters:
        cut = apart.cuts.get(parameter.path)
        if cut is None:
            pieces.append(next(given))
            whole.append(pieces[-1])
        else:
            lives = shards(parameter, cut, sizes)
            assert lives is not None
            own = tuple(next(given) for _ in cut.sizes)
            split = {dim for piece in own for dim, axes in enumerate(piece.gathered) if TENSOR in axes}
            if all(lives[dim] for dim in split):  # as blocks along the dim that they live along: nothing is exchanged
                lives = tuple(axes[::-1] for axes in lives)
            own = tuple(replace(piece, stored=lives) for piece in own)
            whole.append(_of_pieces(parameter, cut, own, split, sizes))
            pieces += own
    return pieces, whole


def shards(parameter: Parameter, cut: Partition, sizes: Mapping[str, int]) -> DimShardings | None:
    """Where a weight lives so that its pieces are shards, too: split along another dim; a small one if that divides.

    Args:
        parameter: the weight.
        cut: where it is taken apart.
        sizes: of the mesh axes.

    Returns:
        The mesh axes of its dims; None where no other dim divides.
    """
    bound, ways = parameter.indivisible(), [axis for axis in (FSDP, TENSOR) if sizes[axis] > 1]
    for axes in (ways, ways[:-1], []) if parameter.bytes < SMALL else (ways,):
        among = math.prod(sizes[axis] for axis in axes)
        for place, size in enumerate(parameter.shape):
            if place != cut.dim and not bound[place] and size % among == 0:
                return tuple(tuple(axes) if i == place else () for i in range(len(parameter.shape)))
    return None


def computed(reading: Reading, layouts: Sequence[Layout], sizes: Mapping[str, int]) -> int:
    """What a device computes of products with weights, as the bytes that it could move meanwhile.

    Args:
        reading: a program.
        layouts: of its parameters.
        sizes: of the mesh axes.
    """
    batch, operations = reading.split_batch(sizes[DATA] * sizes[FSDP]), 0
    for parameter, layout in zip(reading.parameters, layouts, strict=True):
        ways = sizes[TENSOR] if any(TENSOR in dim for dim in layout.gathered) else 1
        for one in reading.matmuls.get(parameter.path, ()):
            axes = (axis for dim in (*one.result, *one.contracted) for axis in factors(dim))
            operations += 6 * one.times * math.prod(-(-axis.size // batch.get(axis, 1)) for axis in axes) // ways
    return operations // OPERATIONS_PER_BYTE


def _of_pieces(
    parameter: Parameter, cut: Partition, pieces: tuple[Layout, ...], split: Collection[int], sizes: Mapping[str, int]
) -> Layout:
    """A weight of pieces, some of whose dims are split; used whole all the same, it is split along the first."""
    first = next((dim for dim in sorted(split) if parameter.shape[dim] % sizes[TENSOR] == 0), None)
    used: DimShardings = tuple((TENSOR,) if i == first else () for i in range(len(parameter.shape)))
    each = "; ".join(f"{size}: {piece.reason}" for size, piece in zip(cut.sizes, pieces, strict=True))
    return Layout(pieces[0].stored, used, f"in pieces, used apart: {each}", cut=cut, pieces=pieces)
