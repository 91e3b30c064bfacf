"""Recurrent networks over `tensor`: their weights have the hidden features on both ends."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.gather.gathering import gathering
from tests.sharding.beside import CUBE, MESH, approximately, draw, on_mesh, slowly
from tests.sharding.measure import QUICKLY, device_mesh

BATCH, STEPS, INPUTS, HIDDEN, OUTPUTS = 32, 24, 32, 128, 8
TENSOR = {"data": 1, "fsdp": 1, "tensor": 8}
MESHES = {"tensor": TENSOR, "fsdp and tensor": MESH, "cube": CUBE}


def over_time(cell, states):
    def loss(params, batch):
        start = (jnp.zeros((BATCH, HIDDEN)),) * states
        step = lambda state, x: (state := cell(params, state, x), state[0])  # noqa: E731
        return jnp.square(jax.lax.scan(step, start, batch["x"].swapaxes(0, 1))[1] @ params["out"]).mean()

    return loss


def elman(p, state, x):
    return (jnp.tanh(x @ p["x0"] + state[0] @ p["h0"]),)


def gates_in_one(p, state, x):
    h, c = state
    i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gates_apart(p, state, x):
    h, c = state
    i, f, g, o = (x @ p[f"x{gate}"] + h @ p[f"h{gate}"] for gate in range(4))
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def of_gates(gates):
    both = {f"x{gate}": draw(INPUTS, HIDDEN, seed=gate) for gate in range(gates)}
    return both | {f"h{gate}": draw(HIDDEN, HIDDEN, seed=9 + gate) / 4 for gate in range(gates)}


def in_one(gates):
    apart = of_gates(gates)
    return {end: jnp.concatenate([apart[f"{end}{gate}"] for gate in range(gates)], 1) for end in "xh"}


CELLS = {
    "elman": (over_time(elman, 1), of_gates(1)),
    "gates in one": (
        over_time(gates_in_one, 2),
        {"x": draw(INPUTS, 4 * HIDDEN), "h": draw(HIDDEN, 4 * HIDDEN, seed=1)},
    ),
    "gates apart": (over_time(gates_apart, 2), of_gates(4)),
}


def job(name):
    loss, params = CELLS[name]
    return loss, params | {"out": draw(HIDDEN, OUTPUTS, seed=20)}, {"x": draw(BATCH, STEPS, INPUTS, seed=21)}


@pytest.mark.parametrize("mesh", ["tensor", *slowly("fsdp and tensor", "cube")])
@pytest.mark.parametrize("name", CELLS)
def test_numbers_are_those_of_one_device(name, mesh):
    loss, params, batch = job(name)
    plan = derive(loss, params, batch, MESHES[mesh])
    found, right = on_mesh(loss, params, batch, specs=plan.specs, gathered=plan.gathered, mesh=MESHES[mesh])
    approximately(found, right, 1e-5)


def found_and_predicted(name, mesh):
    """Collectives of a step, and those of its plan."""
    loss, params, batch = job(name)
    plan = derive(loss, params, batch, mesh)
    devices = device_mesh(mesh)
    places = jax.tree.map(lambda spec: NamedSharding(devices, spec), plan.specs)
    over_batch = {"x": NamedSharding(devices, P(("data", "fsdp")))}
    gathers = gathering(loss, plan.specs, plan.gathered, devices, usage=plan.usage)
    step = jax.jit(
        jax.value_and_grad(gathers),
        in_shardings=(places, over_batch),
        out_shardings=(None, places),
        compiler_options=QUICKLY,
    )
    return compiled_collectives(step.lower(params, batch).compile(), mesh), plan.collectives


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", CELLS)
def test_states_are_put_together_twice_in_each_step(name, mesh):
    """There, and as it goes back, for all gates together; a CPU adds up their gradients in another way."""
    found, predicted = found_and_predicted(name, mesh)
    states = sum(one.bytes for one in predicted if one.axis == "tensor" and "input of a matmul" in one.what)
    assert states == 2 * STEPS * 4 * BATCH // (mesh["data"] * mesh["fsdp"]) * HIDDEN
    gathered = sum(one.bytes * one.count for one in found if one.kind == "all-gather" and one.count % STEPS == 0)
    assert gathered == pytest.approx(states, rel=0.1)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_gates_in_one_are_told_apart_before_the_loop(mesh):
    found, _ = found_and_predicted("gates in one", mesh)
    exchanged = [one for one in found if one.kind in ("all-to-all", "collective-permute")]
    assert exchanged
    assert all(one.count < STEPS for one in exchanged)
