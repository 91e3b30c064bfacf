"""Arrays that loops close over, and multiply with weights: what is made of them in one is not known in another."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding import derive
from tests.sharding.beside import CUBE, MESH, approximately, draw, on_mesh, slowly

BATCH, WIDTH, LAYERS = 16, 64, 3
TENSOR = {"data": 1, "fsdp": 1, "tensor": 8}
MESHES = {"tensor": TENSOR, "fsdp and tensor": MESH, "cube": CUBE}


def meets(x):
    return lambda h, w: (jnp.tanh(h + x @ w), None)


def in_two_loops(p, x):
    return jax.lax.scan(meets(x), jax.lax.scan(meets(x), x, p["u"])[0], p["v"])[0]


def in_a_loop_and_after_it(p, x):
    return jax.lax.scan(meets(x), x, p["u"])[0] + x @ p["v"][0]


def in_a_loop_in_a_loop(p, x):
    def outer(h, layer):
        u, v = layer
        inner = jax.lax.scan(lambda h, _: (jnp.tanh(h + x @ u), None), h, None, length=2)[0]
        return jnp.tanh(inner + x @ v), None

    return jax.lax.scan(outer, x, (p["u"], p["v"]))[0]


def reshaped_in_two_loops(p, x):
    def part(h, w):
        return jnp.tanh(h + x.reshape(BATCH, 2, -1)[:, 0] @ w[: WIDTH // 2]), None

    return jax.lax.scan(part, jax.lax.scan(part, x, p["u"])[0], p["v"])[0]


def state_of_a_loop_around_it(p, x):
    def outer(h, w):
        inner = jax.lax.scan(meets(h), jnp.zeros_like(h), p["u"])[0]
        return jnp.tanh(inner + h @ w), None

    return jax.lax.scan(outer, x, p["v"])[0]


def in_both_branches(p, x):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ p["u"][0]), lambda: x @ p["v"][0]) + x @ p["u"][1]


@pytest.mark.parametrize("mesh", ["cube", *slowly("tensor", "fsdp and tensor")])
@pytest.mark.parametrize(
    "function",
    [
        in_two_loops,
        in_a_loop_and_after_it,
        in_a_loop_in_a_loop,
        reshaped_in_two_loops,
        state_of_a_loop_around_it,
        in_both_branches,
    ],
)
def test_numbers_are_those_of_one_device(function, mesh):
    params = {name: draw(LAYERS, WIDTH, WIDTH, seed=seed) / 3 for seed, name in enumerate("uv")}

    def loss(params, batch):
        return jnp.square(function(params, batch["x"])).mean()

    batch = {"x": draw(BATCH, WIDTH, seed=2)}
    plan = derive(loss, params, batch, MESHES[mesh])
    found, right = on_mesh(loss, params, batch, specs=plan.specs, gathered=plan.gathered, mesh=MESHES[mesh])
    approximately(found, right, 1e-5)
