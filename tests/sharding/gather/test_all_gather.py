"""A parameter in shards of one dim, put together: the same numbers, along the dim that changes slowest."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.gather.all_gather import all_gather
from tests.sharding.measure import device_mesh
from tests.sharding.trial import attempt

MESH = {"data": 1, "fsdp": 4, "tensor": 2}
LAYERS, EXPERTS, D, F, ROWS = 3, 3, 64, 48, 16


@pytest.mark.parametrize(
    ("lives", "used", "place"),
    [
        (P(None, "fsdp"), P(), 1),
        (P(None, "fsdp", "tensor"), P(None, None, "tensor"), 1),
        (P("tensor", "fsdp"), P("tensor"), 1),
        (P(None, ("tensor", "fsdp")), P(None, "tensor"), 1),
        (P("fsdp", None, "tensor"), P(None, None, "tensor"), None),  # the slowest already
        (P(None, "fsdp", "tensor"), P(), None),  # over two axes: left to XLA
        (P(None, "fsdp"), P("tensor"), None),
        (P(None, "fsdp"), P(None, "fsdp"), None),
        (P(None, None, "fsdp"), P(), None),  # 34 numbers over 4 devices
    ],
)
def test_what_is_put_together_lies_along_the_dim_that_was_split(lives, used, place):
    mesh = device_mesh(MESH)
    x = np.random.default_rng(0).normal(size=(8, 16, 34)).astype(np.float32)
    shards = jax.device_put(x, NamedSharding(mesh, lives if "fsdp" not in lives[2:] else P()))
    lowered = jax.jit(lambda x: all_gather(x, mesh, lives, used)).lower(shards)
    found = lowered.compile()(shards)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, used), x.ndim)
    np.testing.assert_array_equal(found, x)
    orders = re.findall(r"result_layouts = \[dense<\[(.*?)\]>", lowered.as_text())
    slowest = [None if place is None else int(order.split(", ")[-1]) for order in orders]
    assert slowest == ([] if place is None else [0, place])


def layers(params, batch):
    def layer(x, own):
        made = jnp.einsum("bd,kdf->bkf", x, own["in"])
        return x + jnp.einsum("bkf,kfd->bd", jnp.tanh(made), own["out"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
    return (x * x).mean()


@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_stacks_of_several_weights_equal_one_device(mesh):
    rng = np.random.default_rng(0)
    shapes = {"in": (LAYERS, EXPERTS, D, F), "out": (LAYERS, EXPERTS, F, D)}
    params = {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    batch = {"x": rng.normal(size=(ROWS, D)).astype(np.float32)}
    plan = derive(layers, params, batch, {"tensor": 1, **mesh})
    assert all("fsdp" in str(spec[2:]) for spec in (plan.specs["in"], plan.specs["out"]))
    found = attempt(layers, params, batch, plan)
    assert found.loss < 1e-5
    assert max(found.gradients.values()) < 1e-5
