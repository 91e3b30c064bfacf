"""Weights that a loop uses in every iteration: the numbers of one device, and each gradient moved once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.gather.gathering import gathering
from tests.sharding.beside import CUBE, MESH, approximately, draw, in_parts, on_mesh
from tests.sharding.measure import QUICKLY, device_mesh

STEPS, BATCH, WIDTH = 6, 8, 16
DATA = {"data": 8, "fsdp": 1, "tensor": 1}
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
BOTH = {"data": 2, "fsdp": 4, "tensor": 1}
MESHES = {"data": DATA, "fsdp": FSDP, "data and fsdp": BOTH, "fsdp and tensor": MESH, "cube": CUBE}
QUICK_AND_SLOW = [pytest.param(mesh, marks=pytest.mark.slow if " and " in mesh else ()) for mesh in MESHES]


def recurrent(cell):
    """Runs `cell(params, h, x) -> h` over the steps of x [B, T, H]: all of its states."""

    def run(params, x):
        def step(h, now):
            h = cell(params, h, now)
            return h, h

        return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1]

    return run


def plain(p, h, x):
    return jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])


def gates_side_by_side(p, h, x):
    """As an LSTM has them: kernels that are put together in each step, a bias likewise."""
    both = h @ jnp.concatenate([p["w"], p["u"]], 1) + jnp.concatenate([p["b"], p["b"]])[None]
    one, other = jnp.split(both, 2, 1)
    return jnp.tanh(one * jax.nn.sigmoid(other) + x)


def in_narrow_numbers(p, h, x):
    narrow = [jnp.bfloat16(a) for a in (x, p["w"], h, p["u"])]
    return jnp.tanh(narrow[0] @ narrow[1] + narrow[2] @ narrow[3]).astype(jnp.float32)


def of_a_weight_made_in_the_loop(p, h, x):
    normed = p["w"] / (1 + jnp.linalg.norm(p["w"], axis=0, keepdims=True))
    return jnp.tanh(x @ normed + h @ p["u"].T)


def with_a_loop_inside(p, h, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["u"] + x @ p["w"]), None), h, length=2)[0]


def with_numbers_and_a_look(p, h, x):
    """Numbers that are written in the program, and an operation that has no result."""
    jax.debug.callback(lambda _: None, h.sum())
    return jnp.tanh(x @ (p["w"] * 0.5) + h @ (p["u"] - p["u"].mean(0)) + p["b"])


def masked(p, h, x):
    """By a mask that is drawn for all steps, and by numbers of the program."""
    mask = jax.random.bernoulli(jax.random.key(0), 0.9, p["u"].shape)
    return jnp.tanh(x @ (p["w"] * np.eye(WIDTH, dtype=np.float32)) + h @ jnp.where(mask, p["u"], 0) + p["b"])


CELLS = {
    "plain": plain,
    "gates side by side": gates_side_by_side,
    "in narrow numbers": in_narrow_numbers,
    "of a weight that is made in the loop": of_a_weight_made_in_the_loop,
    "masked": masked,
    "rematerialised": lambda p, h, x: jax.checkpoint(plain)(p, h, x),
    "in a jit": lambda p, h, x: jax.jit(plain)(p, h, x),
    "with a loop inside": with_a_loop_inside,
    "twice, and in no product": lambda p, h, x: jnp.tanh(plain(p, h, x) @ p["w"] + p["w"].sum() + p["u"][:BATCH]),
    "with numbers, and a look": with_numbers_and_a_look,
    "scaled by a vector": lambda p, h, x: jnp.tanh(x @ (p["w"] * x.mean() * p["b"]) + h @ (p["u"] * 0.5 * p["b"])),
    "in a loop over layers": lambda p, h, x: jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ (w * p["b"]) + x), None), h, jnp.stack([p["w"], p["u"]])
    )[0],
    "with products of weights": lambda p, h, x: jnp.tanh(x @ (p["w"] @ p["u"]) + h),
    "under a condition": lambda p, h, x: jax.lax.cond(
        x.sum() > 0, plain, lambda p, h, x: jnp.tanh(h @ p["w"]), p, h, x
    ),
}

QUICK_CELLS = ("plain", "gates side by side", "masked", "with numbers, and a look")


def weights():
    return {"w": draw(WIDTH, WIDTH), "u": draw(WIDTH, WIDTH, seed=1), "b": draw(WIDTH, seed=2)}


def inputs():
    return draw(BATCH, STEPS, WIDTH, seed=3)


def layouts(mesh):
    """Where matrices and vectors live, and where they are used."""
    tensor = "tensor" if mesh["tensor"] > 1 else None
    matrix, used = P("fsdp" if mesh["fsdp"] > 1 else None, tensor), P(None, tensor)
    return {"w": matrix, "u": matrix, "b": P()}, {"w": used, "u": used, "b": P()}


@pytest.mark.parametrize("mesh", QUICK_AND_SLOW)
@pytest.mark.parametrize(
    "name", [name if name in QUICK_CELLS else pytest.param(name, marks=pytest.mark.slow) for name in CELLS]
)
def test_numbers_are_those_of_one_device(name, mesh):
    specs, gathered = layouts(MESHES[mesh])
    found, right = on_mesh(
        recurrent(CELLS[name]), weights(), inputs(), specs=specs, gathered=gathered, mesh=MESHES[mesh]
    )
    approximately(found, right, 3e-2 if "narrow" in name else 1e-5)


@pytest.mark.parametrize("mesh", ["data", "cube"])
@pytest.mark.parametrize("name", ["gates side by side", "of a weight that is made in the loop"])
def test_micro_batches_add_up_parts_of_each_replica(name, mesh):
    specs, gathered = layouts(MESHES[mesh])
    _, found, right = in_parts(
        recurrent(CELLS[name]), weights(), inputs(), specs=specs, gathered=gathered, mesh=MESHES[mesh]
    )
    approximately(found, right, 1e-5)


def test_gathered_again_they_are_the_same():
    specs, gathered = layouts(BOTH)
    function = recurrent(gates_side_by_side)
    found, right = on_mesh(
        function, weights(), inputs(), specs=specs, gathered=gathered, mesh=BOTH, reshard_after_forward=True
    )
    approximately(found, right, 1e-5)


@pytest.mark.parametrize("mesh", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data", "cube"))])
def test_what_weights_are_multiplied_with_has_a_gradient_too(mesh):
    """What a loop multiplies its weights with may be made of weights before it, and of examples."""

    def function(params, x):
        gain, of_all = jnp.exp(params["b"]), jnp.tanh(x.mean((0, 1)))
        return recurrent(lambda p, h, x: jnp.tanh(x @ (p["w"] * gain) + h @ (p["u"] * of_all)))(params, x)

    specs, gathered = layouts(MESHES[mesh])
    found, right = on_mesh(function, weights(), inputs(), specs=specs, gathered=gathered, mesh=MESHES[mesh])
    approximately(found, right, 1e-5)


def collectives(cell, mesh):
    """What one forward and backward pass moves, by kind and axes: how often, and bytes; and what was predicted."""
    params, x = weights(), inputs()

    def loss(params, batch):
        return recurrent(cell)(params, batch["x"]).sum()

    plan = derive(loss, params, {"x": x}, mesh)
    devices = device_mesh(mesh)
    places = jax.tree.map(lambda spec: NamedSharding(devices, spec), plan.specs)
    batch = {"x": NamedSharding(devices, P(("data", "fsdp")))}
    gathers = gathering(loss, plan.specs, plan.gathered, devices)
    step = jax.jit(
        jax.value_and_grad(gathers),
        in_shardings=(places, batch),
        out_shardings=(None, places),
        compiler_options=QUICKLY,
    )
    return compiled_collectives(step.lower(params, {"x": x}).compile(), mesh), plan.collectives


@pytest.mark.parametrize("name", ["plain", "gates side by side", "masked", "rematerialised"])
@pytest.mark.parametrize("mesh", ["data", "fsdp", "data and fsdp"])
def test_nothing_moves_in_an_iteration(name, mesh):
    found, _ = collectives(CELLS[name], MESHES[mesh])
    assert found
    assert all(one.count < STEPS for one in found)


def test_what_moves_is_what_was_predicted():
    """Each gradient once, as one element of it on every device says: three sums of the gradients over `data`."""
    found, predicted = collectives(plain, DATA)
    sums = sum(one.bytes for one in found if one.kind == "all-reduce")
    scalars = 4  # the loss
    assert sums - scalars == sum(one.bytes for one in predicted) == 4 * (2 * WIDTH * WIDTH + WIDTH)


def test_sums_over_many_steps_are_as_exact_as_without_a_mesh():
    """A weight that is cast in the loop has a gradient that is added up in float32."""

    def run(params, x):
        def step(total, now):
            return total + (now.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32), None

        return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0]

    params, x = {"w": np.ones((16, 16), np.float32)}, np.ones((8, 600, 16), np.float32)
    found, right = on_mesh(run, params, x, specs={"w": P("fsdp")}, gathered={"w": P()}, mesh=FSDP)
    assert jnp.asarray(right[1][0]["w"]).min() == 8 * 600
    np.testing.assert_allclose(found[1][0]["w"], right[1][0]["w"], rtol=1e-2)


def test_a_program_without_such_loops_is_left_alone():
    layers = np.stack([draw(WIDTH, WIDTH, seed=seed) for seed in range(3)])

    def stacked(layers, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]

    gathers = gathering(stacked, P(), P(), device_mesh(DATA))
    x = draw(BATCH, WIDTH, seed=4)
    assert str(jax.make_jaxpr(gathers)(layers, x)) == str(jax.make_jaxpr(stacked)(layers, x))
