"""Several projections in one weight, such as queries, keys and values: `tensor` splits each of them by itself.

A weight [D, K·N] of K projections lives in contiguous blocks of its K·N columns: of 3 projections over 4 devices the
first has three quarters of the queries. Multiplied so, what the program takes apart afterwards, [B, S, K·N], has to be
moved between devices, and its gradient back. Here the weight is moved instead:

    lives       [D/F, K·N/T]
    exchanged   [D/(F·T), K·N]      an all-to-all over `tensor`
    unmerged    [D/(F·T), K, N]     nothing moves
    exchanged   [D/F, K, N/T]       an all-to-all over `tensor`

From there it is gathered and multiplied as any other. Its product [B, S, K, N/T] stays unmerged through what is done to
each of its elements, until the program takes its projections; anything else is given the array as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.sharding.decide.projections import exchanged
from redco_cli.sharding.gather.repeated import Repeated
from redco_cli.sharding.gather.sharded import Sharded, part_spec
from redco_cli.sharding.plan import TENSOR, as_dims, as_spec
from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.program.rewrite import bind

_OF_EACH = frozenset(ELEMENTWISE.split()) - {"sharding_constraint"}
"""Primitives that treat all elements of an array alike, whatever its dims."""


Apply = Callable[[Any, Sequence[Any]], Sequence[Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unmerged:
    """An array [.., K·N, ..] whose two factors are dims of their own still: [.., K, N, ..].

    Attributes:
        value: the array with one dim more, or a weight that was not used yet.
        dim: the first of the two.
    """

    value: Any
    dim: int = field(metadata={"static": True})

    @property
    def is_weight(self) -> bool:
        """Whether it was not used yet."""
        return isinstance(self.value, Sharded | Repeated)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all dims, one more than the program knows of."""
        value = self.value.plain if isinstance(self.value, Repeated) else self.value
        return tuple((value.value if isinstance(value, Sharded) else value).shape)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many projections, and how large each is."""
        return self.shape[self.dim], self.shape[self.dim + 1]

    @property
    def arrays(self) -> Any:
        """What it consists of."""
        return self.value.arrays if self.is_weight else self.value

    def having(self, arrays: Any) -> Unmerged:
        """The same with other arrays."""
        return replace(self, value=self.value.having(arrays) if self.is_weight else arrays)

    def plain(self) -> Any:
        """The array with one dim more, whole over `fsdp`."""
        return self.value.array() if self.is_weight else self.value

    def array(self, use: str = "") -> Any:
        """The array as the program knows it."""
        value = self.plain()
        return value.reshape(_merged(value.shape, self.dim))

    def stacked(self) -> Any:
        """The array: a loop runs over another dim of it."""
        return self.array()

    def layer(self, arrays: Any) -> Any:
        """The layer itself."""
        return arrays

    def viewed(self, equation: Any) -> Any:
        """Seen in another way: cast, or with the projections still apart where a reshape leaves them in one dim."""
        if equation.primitive.name == "convert_element_type":
            return replace(
                self, value=self.value.viewed(equation) if self.is_weight else bind(equation, [self.value])[0]
            )
        place = None
        if equation.primitive.name == "reshape" and equation.params["dimensions"] is None:
            place = self._place_among(equation.params["new_sizes"])
        if place is None:
            return bind(equation, [self.array()])[0]
        sizes, value = tuple(equation.params["new_sizes"]), self.plain()
        if sizes[place] == self.sizes[0]:
            return value.reshape(sizes)
        return Unmerged(value.reshape(_unmerged(sizes, place, self.sizes[0])), place)

    def _place_among(self, sizes: Sequence[int]) -> int | None:
        """Which dim of another shape the projections lead; None where it is none."""
        before = math.prod(self.shape[: self.dim])
        places = (place for place, size in enumerate(sizes) if size > 1 and math.prod(sizes[:place]) == before)
        place = next(places, None)
        return place if place is not None and sizes[place] % self.sizes[0] == 0 else None


def unmerged(weight: Sharded) -> Unmerged:
    """A weight of several projections where it lives, each in shards over `tensor`.

    Args:
        weight: which `tensor` splits, in parts that divide.
    """
    ndim, shape, mesh = weight.value.ndim, weight.value.shape, weight.mesh
    lives, used = as_dims(weight.spec, ndim), as_dims(weight.gathered, ndim)
    dim = next(dim for dim, axes in enumerate(used) if TENSOR in axes)
    between, there = exchanged(lives, dim, shape, mesh.shape) or (((),) * ndim, used)  # a small one is gathered
    apart, gathered = (as_spec((*dims[:dim], (), *dims[dim:])) for dims in (there, used))

    def constrained(x: Any, spec: PartitionSpec, rank: int) -> Any:
        spec = spec if x.ndim == rank else part_spec(spec, rank)  # parts of a gradient have a dim of replicas besides
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def moved(x: Any) -> Any:
        x = constrained(constrained(x, weight.spec, ndim), as_spec(between), ndim)
        return constrained(x.reshape(_unmerged(x.shape, dim, weight.usage.parts)), apart, ndim + 1)

    arrays = jax.tree.map(moved, weight.arrays)
    return Unmerged(Sharded(arrays, apart, gathered, mesh, is_cast=weight.is_cast), dim)


def is_fused(x: Any) -> bool:
    """Whether an operand is a weight of several projections, as it lives."""
    return isinstance(x, Sharded) and x.usage.parts > 1 and not x.views


def on_unmerged(equation: Any, operands: Sequence[Any], apply: Apply) -> Sequence[Any] | None:
    """The results of an equation, whose projections stay apart.

    Args:
        equation: any.
        operands: its own, some an `Unmerged`.
        apply: an equation to arrays, and weights that were not used yet.

    Returns:
        Arrays, or an `Unmerged` each; None where the equation needs them merged.
    """
    name, count = equation.primitive.name, sum(isinstance(x, Unmerged) for x in operands)
    if name in ("slice", "split"):
        return _taken_apart(equation, operands[0])
    if name in _OF_EACH:
        return _of_each(equation, [x.array() if isinstance(x, Sharded | Repeated) else x for x in operands])
    if name == "conv_general_dilated":
        return _of_convolution(equation, operands, apply)
    found = None
    if name == "dot_general" and count == 1:
        found = _of_product(equation, operands)
    elif name == "broadcast_in_dim":
        found = _of_broadcast(equation, operands)
    if found is None:
        return None
    apart, dim = found
    return [Unmerged(x, dim) for x in apply(apart, [x.value if isinstance(x, Unmerged) else x for x in operands])]


def _of_product(equation: Any, operands: Sequence[Any]) -> tuple[Any, int] | None:
    """A product, one of whose operands has one dim more, and where the two dims are in its result."""
    (at,) = (place for place, x in enumerate(operands) if isinstance(x, Unmerged))
    x, numbers = operands[at], equation.params["dimension_numbers"]
    (contracted, batched), ndims = numbers, [atom.aval.ndim for atom in equation.invars]
    taken = (*contracted[at], *batched[at])
    if x.dim in taken or equation.params.get("out_sharding") is not None:
        return None
    behind = [[tuple(d + (i == at and d > x.dim) for d in dims) for i, dims in enumerate(pair)] for pair in numbers]
    free = [dim for dim in range(ndims[at]) if dim not in taken]
    first = len(batched[0]) if at == 0 else ndims[0] - len(contracted[0])
    params = {**equation.params, "dimension_numbers": (tuple(behind[0]), tuple(behind[1]))}
    return _on(equation, params, operands), first + free.index(x.dim)


def _of_convolution(equation: Any, operands: Sequence[Any], apply: Apply) -> list[Unmerged] | None:
    """The result of a convolution, whose channels are one dim: the first of each projection, the second of each, and so
    on, so that contiguous blocks have as much of every one.
    """
    (images, kernel), params = operands, equation.params
    numbers, groups = params["dimension_numbers"], (params["feature_group_count"], params["batch_group_count"])
    if isinstance(images, Unmerged) or groups != (1, 1) or kernel.dim != numbers.rhs_spec[0]:
        return None
    own, dim, there = kernel.plain(), kernel.dim, numbers.out_spec[1]
    turned = jnp.swapaxes(own, dim, dim + 1).reshape(_merged(own.shape, dim))
    (result,) = apply(equation, [images, turned])
    apart = result.reshape(_unmerged(result.shape, there, own.shape[dim + 1]))
    return [Unmerged(jnp.swapaxes(apart, there, there + 1), there)]


def _of_broadcast(equation: Any, operands: Sequence[Any]) -> tuple[Any, int] | None:
    """The same of a `broadcast_in_dim`."""
    (x,), params = operands, equation.params
    places, shape = params["broadcast_dimensions"], params["shape"]
    if params.get("sharding") is not None:
        return None
    place = places[x.dim]
    there = [one + (one > place) for one in places]
    there.insert(x.dim + 1, place + 1)
    params = {**params, "shape": _unmerged(shape, place, x.sizes[0]), "broadcast_dimensions": tuple(there)}
    return _on(equation, params, operands), place


def _of_each(equation: Any, operands: Sequence[Any]) -> list[Unmerged] | None:
    """The result of an equation of `_OF_EACH`; None where its operands do not line up."""
    first = next(x for x in operands if isinstance(x, Unmerged))
    rank, (parts, size), dim = len(first.shape) - 1, first.sizes, first.dim

    def lined_up(x: Any) -> Any:
        if isinstance(x, Unmerged):
            return x.plain() if (x.dim, x.sizes) == (dim, first.sizes) else None
        if not getattr(x, "ndim", 0):
            return x
        return x.reshape(_unmerged(x.shape, dim, parts)) if x.ndim == rank and x.shape[dim] == parts * size else None

    values = list(map(lined_up, operands))
    if len(equation.outvars) > 1 or any(value is None for value in values):
        return None
    return [Unmerged(bind(equation, values)[0], dim)]


def _taken_apart(equation: Any, x: Unmerged) -> list[Any] | None:
    """What a `slice` or `split` takes of an array; None where it cuts through projections."""
    params, (_, size), dim, value = equation.params, x.sizes, x.dim, x.plain()

    def cut(numbers: Sequence[int], both: Sequence[int]) -> tuple[int, ...]:
        return (*numbers[:dim], *both, *numbers[dim + 1 :])

    if equation.primitive.name == "split":
        place, counts = params["axis"], params["sizes"]
        if place != dim:
            return [Unmerged(one, dim) for one in jax.lax.split(value, counts, place + (place > dim))]
        bounds = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    else:
        starts, limits = params["start_indices"], params["limit_indices"]
        strides = params["strides"] or (1,) * len(starts)
        if strides[dim] != 1:
            return None
        value = jax.lax.slice(value, cut(starts, (0, 0)), cut(limits, x.sizes), cut(strides, (1, 1)))
        bounds = [(starts[dim], limits[dim])]
    if any(bound % size for pair in bounds for bound in pair):
        return None

    def projections(start: int, end: int) -> Any:
        taken = jax.lax.slice_in_dim(value, start // size, end // size, axis=dim)
        return jax.lax.squeeze(taken, [dim]) if end - start == size else Unmerged(taken, dim)

    return [projections(*pair) for pair in bounds]


def _on(equation: Any, params: Any, operands: Sequence[Any]) -> Any:
    """The equation with other parameters, an `Unmerged` among its operands having one dim more."""
    pairs = zip(operands, equation.invars, strict=True)
    like = [jax.ShapeDtypeStruct(x.shape if isinstance(x, Unmerged) else a.aval.shape, a.aval.dtype) for x, a in pairs]
    closed = jax.make_jaxpr(lambda *arrays: equation.primitive.bind(*arrays, **params))(*like)
    (traced,) = closed.jaxpr.eqns
    given = zip(operands, equation.invars, traced.invars, strict=True)
    atoms = [new if isinstance(x, Unmerged) else own for x, own, new in given]
    return traced.replace(invars=atoms, ctx=equation.ctx, source_info=equation.source_info)


def _merged(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _unmerged(shape: Sequence[int], dim: int, parts: int) -> tuple[int, ...]:
    return (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
