"""What a program would have to move if an axis of it were split."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from redco_cli.sharding.axes import Axis, Dim, factors, fresh, size

LOOKED_UP, NEIGHBOURS = "rows looked up", "examples whose rows others take"
COMPARED = "arrays that meet themselves or others like them"
GRADIENT = "gradient of"
"""How what is moved is called: rows of a table that is split by rows, examples that are split, what is split in a pair
of arrays that meet in all combinations, and, in front, what the backward pass moves."""


class Value(NamedTuple):
    """What the walk knows of an array.

    Attributes:
        dims: one for each dim.
        requires_grad: a gradient flows through it.
        from_batch: it depends on the batch: an activation. Without, it is a weight or a constant.
        path: path of the one parameter that it was made of, seen in another way perhaps; else empty.
        origin: the same, also where no gradient goes back to the parameter.
        origins: of a weight that is made of several, the paths of all of them.
    """

    dims: tuple[Dim, ...]
    requires_grad: bool
    from_batch: bool
    path: str = ""
    origin: str = ""
    origins: frozenset[str] = frozenset()

    @property
    def sources(self) -> frozenset[str]:
        """Paths of the parameters that a weight is made of."""
        return self.origins or frozenset({self.origin} - {""})


@dataclass(frozen=True)
class PossibleCollective:
    """A collective that an operation needs where one of some dims is split.

    Attributes:
        kind: `all-reduce`, `all-gather` or `reduce-scatter`.
        if_split: the dims.
        moved: dims of the array that is moved.
        itemsize: bytes of an element.
        count: how often in a step.
        what: what is moved, in a few words.
        of: the array whose gradient, or whose partial sums, it is: compilers add up all of them before they move any.
    """

    kind: str
    if_split: tuple[Dim, ...]
    moved: tuple[Dim, ...]
    itemsize: int
    count: int
    what: str
    of: Value | None = None


class ActivationProduct(NamedTuple):
    """A product of two activations, such as queries with keys.

    Attributes:
        contracted: dims summed over.
        batch: dims that both have and the result keeps.
        free: dims of the first alone, and of the second alone.
    """

    contracted: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    free: tuple[tuple[Dim, ...], tuple[Dim, ...]]


class Matmul(NamedTuple):
    """A product of an activation with a weight.

    Attributes:
        path: path of the weight, if it is one parameter.
        weight: dims of the weight.
        contracted: dims that are summed over.
        produced: dims of the result that the weight brings.
        activation: dims of the activation.
        result: dims of the result.
        times: how often in a forward pass.
    """

    path: str
    weight: tuple[Dim, ...]
    contracted: tuple[Dim, ...]
    produced: tuple[Dim, ...]
    activation: tuple[Dim, ...]
    result: tuple[Dim, ...]
    times: int = 1


class Use(NamedTuple):
    """A parameter in a product, whole, whether or not a gradient goes back to it from there.

    Attributes:
        path: of the parameter.
        itemsize: bytes of an element, as it is multiplied.
        recomputed: inside what the backward pass computes once more, from parameters that are gathered once more.
    """

    path: str
    itemsize: int
    recomputed: bool


class RowLookup(NamedTuple):
    """Rows of a parameter that are looked up for examples.

    Attributes:
        path: of the parameter.
        features: its dims that are taken whole.
        rows: how many are looked up.
        itemsize: bytes of an element, as they are used.
    """

    path: str
    features: tuple[Dim, ...]
    rows: int
    itemsize: int


def itemsize(aval: Any) -> int:
    """Bytes of an element; keys and other opaque elements count as four."""
    return int(getattr(aval.dtype, "itemsize", 4))


def bytes_moved(collective: PossibleCollective, ways: Mapping[Axis, int]) -> int:
    """Result bytes on one device, each time.

    Args:
        collective: what is moved.
        ways: into how many parts an axis is split on the way.
    """
    elements = math.prod(-(-axis.size // ways.get(axis, 1)) for dim in collective.moved for axis in factors(dim))
    return elements * collective.itemsize


def as_moved(
    collectives: Iterable[PossibleCollective],
    moved_as: Iterable[tuple[tuple[Dim, ...], Value]],
    partial: Mapping[int, tuple[Value, Value]],
    multiplied: Mapping[int, tuple[Value, Value]],
    examples: frozenset[Axis],
) -> Iterator[PossibleCollective]:
    """What may have to move, in the form in which it is.

    Where the program says as what, that: of one array, which no product makes, for the same. A weight that has an axis
    on both ends, as of a recurrent network, is split by columns: what it multiplies is put together, once more for its
    own gradient, and the gradient of that is scattered.

    Args:
        collectives: as the walk found them.
        moved_as: dims of arrays whose sums are moved as another array is, and that one.
        partial: by their `id`, what products over split dims make, and the one that each is added up with.
        multiplied: by their `id`, what products with weights make, and what these multiply.
        examples: axes of the batch, whose arrays have one each.
    """
    sums = {id(like): like._replace(dims=like.dims) for _, like in moved_as}
    instead = {_axes(summed): sums[id(like)] for summed, like in moved_as}
    inputs, compared = {id(x): x for _, x in multiplied.values()}, dict[int, Value]()
    together = {key: (x._replace(dims=x.dims), x._replace(dims=x.dims)) for key, x in inputs.items()}
    for one in collectives:
        goes_back, of = one.what.startswith(GRADIENT), one.of
        both = _axes(one.if_split) & _axes(one.moved)
        if COMPARED in one.what:
            met = _axes(one.if_split) & (both | examples)
            both |= _axes(one.moved) & examples if met & examples else frozenset()
            if both:
                moved = one.moved if goes_back else _whole(one.moved, both)
                own = compared.setdefault(id(of), Value(one.moved, requires_grad=False, from_batch=True))
                yield replace(one, if_split=(tuple(met),), moved=moved, of=own)
            continue
        x = inputs.get(id(of)) if goes_back else multiplied.get(id(of), (None, None))[1]
        if x is not None and both:
            there, back = together[id(x)]
            whole = _whole(x.dims, both)
            if goes_back:
                yield replace(one, kind="reduce-scatter")
            what = "input of a matmul, for a gradient" if goes_back else "input of a matmul"
            yield replace(one, kind="all-gather", moved=whole, what=what, of=back if goes_back else there)
            continue
        known = None if goes_back else partial.get(id(of))
        like = instead.get(_axes(one.moved))
        of = like or (of if known is None else known[1])
        yield replace(one, moved=like.dims if like else one.moved, of=of)


def _whole(dims: Iterable[Dim], axes: Collection[Axis]) -> tuple[Dim, ...]:
    """The dims of an array that is put together along some axes."""
    return tuple(fresh(size(dim)) if not _axes([dim]).isdisjoint(axes) else dim for dim in dims)


def _axes(dims: Iterable[Dim]) -> frozenset[Axis]:
    return frozenset(axis for dim in dims for axis in factors(dim))
