"""A parameter in shards that was not used yet: what gathers it where it is used, and adds up its gradient.

The forward pass gathers a parameter from where it lives to where it is used, an all-gather over `fsdp`; the backward
pass scatters its gradient back, a reduce-scatter.

One whose rows do not divide, such as those of a vocabulary of 50,257, lives in shards of the other dim, and is used in
uneven parts of its rows. On the way it has as many rows as divide, and what is added is cut off at once:

    lives       [V, H/(F·T)]
    padded      [V', H/(F·T)]       nothing moves
    exchanged   [V'/T, H/F]         an all-to-all over `tensor`
    gathered    [V'/T, H]           an all-gather over `fsdp`
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.batch_shards import OF_EACH_SHARD
from redco_cli.sharding.gather.all_gather import all_gather
from redco_cli.sharding.gather.torus import scatter_sum, share
from redco_cli.sharding.plan import BATCH_AXES, DATA, FSDP, TENSOR, Usage, as_dims, as_spec
from redco_cli.sharding.program.rewrite import bind

SMALL = 2**20
"""Bytes of a gradient that are not worth three transfers: some twenty microseconds of a fast link."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Apart:
    """A parameter whose gradient is asked for in parts, one of each replica over `data`, that nobody added up yet.

    Attributes:
        value: the parameter [...].
        parts: zeros [..., D] for D replicas, as if each added its own to the value: what `jax.grad` finds for them are
            the parts of the gradient.
        takes_sums: whether the value has a gradient, too: what is added up already.
    """

    value: Any
    parts: Any
    takes_sums: bool = field(default=False, metadata={"static": True})


def part_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Where parts [..., D] of an array live, whose `ndim` dims live at `spec`: each replica has its own."""
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)), DATA)


@dataclass(frozen=True)
class Sharded:
    """A parameter that was not used yet.

    Attributes:
        arrays: the array, or an `Apart`.
        spec: the mesh axes of its dims where it lives.
        gathered: the same where it is used.
        mesh: the devices.
        usage: how it is used there.
        views: equations of one operand, to apply once it is gathered.
        is_cast: the array is what the program makes of the parameter in another precision.
        several: variables of the program that it reads more than once.
    """

    arrays: Any
    spec: PartitionSpec
    gathered: PartitionSpec
    mesh: Mesh
    usage: Usage = field(default_factory=Usage)
    views: tuple[Any, ...] = ()
    is_cast: bool = False
    several: frozenset[Any] = frozenset()

    @property
    def value(self) -> Any:
        """The array where it lives."""
        return self.arrays.value if self.is_apart else self.arrays

    @property
    def is_apart(self) -> bool:
        """Whether its gradient is asked for in parts."""
        return isinstance(self.arrays, Apart)

    @property
    def divides(self) -> bool:
        """Whether the devices that share it have equal parts of it where it lives."""
        return not any(self._lacks(self.spec))

    @property
    def _even(self) -> PartitionSpec:
        """Where it is as soon as it is padded: over `fsdp` as it lives, over `tensor` as it is used."""
        ndim = self.value.ndim
        lives, used = ([TENSOR in axes for axes in as_dims(spec, ndim)] for spec in (self.spec, self.gathered))
        is_exchanged = (any(lives) and any(used) and lives != used) or any(self._lacks(self.gathered))
        return scattered(self.gathered, self.spec, ndim) if is_exchanged else self.spec

    def _lacks(self, spec: PartitionSpec) -> list[int]:
        """How many entries each dim lacks to divide."""
        pairs = zip(self.value.shape, as_dims(spec, self.value.ndim), strict=True)
        return [-size % math.prod(self.mesh.shape[axis] for axis in axes) for size, axes in pairs]

    def _padded(self, x: Any) -> Any:
        """The array, or one with other dims in front, with as many entries as divide where it is used."""
        lacks = self._lacks(self.gathered)
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - len(lacks)), *((0, lack) for lack in lacks)]) if any(lacks) else x

    def _unpadded(self, x: Any) -> Any:
        """The same without what was added."""
        return x[tuple(map(slice, self.value.shape))] if any(self._lacks(self.gathered)) else x

    def array(self, use: str = "") -> Any:
        """The array, whole, as it is used."""
        moves = self.spec != self.gathered
        return self.seen(self._all_gather() if moves or self.is_apart else self.arrays)

    def seen(self, whole: Any) -> Any:
        """What the program makes of the whole array before it uses it."""
        for equation in self.views:
            (whole,) = bind(equation, [whole])
        return whole

    @property
    def is_on_tpu(self) -> bool:
        """Where XLA casts before it gathers by itself; elsewhere it is told, by where a cast array lives."""
        return bool(self.mesh.devices.flat[0].platform == "tpu")

    def _all_gather(self) -> Any:
        def value(arrays: Any) -> Any:
            array = self.having(arrays).value
            if self.is_cast and not self.is_on_tpu:
                array = jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.spec))
            array = self._padded(array)
            if self._even != self.spec:
                array = jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self._even))
            return self._unpadded(all_gather(array, self.mesh, self._even, self.gathered))

        def forward(arrays: Any) -> tuple[Any, None]:
            return value(arrays), None

        def backward(_: None, gradient: Any) -> tuple[Any]:
            gradient = self._padded(gradient)
            # The first keeps it out of the product before.
            for spec in dict.fromkeys((self.gathered, *self._halfway(), self._even, self.spec)):
                gradient = jax.lax.with_sharding_constraint(gradient, NamedSharding(self.mesh, spec))
            return (self.with_sum(self._unpadded(gradient)),)

        gather = jax.custom_vjp(value)
        gather.defvjp(forward, backward)
        return gather(self.arrays)

    def _halfway(self) -> tuple[PartitionSpec, ...]:
        """What a gradient passes on its way to `spec`, where it is summed over `data` and scattered over `fsdp`.

        Asked for both at once, XLA sums all of it on every device. It scatters over all of them at once, in the order
        of their numbers, data major; exchanged to fsdp major, the shard of a replica lies in one piece. A small one
        takes the way of one sum: three transfers take longer than the bytes that they save.
        """
        replicas, ways = self.mesh.shape.get(DATA, 1), self.mesh.shape.get(FSDP, 1)
        if replicas == 1 or self.value.nbytes < SMALL:
            return ()
        used = as_dims(self.gathered, self.value.ndim)
        for dim, shards in enumerate(as_dims(self._even)):
            cut = replicas * ways * math.prod(self.mesh.shape[axis] for axis in used[dim])
            if shards == (*used[dim], FSDP) and self.value.shape[dim] % cut == 0:
                return tuple(
                    PartitionSpec(*self._even[:dim], (*used[dim], *axes), *self._even[dim + 1 :])
                    for axes in ((DATA, FSDP), (FSDP, DATA))
                )
        return ()

    def with_sum(self, gradient: Any) -> Any:
        """The gradient that `arrays` have, from one that is added up already; in parts, it is the first replica's."""
        if not self.is_apart:
            return gradient
        if self.arrays.takes_sums:
            return replace(self.arrays, value=gradient, parts=None)
        first = jnp.arange(self.mesh.shape[DATA]) == 0
        return replace(self.arrays, value=None, parts=self._parts(jnp.where(first, gradient[..., None], 0), self.spec))

    def cotangent(self, parts: Any) -> Any:
        """The gradient that `arrays` have, from its part of each device of the batch.

        Args:
            parts: of the gradient where the parameter is whole [D * F, ...] over `data` D and `fsdp` F, data major.
        """
        there = scattered(self.gathered, self.spec, parts.ndim - 1)
        place = next((dim for dim, axes in enumerate(as_dims(there)) if FSDP in axes), None)
        kept, lives = self._kept(), as_dims(self.spec, parts.ndim - 1)
        ways = self.mesh.shape[FSDP] if kept is not None and FSDP in lives[kept] else 1
        if kept is not None:  # each device of `tensor` adds up no more than that
            there = as_spec((*as_dims(there, kept)[:kept], lives[kept], *as_dims(there)[kept + 1 :]))

        def add_up(part: Any) -> Any:
            own = jnp.squeeze(part, 0)
            if kept is not None:
                own = share(own, kept, TENSOR, self.mesh, blocks=ways)
            own = jax.lax.psum(own, FSDP) if place is None else scatter_sum(own, self.mesh, FSDP, place)
            return own[..., None] if self.is_apart else jax.lax.psum(own, DATA)

        ends = part_spec(there, parts.ndim - 1) if self.is_apart else there
        summed = jax.shard_map(
            add_up, mesh=self.mesh, in_specs=PartitionSpec(BATCH_AXES, *self.gathered), out_specs=ends, check_vma=False
        )(self._padded(parts))
        if self.is_apart:
            return replace(self.arrays, value=None, parts=self._unpadded(self._parts(summed, self.spec)))
        return self._unpadded(jax.lax.with_sharding_constraint(summed, NamedSharding(self.mesh, self.spec)))

    def _kept(self) -> int | None:
        """The dim of which each device of `tensor` keeps a part, of its shard over `fsdp` perhaps, and uses all."""
        if any(TENSOR in axes for axes in as_dims(self.gathered)):
            return None
        kept = ((TENSOR,), (FSDP, TENSOR))
        return next((dim for dim, axes in enumerate(as_dims(self.spec)) if axes in kept), None)

    def _parts(self, parts: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(parts, NamedSharding(self.mesh, part_spec(spec, parts.ndim - 1)))

    def having(self, arrays: Any) -> Sharded:
        """The same with another array."""
        return replace(self, arrays=arrays)

    def viewed(self, equation: Any) -> Sharded:
        """The same parameter, seen in another way; cast at once, as it is cheaper to gather in fewer bits."""
        part = self.part(equation) or self._transposed(equation)
        if part is not None:
            return part
        fewer = not jnp.issubdtype(self.value.dtype, jnp.integer)  # codes of a quantised weight are few as they are
        is_mark = equation.params.get("name") == OF_EACH_SHARD
        if equation.primitive.name in ("convert_element_type", "name") and fewer and not is_mark:
            arrays = jax.tree.map(lambda leaf: bind(equation, [leaf])[0], self.arrays)
            cast = replace(self, arrays=arrays, is_cast=self.is_cast or equation.primitive.name != "name")
            return cast.told() if equation.outvars[0] in self.several else cast
        return replace(self, views=(*self.views, equation))

    def told(self) -> Sharded:
        """The same, whose array is told where it lives at once, for XLA to see that several uses gather the same."""
        if self.is_on_tpu or not self.is_cast:
            return self
        here = jax.lax.with_sharding_constraint(self.value, NamedSharding(self.mesh, self.spec))
        return replace(self, arrays=replace(self.arrays, value=here) if self.is_apart else here, is_cast=False)

    def part(self, equation: Any) -> Sharded | None:
        """What a slice or squeeze takes along dims that no mesh axis splits, such as one layer of a stack.

        It lives where the whole does, and is gathered by itself; None for anything else.
        """
        params, shape = equation.params, self.value.shape
        lives, used = (as_dims(one, len(shape)) for one in (self.spec, self.gathered))
        if equation.primitive.name not in ("slice", "squeeze") or self.views:
            return None
        gone = params.get("dimensions", ())
        ends = list(map(slice, params.get("start_indices", ()), params.get("limit_indices", ())))
        cut = gone or [dim for dim, one in enumerate(ends) if one != slice(0, shape[dim])]
        if any(lives[dim] or used[dim] for dim in cut) or params.get("strides"):
            return None

        def taken(leaf: Any) -> Any:
            return jax.lax.squeeze(leaf, gone) if gone else leaf[tuple(ends)]

        left = (tuple(axes for dim, axes in enumerate(dims) if dim not in gone) for dims in (lives, used))
        spec, gathered = map(as_spec, left)
        arrays, usage = jax.tree.map(taken, self.arrays), self.usage.without(gone)
        return replace(self, arrays=arrays, spec=spec, gathered=gathered, usage=usage)

    def _transposed(self, equation: Any) -> Sharded | None:
        """One of several projections with its dims in another order at once, as these are told apart before its use."""
        if equation.primitive.name != "transpose" or self.usage.parts == 1 or self.views:
            return None
        order, ndim = equation.params["permutation"], self.value.ndim
        arrays = jax.tree.map(lambda leaf: leaf.transpose(*order, *range(ndim, leaf.ndim)), self.arrays)
        lives, used = (as_dims(spec, ndim) for spec in (self.spec, self.gathered))
        spec, gathered = (as_spec(tuple(dims[dim] for dim in order)) for dims in (lives, used))
        return replace(self, arrays=arrays, spec=spec, gathered=gathered)

    def stacked(self) -> Any:
        """Itself; whole where its layers are no longer its leading dim, or are split."""
        return self.array() if self.views or any(any(as_dims(one)[:1]) for one in (self.spec, self.gathered)) else self

    def layer(self, arrays: Any) -> Sharded:
        """One layer of it."""
        spec, gathered = (PartitionSpec(*spec[1:]) for spec in (self.spec, self.gathered))
        return Sharded(arrays, spec, gathered, self.mesh, self.usage.without((0,)))


def scattered(gathered: PartitionSpec, spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Where a parameter is used, and over `fsdp` where it lives."""
    pairs = zip(as_dims(gathered, ndim), as_dims(spec, ndim), strict=True)
    return as_spec(tuple((*used, FSDP) if FSDP in lives and FSDP not in used else used for used, lives in pairs))


def cut(x: Any, dim: int, ways: int) -> Any:
    """An array whose examples, a dim of it, are cut in equal parts: [.., ways, examples / ways, ..]."""
    return x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :])
