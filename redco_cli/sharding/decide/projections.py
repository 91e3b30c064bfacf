"""Several projections one after the other in one dim of a weight: queries, keys and values, a gate and what it gates.

A chosen axis is behind a factor there, [K·N] with N over `tensor`. In contiguous blocks of all K·N, what they make has
to be moved where the program takes it apart. Where the weights are fewer bytes, these are: see `gather.fused`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from redco_cli.sharding.axes import Axis
from redco_cli.sharding.decide.choose import Candidate, Costs
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, DimShardings
from redco_cli.sharding.program.reading import Reading

APART, BLOCKS = "each split, exchanged where it is used", "contiguous blocks, moved where cut"
"""How `tensor` splits several projections, as reasons say it."""
_EXCHANGES = 4
"""How often a weight is exchanged over `tensor`: on its way to where it is used, and back, twice each."""


@dataclass(frozen=True)
class Projections:
    """Those of one parameter.

    Attributes:
        place: their dim.
        leading: the axes in front of the chosen one.
        axis: the chosen one.
    """

    place: int
    leading: tuple[Axis, ...]
    axis: Axis

    @property
    def count(self) -> int:
        """How many they are."""
        return math.prod(axis.size for axis in self.leading)


def projections(parameter: Parameter, taken: Collection[Axis], tensor: int) -> Projections | None:
    """The projections of a parameter, if it has several in one dim.

    Args:
        parameter: any.
        taken: axes that are split.
        tensor: size of the mesh axis.
    """
    for place, dim in enumerate(parameter.dims):
        behind = [i for i, axis in enumerate(dim) if axis in taken]
        divides = parameter.shape[place] % tensor == 0
        if behind and behind[0] > 0 and divides and not any(axis.layer or axis.whole for axis in dim):
            return Projections(place, tuple(dim[: behind[0]]), dim[behind[0]])
    return None


def told_apart(reading: Reading, chosen: Sequence[Candidate], sizes: Mapping[str, int]) -> frozenset[tuple[Axis, ...]]:
    """The leading axes of those projections whose weights are moved, and not what they make.

    Args:
        reading: the program.
        chosen: the axes to split over `tensor`.
        sizes: of the mesh axes.
    """
    taken, tensor = {axis for one in chosen for axis in one.chain}, sizes[TENSOR]
    weights: dict[tuple[Axis, ...], list[tuple[Parameter, Projections]]] = defaultdict(list)
    for parameter in reading.parameters:
        found = projections(parameter, taken, tensor)
        if found is not None:
            weights[found.leading].append((parameter, found))
    costs = Costs(reading.collectives, reading.split_batch(sizes[DATA] * sizes[FSDP]))

    def are_fewer(leading: tuple[Axis, ...]) -> bool:
        moved = costs.collectives(leading)
        made = sum(costs.bytes(one, {}) * (2 if one.kind == "all-reduce" else 1) for one in moved)
        own = [parameter for parameter, _ in weights[leading]]
        times = [_EXCHANGES + _EXCHANGES // 2 * reading.is_recomputed(parameter) for parameter in own]
        held = sum(n * reading.bytes_where_used(one) for n, one in zip(times, own, strict=True)) // sizes[FSDP]
        return held < made

    def divide(leading: tuple[Axis, ...]) -> bool:
        return all(parameter.shape[p.place] // p.count % tensor == 0 for parameter, p in weights[leading])

    return frozenset(leading for leading in weights if divide(leading) and are_fewer(leading))


def exchange(
    parameter: Parameter, stored: DimShardings, used: DimShardings, sizes: Mapping[str, int]
) -> tuple[DimShardings, DimShardings] | None:
    """Where one layer of a parameter is while its projections are told apart, and afterwards; see `exchanged`.

    Args:
        parameter: with projections in the dim that `tensor` splits.
        stored: where it lives.
        used: where it is used.
        sizes: of the mesh axes.
    """
    place = next(place for place, axes in enumerate(used) if TENSOR in axes)
    of_one = [1 if layer else size for size, layer in zip(parameter.shape, parameter.layers(), strict=True)]
    return exchanged(stored, place, of_one, sizes)


def exchanged(
    lives: DimShardings, dim: int, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[DimShardings, DimShardings] | None:
    """Where a weight is while its projections are told apart, and afterwards: another dim is split for this one.

    Args:
        lives: where it lives.
        dim: of its projections, which `tensor` splits.
        shape: its own.
        sizes: of the mesh axes.

    Returns:
        Both before it has one dim more; None where no other dim divides. One that `tensor` splits along another dim
        where it lives, as a piece of a weight, is told apart there.

    Example:
        >>> exchanged((("fsdp",), ("tensor",)), 1, (64, 192), {"fsdp": 2, "tensor": 4})
        ((('fsdp', 'tensor'), ()), (('fsdp',), ('tensor',)))
        >>> exchanged((("tensor", "fsdp"), ()), 0, (192, 64), {"fsdp": 2, "tensor": 4})
        (((), ('fsdp', 'tensor')), (('tensor',), ('fsdp',)))
    """
    if any(TENSOR in axes for place, axes in enumerate(lives) if place != dim):
        without = [tuple(axis for axis in axes if axis != TENSOR) for axes in lives]
        return tuple(lives), tuple((*axes, TENSOR) if place == dim else axes for place, axes in enumerate(without))
    others = tuple(axis for axis in lives[dim] if axis != TENSOR)
    for place in reversed(range(len(shape))):
        own = (*lives[place], *others)
        if place != dim and shape[place] % math.prod(sizes[axis] for axis in (*own, TENSOR)) == 0:
            between, there = (
                tuple(axes if i == place else own_dim if i == dim else was for i, was in enumerate(lives))
                for axes, own_dim in (((*own, TENSOR), ()), (own, (TENSOR,)))
            )
            return between, there
    return None
