"""Weights that `tensor` keeps in shards and uses whole: each of its devices adds up the gradient of its own shard."""

import jax.numpy as jnp
import pytest

from redco_cli.sharding import derive
from redco_cli.sharding.plan import as_dims
from redco_cli.sharding.rings import sent_bytes
from tests.sharding.beside import CUBE, MESH, approximately, draw, in_parts, moved, on_mesh

WIDTH, LAYERS = 512, 2
MESHES = {"fsdp and tensor": MESH, "cube": CUBE}


def residual(params, batch):
    """Features that every layer makes and sums over: none of them can be split."""
    x = batch["x"]
    for layer in range(LAYERS):
        x = x + jnp.tanh(x @ params[f"w{layer}"])
    return jnp.square(x).mean()


def job():
    return {f"w{layer}": draw(WIDTH, WIDTH, seed=layer) for layer in range(LAYERS)}, {"x": draw(8, 256, WIDTH, seed=9)}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_what_moves_is_what_was_predicted(mesh):
    params, batch = job()
    plan = derive(residual, params, batch, mesh)
    assert {as_dims(spec) for spec in plan.specs.values()} == {(("fsdp", "tensor"),)}
    predicted = sum(sent_bytes(one, mesh) for one in plan.collectives)
    assert moved(residual, params, batch, mesh) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_numbers_are_those_of_one_device(mesh):
    params, batch = job()
    plan = derive(residual, params, batch, mesh)
    found, right = on_mesh(residual, params, batch, specs=plan.specs, gathered=plan.gathered, mesh=mesh)
    approximately(found, right, 1e-5)


def test_micro_batches_add_up_parts_of_each_replica():
    params, batch = job()
    plan = derive(residual, params, batch, CUBE)
    _, found, right = in_parts(residual, params, batch, specs=plan.specs, gathered=plan.gathered, mesh=CUBE)
    approximately(found, right, 1e-5)
