"""Which dim of a parameter is split over `tensor` where it is used, for code that adds up partial sums itself.

Where the compiler partitions a sum over a split dim, each product has an all-reduce of its own. Code that keeps one
partial sum for each device, adds what belongs together and sums over the devices at the end has one for all; but it
has to know what is split. Whoever traces a function for a mesh says so here; where nobody does, nothing is split.

A dim of n devices is kept as its own leading dim of size n, split over `tensor`: what is computed for each of its
elements stays on its device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.plan import TENSOR, Plan

Array = Any


@dataclass(frozen=True)
class TensorSplit:
    """A dim that is split over `tensor`, into equal contiguous blocks.

    Attributes:
        mesh: the devices.
        dim: which one of an array.
    """

    mesh: Mesh
    dim: int

    @property
    def ways(self) -> int:
        """The number of blocks."""
        return int(self.mesh.shape[TENSOR])

    def layer(self) -> TensorSplit:
        """Of one layer of the array."""
        return replace(self, dim=self.dim - 1)

    def viewed(self, equation: Any) -> TensorSplit | None:
        """The same blocks behind an equation of `rewrite.VIEWS`; None where they are no blocks of one dim."""
        if equation.primitive.name == "transpose":
            return replace(self, dim=list(equation.params["permutation"]).index(self.dim))
        old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        before = math.prod(old[: self.dim])
        places = [dim for dim, size in enumerate(new) if math.prod(new[:dim]) == before and size % self.ways == 0]
        return replace(self, dim=places[0]) if places else None

    def blocks(self, x: Array, dim: int) -> Array:
        """An array [.., d, ..] as [n, .., d / n, ..], cut at `dim`."""
        shape = x.shape
        cut = x.reshape(*shape[:dim], self.ways, shape[dim] // self.ways, *shape[dim + 1 :])
        return jnp.moveaxis(cut, dim, 0)

    def whole(self, blocks: Array, dim: int) -> Array:
        """The inverse of `blocks`."""
        cut = jnp.moveaxis(blocks, 0, dim)
        return cut.reshape(*cut.shape[:dim], -1, *cut.shape[dim + 2 :])

    def repeated(self, x: Array, at: int = 0) -> Array:
        """The array once for each device: [n, ...], or n `at` another dim. Gradients of all are summed at once."""
        shape = (*x.shape[:at], self.ways, *x.shape[at:])
        return self.on_devices(jnp.broadcast_to(jnp.expand_dims(x, at), shape), at)

    def summed(self, parts: Array, at: int = 0) -> Array:
        """The sum of [n, ...] over the devices, in the type of the parts as a product's own all-reduce is."""
        return jax.lax.reduce_sum(self.on_devices(parts, at), (at,))

    def on_devices(self, parts: Array, at: int = 0) -> Array:
        """The same, each element of one dim on its device; so is its gradient."""
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * parts.ndim
        spec[at] = TENSOR
        return jax.lax.with_sharding_constraint(parts, NamedSharding(self.mesh, PartitionSpec(*spec)))


_NOTHING: Mapping[str, TensorSplit] = MappingProxyType({})
_SPLITS: ContextVar[Mapping[str, TensorSplit]] = ContextVar("tensor_splits", default=_NOTHING)
_SUMMED_BY_OTHERS: ContextVar[tuple[str, ...]] = ContextVar("summed_by_others", default=())
_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextlib.contextmanager
def split_as(plan: Plan, mesh: Mesh) -> Iterator[None]:
    """What is traced in this context is for parameters that are used on a mesh as a plan says."""
    ways = plan.mesh[TENSOR]
    found = {
        row.path: TensorSplit(mesh, dim)
        for row in plan.rows
        for dim, axes in enumerate(row.gathered)
        if axes in (TENSOR, (TENSOR,)) and ways > 1 and row.shape[dim] % ways == 0 and row.usage.cut is None
    }
    token, outer = _SPLITS.set(found), _MESH.set(mesh)
    try:
        yield
    finally:
        _SPLITS.reset(token)
        _MESH.reset(outer)


def tensor_split(path: str) -> TensorSplit | None:
    """The split of a parameter over `tensor` in what is traced now; None where it is whole.

    Args:
        path: of the parameter in the plan.
    """
    return _SPLITS.get().get(path)


@contextlib.contextmanager
def summed_by_others(paths: Iterable[str]) -> Iterator[None]:
    """What is traced in this context leaves products with these parameters to who has said so, such as an adapter."""
    token = _SUMMED_BY_OTHERS.set(tuple(paths))
    try:
        yield
    finally:
        _SUMMED_BY_OTHERS.reset(token)


def sums_itself(ending: str) -> bool:
    """Whether a module is free to add up the partial sums of its products with a parameter itself.

    Args:
        ending: of the parameter's path, which a module knows from itself on.
    """
    return not any(_ends(path, ending) for path in _SUMMED_BY_OTHERS.get())


def splits_ending(ending: str) -> list[TensorSplit]:
    """The splits over `tensor` of parameters whose path ends so, in what is traced now.

    Args:
        ending: of the path in the plan.
    """
    return [split for path, split in _SPLITS.get().items() if _ends(path, ending)]


def _ends(path: str, ending: str) -> bool:
    return path == ending or path.endswith(f"/{ending}")


def current_mesh() -> Mesh | None:
    """The mesh that what is traced now is for; None where nobody has said."""
    return _MESH.get()
