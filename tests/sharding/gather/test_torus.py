"""Rings of a torus: which devices they join, when they are taken, and that what is scattered along them is the sum."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.gather import torus
from redco_cli.sharding.plan import FSDP
from tests.sharding.shorthand import f32


@dataclass(frozen=True)
class Chip:
    coords: tuple[int, ...]
    slice_index: int = 0
    platform: str = "tpu"


def mesh_of(sizes, axes=None, slices=1, platform="tpu"):
    """Something like a mesh: devices of slices of these sizes, in the order of their coordinates."""
    devices = np.empty((slices, int(np.prod(sizes))), object)
    for number in range(slices):
        for place, coords in enumerate(np.ndindex(*sizes)):
            devices[number, place] = Chip(coords, number, platform)
    axes = axes or {"data": slices, "fsdp": devices.shape[1]}
    return SimpleNamespace(devices=devices.reshape(tuple(axes.values())), axis_names=tuple(axes), shape=axes)


def test_rings_join_devices_along_one_dim():
    order, (first, second) = torus.torus_of(mesh_of((4, 4)), FSDP)
    assert order == tuple(range(16))
    assert first == tuple((y, 4 + y, 8 + y, 12 + y) for y in range(4))
    assert second == tuple((4 * x, 4 * x + 1, 4 * x + 2, 4 * x + 3) for x in range(4))


@pytest.mark.parametrize("sizes", [(8, 8, 1), (16, 16), (4, 4, 4), (2, 2, 2), (4, 8, 8)])
def test_a_square_or_a_box_is_scattered_ring_by_ring(sizes):
    found = torus.torus_of(mesh_of(sizes), FSDP)
    assert len(found.rings) == len([size for size in sizes if size > 1])


@pytest.mark.parametrize("sizes", [(8,), (2, 2), (2, 4), (4, 8, 1), (8, 16)])
def test_elsewhere_it_is_left_to_the_compiler(sizes):
    assert torus.torus_of(mesh_of(sizes), FSDP) is None


@pytest.mark.parametrize(
    ("width", "filled"), [(1000, 1000), (1024, 1024), (32_000, 32_000), (128_256, 129_024), (151_936, 152_064)]
)
def test_rows_that_cannot_be_cut_evenly_are_filled_up(width, filled):
    assert jax.eval_shape(torus._filled_up, f32(8, width)).shape == (8, filled)


def test_each_slice_has_its_rings():
    assert len(torus.torus_of(mesh_of((4, 4), slices=2), FSDP).rings) == 2


@pytest.mark.parametrize(
    "mesh",
    [
        mesh_of((4, 4), {"fsdp": 8, "tensor": 2}),
        mesh_of((4, 4), {"fsdp": 32}, slices=2),
        mesh_of((8, 8), platform="gpu"),
    ],
    ids=["part of a slice", "over slices", "GPUs that have coordinates"],
)
def test_an_axis_that_is_no_whole_slice_has_none(mesh):
    assert torus.torus_of(mesh, FSDP) is None


WINDING = [*((0, y) for y in range(4)), *((1, y) for y in (3, 2, 1)), *((2, y) for y in (1, 2, 3))]
WINDING += [*((3, y) for y in (3, 2, 1, 0)), (2, 0), (1, 0)]
"""How JAX orders 4 x 4: each device beside the one before, in a ring."""


def test_a_ring_that_winds_through_all_is_put_in_order():
    order, (first, second) = torus._torus([Chip(one) for one in WINDING])
    assert [WINDING[place] for place in order] == list(np.ndindex(4, 4))
    for rings, along in ((first, 0), (second, 1)):
        for ring in rings:
            assert [WINDING[place][along] for place in ring] == [0, 1, 2, 3]
            assert len({WINDING[place][1 - along] for place in ring}) == 1


@pytest.mark.parametrize(
    "coords",
    [
        [(place >> 1 & 1, place & 1, place >> 2) for place in range(8)],
        [(1 - (place >> 1 & 1), place & 1, place >> 2) for place in range(8)],
        [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)],
        None,
    ],
    ids=["a shuffled cube", "backwards", "a ring of 2 x 4", "left to XLA"],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_along_rings_is_the_sum(monkeypatch, coords, dim):
    """Eight devices as if they were a TPU's, of such a torus."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(1, 8), ("data", FSDP))
    found = None if coords is None else torus._torus([Chip(one) for one in coords])
    monkeypatch.setattr(torus, "torus_of", lambda *_: found)
    as_tpu = SimpleNamespace(devices=np.array([Chip((0,))]))
    given = jax.random.normal(jax.random.key(0), (8, 16, 17 * 8 * 128 if dim else 17 * 128))

    def add_up(own):
        return torus.scatter_sum(own[0], as_tpu, FSDP, dim)

    spec = PartitionSpec(*[None] * dim, FSDP)
    added = jax.jit(jax.shard_map(add_up, mesh=mesh, in_specs=PartitionSpec(FSDP), out_specs=spec, check_vma=False))
    np.testing.assert_allclose(added(given), given.sum(0), atol=1e-5)
    rings = 1 if coords is None else len(coords[0])
    assert added.lower(given).as_text().count('reduce_scatter"') == rings


def test_elsewhere_than_on_tpus_nothing_is_moved_to_be_scattered():
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(1, 8), ("data", FSDP))
    added = jax.shard_map(
        lambda own: torus.scatter_sum(own[0], mesh, FSDP, 1),
        mesh=mesh,
        in_specs=PartitionSpec(FSDP),
        out_specs=PartitionSpec(None, FSDP),
        check_vma=False,
    )
    made = [one.primitive.name for one in jax.make_jaxpr(added)(f32(8, 16, 17 * 128)).eqns[0].params["jaxpr"].eqns]
    assert not {"transpose", "pad", "gather", "layout_constraint"} & {*made}
