"""Rings of a torus: which devices they join, when they are taken, and that what is scattered along them is the sum."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.decide import torus
from redco_cli.sharding.plan import FSDP


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
    first, second = torus.rings_for(mesh_of((4, 4)), FSDP, 1024)
    assert first == tuple((y, 4 + y, 8 + y, 12 + y) for y in range(4))
    assert second == tuple((4 * x, 4 * x + 1, 4 * x + 2, 4 * x + 3) for x in range(4))


@pytest.mark.parametrize("sizes", [(8, 8, 1), (16, 16), (4, 4, 4), (2, 2, 2), (4, 8, 8)])
def test_a_square_or_a_box_is_scattered_ring_by_ring(sizes):
    assert len(torus.rings_for(mesh_of(sizes), FSDP, 1024)) == len([size for size in sizes if size > 1])


@pytest.mark.parametrize("sizes", [(8,), (2, 2), (2, 4), (4, 8, 1), (8, 16)])
def test_elsewhere_it_is_left_to_the_compiler(sizes):
    assert torus.rings_for(mesh_of(sizes), FSDP, 128 * 250) == ()


def test_rows_that_cannot_be_cut_evenly_are_not():
    assert len(torus.rings_for(mesh_of((4, 8)), FSDP, 128256)) == 2


def test_each_slice_has_its_rings():
    assert len(torus.rings_for(mesh_of((4, 4), slices=2), FSDP, 1024)) == 2


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
    assert torus.rings_for(mesh, FSDP, 1024) == ()


def test_a_sum_along_rings_is_the_sum(monkeypatch):
    """Eight devices as if they were 2 x 2 x 2 of a torus, in the shuffled order that a mesh may have them in."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(1, 8), ("data", FSDP))
    coords = [(place >> 1 & 1, place & 1, place >> 2) for place in range(8)]
    found = torus._rings([Chip(one) for one in coords])
    assert len(found) == 3
    monkeypatch.setattr(torus, "_rings", lambda _: found)
    given = jax.random.normal(jax.random.key(0), (8, 16, 3))

    def add_up(own):
        return torus.scatter_sum(own[0], mesh, FSDP, 0)

    spec = PartitionSpec(FSDP)
    added = jax.jit(jax.shard_map(add_up, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    np.testing.assert_allclose(added(given), given.sum(0), atol=1e-5)
    assert added.lower(given).as_text().count('reduce_scatter"') == 3
