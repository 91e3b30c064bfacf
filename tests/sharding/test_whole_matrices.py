"""Matrices computed whole on one device each: the numbers of one device, and what moves is what was predicted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.whole_matrices import each_whole, shared_out
from tests.sharding.measure import QUICKLY, device_mesh

SHAPES = {
    "layers": (3, 8, 16),
    "more of the same form": (2, 8, 16),
    "by columns": (3, 8, 16),
    "experts": (3, 4, 8, 16),
    "a head": (8, 24),
    "whole": (4, 4),
}
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
SPECS = {
    "layers": P(None, "fsdp", "tensor"),
    "more of the same form": P(None, "fsdp", "tensor"),
    "by columns": P(None, None, ("fsdp", "tensor")),
    "experts": P(None, "tensor", "fsdp"),
    "a head": P("fsdp", "tensor"),
    "whole": P(),
}


def arrays():
    draw = np.random.default_rng(0).normal
    return [draw(size=shape).astype(np.float32) for shape in SHAPES.values()]


def squared(matrix):
    """Needs all of a matrix."""
    return matrix @ matrix.T @ matrix


def on_mesh(mesh):
    devices = device_mesh(mesh)
    places = [NamedSharding(devices, spec) for spec in SPECS.values()]
    step = jax.jit(
        lambda given: each_whole(squared, given, places),
        in_shardings=(places,),
        out_shardings=places,
        compiler_options=QUICKLY,
    )
    return step.lower(arrays()).compile()


@pytest.mark.parametrize("mesh", [FSDP, CUBE, {"data": 8, "fsdp": 1, "tensor": 1}], ids=["fsdp", "cube", "data"])
def test_numbers_are_those_of_one_device(mesh):
    for found, matrices in zip(on_mesh(mesh)(arrays()), arrays(), strict=True):
        right = matrices @ np.swapaxes(matrices, -1, -2) @ matrices
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-4)


def test_without_a_mesh_they_are_computed_as_they_are():
    for found, matrices in zip(each_whole(squared, arrays(), [None] * len(SHAPES)), arrays(), strict=True):
        np.testing.assert_allclose(found, jnp.asarray(matrices) @ matrices.swapaxes(-1, -2) @ matrices, rtol=1e-5)


@pytest.mark.parametrize("mesh", [FSDP, CUBE], ids=["fsdp", "cube"])
def test_what_moves_is_what_was_predicted(mesh):
    """Each matrix once there and once back, over one axis after the other."""
    _, predicted = shared_out(arrays(), list(SPECS.values()), mesh)
    moved: dict[str, int] = {}
    for one in compiled_collectives(on_mesh(mesh), mesh):
        assert one.kind == "all-to-all"
        axes = "+".join(one.axes)
        moved[axes] = moved.get(axes, 0) + one.count * one.bytes
    assert moved == {one.axis: one.bytes for one in predicted}


def test_every_device_has_its_share():
    """Of seventeen matrices of one form at most three on each of eight; of those that are split otherwise one."""
    own, _ = shared_out(arrays(), list(SPECS.values()), FSDP)
    assert sorted(own) == [(1, (4, 4)), (1, (8, 16)), (1, (8, 24)), (3, (8, 16))]


def test_parts_of_different_sizes_are_left_to_the_compiler():
    own, moved = shared_out([jax.ShapeDtypeStruct((5, 9, 16), jnp.float32)], [P(None, "fsdp")], FSDP)
    assert (own, moved) == ([(5, (9, 16))], ())
