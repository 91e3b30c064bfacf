"""Matrices that an optimizer needs whole, each on one of the devices that have it in parts.

Muon (Jordan et al., 2024) multiplies the matrix of an update with itself, again and again. Split over F devices of
`fsdp` and T of `tensor`, every one of these products moves it, or parts of it, between them. Here it moves once each
way: of R matrices of the same form every device gets R / (F·T), computes them by itself, and gives back the parts of
all others:

    [R, M/F, N/T]  ->  [R/F, M, N/T]  ->  [R/(F·T), M, N]     all-to-all over each axis
                                          function of each    nothing moves
    [R, M/F, N/T]  <-  [R/F, M, N/T]  <-  [R/(F·T), M, N]     all-to-all over each axis

Where R does not divide, zeros are added. Matrices of one form are taken together, whichever parameters they are of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.sharding.plan import Collective, as_dims, as_spec

UPDATES = "matrices of updates, each whole on one device"


@dataclass(frozen=True)
class _Form:
    """What matrices that are taken together have in common.

    Attributes:
        shape: of a matrix.
        dims: mesh axes that its rows and its columns are split over.
        stacked: number of matrices along stacking dims that are split, and the mesh axes that these are split over.
        dtype: of its numbers.
    """

    shape: tuple[int, int]
    dims: tuple[tuple[str, ...], tuple[str, ...]]
    stacked: tuple[int, tuple[str, ...]]
    dtype: str

    @property
    def over(self) -> tuple[str, ...]:
        """Mesh axes that a matrix is split over."""
        return self.dims[0] + self.dims[1]


def each_whole(
    function: Callable[[Any], Any], arrays: Sequence[Any], places: Sequence[NamedSharding | None]
) -> list[Any]:
    """Applies a function to matrices, each of them whole on one device.

    Args:
        function: of a matrix [M, N], to another of the same shape; zeros may be given to it.
        arrays: [.., M, N], matrices along their last two dims.
        places: where each lives, and its results will; None where there is one device.
    """
    every = jax.vmap(jax.vmap(function))
    results: list[Any] = [None] * len(arrays)
    groups: dict[tuple[_Form, Any], list[int]] = defaultdict(list)
    for number, (array, place) in enumerate(zip(arrays, places, strict=True)):
        form = None if place is None else _form(array, place.spec, place.mesh.shape)
        if place is None or form is None:
            results[number] = every(array.reshape(1, -1, *array.shape[-2:])).reshape(array.shape)
        else:
            groups[form, place.mesh].append(number)
    for (form, mesh), numbers in groups.items():
        own = [_Stack.of(arrays[number], places[number]) for number in numbers]
        together = jnp.concatenate(
            [one.merged(arrays[number], form) for one, number in zip(own, numbers, strict=True)], 1
        )
        begin = 0
        given = _on_all_devices(every, together, form, mesh)
        for number, one in zip(numbers, own, strict=True):
            count = math.prod(arrays[number].shape[:-2]) // form.stacked[0]
            part = jax.lax.slice_in_dim(given, begin, begin + count, axis=1)
            results[number] = jax.lax.with_sharding_constraint(one.apart(part, arrays[number].shape), places[number])
            begin += count
    return results


def shared_out(
    arrays: Sequence[Any], specs: Sequence[PartitionSpec], mesh: Mapping[str, int]
) -> tuple[list[tuple[int, tuple[int, int]]], tuple[Collective, ...]]:
    """What each device computes of matrices by `each_whole` on a mesh, and what moves for it.

    Args:
        arrays: as given to it, or abstract.
        specs: where each lives.
        mesh: axis to size.

    Returns:
        How many matrices it has of which shape; and collectives.
    """
    rows: dict[_Form, int] = defaultdict(int)
    own: list[tuple[int, tuple[int, int]]] = []
    for array, spec in zip(arrays, specs, strict=True):
        form = _form(array, spec, mesh)
        if form is None:
            own.append((math.prod(array.shape[:-2]), array.shape[-2:]))
        else:
            rows[form] += math.prod(array.shape[:-2]) // form.stacked[0]
    found: dict[str, list[int]] = defaultdict(list)
    for form, count in rows.items():
        ways = math.prod(mesh[axis] for axis in form.over)
        here = form.stacked[0] // math.prod(mesh[axis] for axis in form.stacked[1]) * -(-count // ways)
        own.append((here, form.shape))
        for axes in filter(None, form.dims):
            found["+".join(axes)] += [here * math.prod(form.shape) * jnp.dtype(form.dtype).itemsize] * 2
    moved = (Collective("all-to-all", axis, UPDATES, len(each), sum(each)) for axis, each in found.items())
    return own, tuple(moved)


def _form(array: Any, spec: PartitionSpec, mesh: Mapping[str, int]) -> _Form | None:
    """Of the matrices of an array; None where each is whole on every device that has it, or parts differ in size."""
    *stacking, rows, columns = dims = _split_dims(array, spec, mesh)
    divides = all(
        size % math.prod(mesh[axis] for axis in axes) == 0 for size, axes in zip(array.shape, dims, strict=True)
    )
    if not rows + columns or not divides:
        return None
    split = [(size, axes) for size, axes in zip(array.shape, stacking, strict=False) if axes]
    stacked = math.prod(size for size, _ in split), tuple(axis for _, axes in split for axis in axes)
    return _Form(array.shape[-2:], (rows, columns), stacked, str(array.dtype))


def _split_dims(array: Any, spec: PartitionSpec, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes of each dim of an array that are more than one device."""
    return [tuple(axis for axis in axes if mesh[axis] > 1) for axes in as_dims(spec, array.ndim)]


@dataclass(frozen=True)
class _Stack:
    """The order of an array's dims in which those are first that stack matrices and are split.

    Attributes:
        order: of its dims; the last two stay.
    """

    order: tuple[int, ...]

    @classmethod
    def of(cls, array: Any, place: NamedSharding | None) -> _Stack:
        """The order for an array that lives there."""
        dims = [] if place is None else _split_dims(array, place.spec, place.mesh.shape)
        first = sorted(range(array.ndim - 2), key=lambda dim: not dims[dim])
        return cls((*first, array.ndim - 2, array.ndim - 1))

    def merged(self, array: Any, form: _Form) -> Any:
        """The array as [matrices along split dims, along others, M, N]."""
        return array.transpose(self.order).reshape(form.stacked[0], -1, *form.shape)

    def apart(self, matrices: Any, shape: Sequence[int]) -> Any:
        """The array again."""
        ordered = matrices.reshape([shape[dim] for dim in self.order])
        return ordered.transpose([self.order.index(dim) for dim in range(len(shape))])


def _on_all_devices(every: Callable[[Any], Any], matrices: Any, form: _Form, mesh: Any) -> Any:
    """A function of matrices [stacked, R, M, N] that are split, computed of whole ones; zeros fill the last shard."""
    ways = math.prod(mesh.shape[axis] for axis in form.over)
    padded = jnp.pad(matrices, ((0, 0), (0, -matrices.shape[1] % ways), (0, 0), (0, 0)))
    moves = [(axes, dim) for dim, axes in enumerate(form.dims, start=2) if axes]

    def on_one(own: Any) -> Any:
        for axes, dim in moves:
            own = jax.lax.all_to_all(own, axes, split_axis=1, concat_axis=dim, tiled=True)
        own = every(own)
        for axes, dim in reversed(moves):
            own = jax.lax.all_to_all(own, axes, split_axis=dim, concat_axis=1, tiled=True)
        return own

    lives = as_spec((form.stacked[1], (), *form.dims))
    return jax.shard_map(on_one, mesh=mesh, in_specs=lives, out_specs=lives, check_vma=False)(padded)
