"""A `shard_map` inside a loss is read through its specs: planned as the same without it, and computed alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.program.reading import read
from tests.sharding.measure import device_mesh
from tests.sharding.shorthand import f32
from tests.sharding.trial import compiled

SIZES = {"data": 2, "fsdp": 1, "tensor": 4}
PARAMS = {"down": f32(256, 64), "head": f32(64, 64), "up": f32(64, 256)}
BATCH = {"x": f32(16, 64)}


def mlp(up, down, x):
    return jnp.tanh(x @ up) @ down


def plain(params, batch):
    return (mlp(params["up"], params["down"], batch["x"]) @ params["head"]).sum()


def by_hand(params, batch):
    """The same on shards, the partial sums of which are added up."""
    mapped = jax.shard_map(
        lambda up, down, x: jax.lax.psum(mlp(up, down, x), "tensor"),
        mesh=device_mesh(SIZES),
        in_specs=(P(None, "tensor"), P("tensor"), P("data")),
        out_specs=P("data"),
    )
    return (mapped(params["up"], params["down"], batch["x"]) @ params["head"]).sum()


def moved(plan):
    return sorted((one.kind, one.axis, one.bytes) for one in plan.collectives)


def test_the_plan_is_that_of_the_same_without_it():
    expected, found = (derive(loss, PARAMS, BATCH, SIZES) for loss in (plain, by_hand))
    assert (found.specs, found.gathered) == (expected.specs, expected.gathered)
    assert found.warnings == ()
    assert moved(found) == moved(expected)
    reasons = {row.path: row.reason for row in found.rows}
    assert reasons["up"] == reasons["down"] == "split by a shard_map: 256, 64 on each device"


def test_loss_and_gradients_are_those_of_the_same_without_it():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: 0.1 * jax.random.normal(key, PARAMS[name].shape) for name, key in zip(PARAMS, keys, strict=False)}
    batch = {"x": jax.random.normal(keys[3], (16, 64))}
    value, gradients = jax.value_and_grad(plain)(params, batch)
    step, (stored, split) = compiled(by_hand, params, batch, derive(by_hand, PARAMS, BATCH, SIZES))
    found, divided = step(jax.device_put(params, stored), jax.device_put(batch, split))
    np.testing.assert_allclose(found, value, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4), divided, gradients)


@pytest.mark.parametrize(
    ("inside", "specs", "out", "same"),
    [
        (
            lambda w, x: x @ jax.lax.all_gather(w, "tensor", axis=1, tiled=True),
            (P(None, "tensor"), P("data")),
            P("data"),
            1,
        ),
        (lambda w, x: x @ w, (P(None, "tensor"), P("data")), P("data", "tensor"), 1),
        (lambda w, x: x @ jax.lax.pmax(w, "data") + jax.lax.axis_index("tensor"), (P(), P("data")), P("data"), 1),
    ],
)
def test_dims_outside_are_what_they_are_inside(inside, specs, out, same):
    """The dim that a weight makes is one axis with what is multiplied next."""

    def loss(params, batch):
        mapped = jax.shard_map(inside, mesh=device_mesh(SIZES), in_specs=specs, out_specs=out, check_vma=False)
        return (mapped(params["up"], batch["x"]) @ params["down"]).sum()

    reading = read(loss, {"down": PARAMS["down"], "up": PARAMS["up"]}, BATCH)
    down, up = reading.parameters
    assert reading.unknown == ()
    assert up.dims[same] == down.dims[0]


def test_what_is_printed_is_no_unknown_operation(capfd):
    def loss(params, batch):
        jax.debug.print("{}", batch["x"].sum() + params["up"].sum())
        jax.debug.callback(lambda x: None, params["up"])
        return plain(params, batch)

    expected, found = (derive(one, PARAMS, BATCH, SIZES) for one in (plain, loss))
    assert (found.specs, found.warnings) == (expected.specs, ())
