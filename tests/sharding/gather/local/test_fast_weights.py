"""Weights that examples adapt in a loop, as in meta-learning: split where they begin, each gradient moved once."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding import derive
from redco_cli.sharding.plan import as_dims
from redco_cli.sharding.rings import sent_bytes
from tests.sharding.beside import CUBE, approximately, draw, in_parts, moved, on_mesh, slowly

TASKS, SHOTS, WIDTH, HIDDEN, ANSWERS = 8, 4, 64, 1024, 4
BOTH = {"data": 2, "fsdp": 4, "tensor": 1}
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
MESHES = {"data and fsdp": BOTH, "cube": CUBE, "fsdp": FSDP}


def answers(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def missed(weights, x, y):
    return jnp.square(answers(weights, x) - y).mean()


def adapted(params, batch, steps=3):
    """The loss of each task after some steps on its own examples."""

    def of_a_task(x, y, asked, right):
        def step(weights, _):
            gradient = jax.grad(missed)(weights, x, y)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), None

        return missed(jax.lax.scan(step, params, None, length=steps)[0], asked, right)

    return jax.vmap(of_a_task)(*(batch[name] for name in ("x", "y", "asked", "right"))).mean()


def weights():
    return {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, ANSWERS, seed=1)}


def tasks():
    names, sizes = ("x", "y", "asked", "right"), (WIDTH, ANSWERS, WIDTH, ANSWERS)
    return {name: draw(TASKS, SHOTS, size, seed=2 + k) for k, (name, size) in enumerate(zip(names, sizes, strict=True))}


@pytest.mark.parametrize("mesh", ["cube", *slowly("data and fsdp", "fsdp")])
def test_numbers_are_those_of_one_device(mesh):
    plan = derive(adapted, weights(), tasks(), MESHES[mesh])
    found, right = on_mesh(adapted, weights(), tasks(), specs=plan.specs, gathered=plan.gathered, mesh=MESHES[mesh])
    approximately(found, right, 1e-5)


def test_micro_batches_add_up_parts_of_each_replica():
    plan = derive(adapted, weights(), tasks(), CUBE)
    _, found, right = in_parts(adapted, weights(), tasks(), specs=plan.specs, gathered=plan.gathered, mesh=CUBE)
    approximately(found, right, 1e-5)


def test_they_are_split_as_weights_that_no_loop_adapts():
    """The first step multiplies with parameters, later ones with what the examples made of them."""
    plan = derive(adapted, weights(), tasks(), CUBE)
    assert [as_dims(plan.gathered[name], 2) for name in ("up", "down")] == [((), ("tensor",)), (("tensor",), ())]


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_what_moves_is_what_was_predicted(mesh):
    plan = derive(adapted, weights(), tasks(), mesh)
    predicted = sum(sent_bytes(one, mesh) for one in plan.collectives)
    assert moved(adapted, weights(), tasks(), mesh) == pytest.approx(predicted, rel=0.02)


def test_what_is_repeated_for_something_else_is_left_alone():
    """Of as many rows as there are tasks, and yet of none of them."""

    def loss(params, batch):
        def step(weights, _):
            return jnp.tanh(weights * params["scale"]), None

        rows = jax.lax.scan(step, jnp.broadcast_to(params["up"], (TASKS, WIDTH, HIDDEN)), None, length=2)[0]
        return (rows.sum(0) * (batch["x"].sum((0, 1))[:, None])).mean()

    params = {"up": draw(WIDTH, HIDDEN), "scale": draw(HIDDEN, seed=1)}
    plan = derive(loss, params, tasks(), CUBE)
    found, right = on_mesh(loss, params, tasks(), specs=plan.specs, gathered=plan.gathered, mesh=CUBE)
    approximately(found, right, 1e-5)
