"""Gathering parameters where they are used: the same numbers whatever a program does with them, and no more moved."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.compiled.traffic import compiled_collectives, total_bytes
from redco_cli.sharding.gather.gathering import gathering
from tests.sharding.beside import CUBE, MESH, approximately, draw, in_parts, on_mesh, slowly
from tests.sharding.measure import device_mesh
from tests.sharding.programs.catalogue import program
from tests.sharding.programs.small import doubled
from tests.sharding.trial import attempt, expected

STORED, USED = P("fsdp", "tensor"), P(None, "tensor")


def layer(x, w):
    return jnp.tanh(x @ w)


FUNCTIONS = {
    "a matmul": lambda w, x: layer(x, w),
    "twice": lambda w, x: layer(layer(x, w), w),
    "transposed": lambda w, x: layer(x, w.T),
    "in another precision": lambda w, x: layer(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32),
    "in a jit": lambda w, x: jax.jit(layer)(x, w),
    "in a jit in a jit": lambda w, x: jax.jit(lambda w: jax.jit(layer)(x, w))(w),
    "in a remat": lambda w, x: jax.checkpoint(layer)(x, w),
    "in a remat that saves products": lambda w, x: jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    )(x, w),
    "in a remat in a jit": lambda w, x: jax.jit(jax.checkpoint(layer))(x, w),
    "in a scan, the same in each round": lambda w, x: jax.lax.scan(lambda c, _: (layer(c, w), c), x, None, length=3),
    "in a scan, backwards": lambda w, x: jax.lax.scan(
        lambda c, now: (layer(c, w) + now, c.sum()), x, jnp.arange(4.0), reverse=True
    ),
    "in an unrolled scan": lambda w, x: jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, length=4, unroll=2)[0],
    "in a scan that carries it": lambda w, x: jax.lax.scan(
        lambda c, _: ((layer(c[0], c[1]), c[1] * 0.9), None), (x, w), None, length=3
    )[0],
    "in a scan in a scan": lambda w, x: jax.lax.fori_loop(
        0, 2, lambda _, c: jax.lax.fori_loop(0, 2, lambda _, d: layer(d, w), c), x
    ),
    "in a remat in a scan": lambda w, x: jax.lax.scan(
        lambda c, _: (jax.checkpoint(layer)(c, w), None), x, None, length=3
    )[0],
    "in a branch": lambda w, x: jax.lax.cond(x.sum() > -1e9, lambda: layer(x, w), lambda: x),
    "with a derivative of its own": lambda w, x: layer(x, doubled(w)),
    "with a forward derivative of its own": lambda w, x: x @ jax.nn.relu(w),
    "in a differential equation": lambda w, x: odeint(
        lambda y, _, w: layer(y, w) - y, x, jnp.array([0.0, 0.5, 1.0]), w, rtol=1e-7, atol=1e-7
    )[-1],
    "under vmap": lambda w, x: jax.vmap(lambda one: layer(one, w))(x),
    "in an inner gradient": lambda w, x: jax.grad(lambda w: layer(x, w).sum())(w) * w,
    "returned as it is": lambda w, x: (w, x),
    "not used": lambda w, x: x * 2,
    "with a constant": lambda w, x: layer(x, w + jnp.eye(16)),
    "a tree of results": lambda w, x: {"y": layer(x, w), "more": [w.sum(), x.mean()]},
    "without a gradient": lambda w, x: layer(x, jax.lax.stop_gradient(w)) + w.sum(),
    "indexed": lambda w, x: x @ w[:, 3] + w[jnp.array([1, 2, 3])].sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_is_done_with_a_parameter(name):
    found, right = on_mesh(FUNCTIONS[name], draw(16, 16), draw(8, 16, seed=1), specs=STORED, gathered=USED)
    assert jax.tree.structure(found) == jax.tree.structure(right)
    approximately(found, right, 2e-2 if "precision" in name else 1e-5 if "equation" in name else 2e-6)


@pytest.mark.parametrize(
    "name", ["a matmul", "transposed", "in a remat in a scan", "in a branch", "in an inner gradient"]
)
def test_whatever_is_done_with_a_parameter_that_is_gathered_again(name):
    found, right = on_mesh(
        FUNCTIONS[name], draw(16, 16), draw(8, 16, seed=1), specs=STORED, gathered=USED, reshard_after_forward=True
    )
    approximately(found, right)


QUICK = ("a matmul", "transposed", "in another precision", "in a remat in a scan", "with a constant", "not used")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FUNCTIONS]
)
def test_whatever_is_done_with_a_parameter_that_has_replicas(name):
    """Their gradients are scattered first, and added up over `data` then."""
    found, right = on_mesh(FUNCTIONS[name], draw(16, 16), draw(8, 16, seed=1), specs=STORED, gathered=USED, mesh=CUBE)
    approximately(found, right, 2e-2 if "precision" in name else 2e-6)


AGAIN = {
    "twice": FUNCTIONS["twice"],
    "looked up, and multiplied": lambda w, x: layer(w[jnp.abs(x[:, :3] * 40).astype(int) % 16].sum(1), w.T),
    "in a remat, and outside": lambda w, x: layer(jax.checkpoint(layer)(x, w), w),
    "in a scan, and outside": lambda w, x: layer(jax.lax.fori_loop(0, 2, lambda _, c: layer(c, w), x), w),
    "by itself, and in a product": lambda w, x: layer(x, w) + (w * w).sum(),
    "in another precision the second time": lambda w, x: layer(layer(x, w), w.astype(jnp.bfloat16)).astype(jnp.float32),
    "returned, too": lambda w, x: (w, layer(x, w)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "twice" else pytest.mark.slow) for name in AGAIN]
)
def test_a_parameter_in_several_places(name, monkeypatch):
    """Small ones are left to the compiler."""
    monkeypatch.setattr("redco_cli.sharding.gather.replicas.SMALL", 0)
    found, right = on_mesh(AGAIN[name], draw(16, 16), draw(8, 16, seed=1), specs=STORED, gathered=USED, mesh=CUBE)
    approximately(found, right, 2e-2 if "precision" in name else 2e-6)


def tied(table, ids):
    rows = jnp.tanh(table[ids]).astype(jnp.bfloat16)
    return jax.nn.logsumexp((rows @ table.T.astype(jnp.bfloat16)).astype(jnp.float32), axis=-1)


def test_replicas_add_up_the_gradient_of_a_table_once_for_all_of_its_uses():
    """And in the precision in which products take it."""
    mesh, table = {"data": 2, "fsdp": 4, "tensor": 1}, draw(4096, 64)
    ids = np.random.default_rng(0).integers(0, 4096, (8, 4)).astype(np.int32)
    devices = device_mesh(mesh)
    places = NamedSharding(devices, P(None, "fsdp")), NamedSharding(devices, P(("data", "fsdp")))
    gathers = gathering(tied, P(None, "fsdp"), P(), devices)
    step = jax.jit(jax.grad(lambda w, ids: gathers(w, ids).sum()), in_shardings=places, out_shardings=places[0])
    moved = compiled_collectives(step.lower(table, ids).compile(), mesh)
    over_data = [one.count * one.bytes for one in moved if "data" in one.axes and one.bytes > 2**12]
    assert over_data == [table.nbytes // 4]  # a CPU adds up bfloat16 in float32


@pytest.mark.parametrize("mesh", [CUBE, {"data": 8, "fsdp": 1, "tensor": 1}], ids=["cube", "data"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FUNCTIONS]
)
def test_the_parts_of_a_gradient_add_up(name, mesh):
    where = {"specs": STORED, "gathered": USED} if mesh is CUBE else {"specs": P(), "gathered": P()}
    parts, found, right = in_parts(FUNCTIONS[name], draw(16, 16), draw(8, 16, seed=1), **where, mesh=mesh)
    assert parts.shape == (16, 16, mesh["data"])
    approximately(found, right, 2e-2 if "precision" in name else 2e-6)


@pytest.mark.parametrize("name", ["a matmul", "twice", "transposed", "in a remat in a scan", "under vmap"])
def test_each_replica_has_the_gradient_of_its_own_examples(name):
    mesh, w, x = {"data": 2, "fsdp": 4, "tensor": 1}, draw(16, 16), draw(8, 16, seed=1)
    parts, _, _ = in_parts(FUNCTIONS[name], w, x, specs=P("fsdp"), gathered=P(), mesh=mesh)
    for replica, own in enumerate((x[:4], x[4:])):
        right = jax.grad(lambda w, own=own: FUNCTIONS[name](w, own).sum())(w)
        approximately(parts[..., replica], right)


def stacked(params, x):
    return jax.lax.scan(lambda x, p: (layer(x, p["a"]) @ p["b"] + x, None), x, params)[0]


@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_stacked_layers(reshard_after_forward):
    params = {"a": draw(3, 16, 32), "b": draw(3, 32, 16)}
    specs = {"a": P(None, "fsdp", "tensor"), "b": P(None, "tensor", "fsdp")}
    used = {"a": P(None, None, "tensor"), "b": P(None, "tensor")}
    found, right = on_mesh(
        stacked, params, draw(8, 16, seed=1), specs=specs, gathered=used, reshard_after_forward=reshard_after_forward
    )
    approximately(found, right)
    _, found, right = in_parts(stacked, params, draw(8, 16, seed=1), specs=specs, gathered=used, mesh=CUBE)
    approximately(found, right)


def test_a_parameter_that_is_stored_in_shards_of_the_tensor_axis():
    found, right = on_mesh(
        FUNCTIONS["twice"], draw(16, 16), draw(8, 16, seed=1), specs=P("tensor", "fsdp"), gathered=P()
    )
    approximately(found, right)


def test_a_parameter_that_is_used_in_uneven_parts():
    found, right = on_mesh(FUNCTIONS["a matmul"], draw(16, 15), draw(8, 16, seed=1), specs=P("tensor"), gathered=USED)
    approximately(found, right)


def test_a_parameter_in_shards_that_is_used_in_uneven_parts():
    found, right = on_mesh(
        FUNCTIONS["a matmul"], draw(16, 15), draw(8, 16, seed=1), specs=P("fsdp"), gathered=USED, mesh=CUBE
    )
    approximately(found, right)


@jax.custom_vjp
def multiplied(w, x):
    """A product with a derivative of its own."""
    return jnp.tanh(x @ w)


def _multiplied_backward(kept, gradient):
    w, x, y = kept
    before = gradient * (1 - y**2)
    return x.T @ before, before @ w.T


multiplied.defvjp(lambda w, x: (multiplied(w, x), (w, x, multiplied(w, x))), _multiplied_backward)


def test_a_large_gradient_that_cannot_be_taken_apart_is_scattered_over_both_axes():
    """One of a function with a derivative of its own: XLA would add up all of it over `data` and `fsdp`."""
    x, w, own = draw(8, 512, seed=1), draw(512, 1024), multiplied
    found, right = on_mesh(own, w, x, specs=P("fsdp"), gathered=P(), mesh={"data": 2, "fsdp": 4, "tensor": 1})
    approximately(found, right, 1e-5)
    devices = device_mesh({"data": 2, "fsdp": 4, "tensor": 1})
    places = NamedSharding(devices, P("fsdp")), NamedSharding(devices, P(("data", "fsdp")))
    gathers = gathering(own, P("fsdp"), P(), devices)
    step = jax.jit(jax.grad(lambda w, x: gathers(w, x).sum()), in_shardings=places, out_shardings=places[0])
    moved = compiled_collectives(step.lower(w, x).compile(), dict(devices.shape))
    assert [(one.axes, one.bytes) for one in moved if one.kind == "collective-permute"] == [
        (("data", "fsdp"), w.nbytes // 8)
    ]
    assert [(one.axes, one.bytes) for one in moved if one.axes == ("data",)] == [(("data",), w.nbytes // 4)]


def experts(w, x, remat=False):
    """Each of four [16, 16] on rows of its own, x [B, 4, C, 16]; where sums are large, one after another once more."""

    def once_more(x, w):
        return jax.lax.scan(lambda sum_, one: (sum_ + layer(x[:, 0], one), None), jnp.zeros_like(x[:, 0]), w)[0]

    usual = jnp.tanh(jnp.einsum("bxce,xef->bxcf", x, w)).sum(1)
    if remat:
        once_more = jax.checkpoint(once_more)
    return usual + jax.lax.cond(x.sum() > 0, once_more, lambda x, _: jnp.zeros_like(usual), x, w)


@pytest.mark.parametrize("sign", [1, -1], ids=["taken", "not taken"])
@pytest.mark.parametrize(
    ("stored", "used"),
    [
        (P(None, "fsdp", "tensor"), P(None, None, "tensor")),
        (P("fsdp", None, "tensor"), P(None, None, "tensor")),
        (P("tensor", "fsdp"), P("tensor")),
    ],
    ids=["in a dim of each", "as whole experts", "whole ones over tensor"],
)
@pytest.mark.parametrize("mesh", [pytest.param(MESH, marks=pytest.mark.slow), CUBE], ids=["fsdp", "cube"])
@pytest.mark.parametrize("remat", [True, *slowly(False)], ids=["computed once more", "kept"])
def test_experts_in_a_branch_too(mesh, stored, used, sign, remat):
    x, function = draw(8, 4, 2, 16, seed=1), partial(experts, remat=remat)
    given = np.abs(x) * sign
    found, right = on_mesh(function, draw(4, 16, 16), given, specs=stored, gathered=used, mesh=mesh)
    approximately(found, right)
    _, found, right = in_parts(function, draw(4, 16, 16), given, specs=stored, gathered=used, mesh=mesh)
    approximately(found, right)


def test_what_is_used_in_a_branch_is_moved_in_it():
    """And gradients of products that several experts have of their own are scattered."""
    mesh = {"data": 1, "fsdp": 8, "tensor": 1}
    devices = device_mesh(mesh)
    w, x = draw(4, 16, 16), draw(8, 4, 2, 16, seed=1)
    spec, whole = P(None, "fsdp"), NamedSharding(devices, P("fsdp"))
    gathers = gathering(experts, spec, P(), devices)
    place = NamedSharding(devices, spec)
    step = jax.jit(jax.grad(lambda w, x: gathers(w, x).sum()), in_shardings=(place, whole), out_shardings=place)
    text = step.lower(w, x).compile().as_text()
    assert "conditional(" in text
    usually = compiled_collectives(text, mesh, {2: (1.0, 0.0)})
    assert sorted((one.kind, one.bytes) for one in usually if one.bytes >= w.nbytes // 8) == [
        ("all-gather", w.nbytes),
        ("reduce-scatter", w.nbytes // 8),
    ]
    at_worst = compiled_collectives(text, mesh)
    assert sum(one.sent for one in at_worst) > 1.5 * sum(one.sent for one in usually)


LOOKUPS = {
    "rows": lambda table, at: jnp.tanh(table[at]),
    "rows of rows": lambda table, at: jnp.tanh(table[at.reshape(8, 2, 2)]).sum((1, 2)),
    "columns": lambda table, at: jnp.tanh(table[:, at]),
    "taken": lambda table, at: jnp.tanh(jnp.take(table, at, axis=0)).sum(1),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("mesh", [MESH, CUBE], ids=["fsdp", "cube"])
def test_rows_that_are_looked_up(name, mesh):
    """Of a table of 16 rows, some more than once; of its gradient too."""
    at = np.random.default_rng(0).integers(0, 12, (8, 4))
    found, right = on_mesh(LOOKUPS[name], draw(16, 16), at, specs=STORED, gathered=USED, mesh=mesh)
    approximately(found, right)
    _, found, right = in_parts(LOOKUPS[name], draw(16, 16), at, specs=STORED, gathered=USED, mesh=mesh)
    approximately(found, right)


def test_parameters_of_other_kinds():
    """Integers, scalars, empty arrays and an empty tree, none of them in shards."""
    params = {"w": draw(16, 16), "scalar": np.float32(0.5), "none": np.zeros((0, 4), np.float32), "nothing": {}}
    specs = {"w": STORED, "scalar": P(), "none": P(), "nothing": {}}
    used = {"w": USED, "scalar": P(), "none": P(), "nothing": {}}

    def function(params, x):
        return layer(x, params["w"]) * params["scalar"] + params["none"].sum()

    found, right = on_mesh(function, params, draw(8, 16, seed=1), specs=specs, gathered=used)
    approximately(found, right)


def test_without_gradients_and_with_several_arguments():
    """As predictions use it."""

    def predict(params, batch, key):
        return {"most": (batch["x"] @ params).argmax(-1), "noise": jax.random.normal(key, (3,))}

    devices = device_mesh(MESH)
    gathers = jax.jit(gathering(predict, STORED, USED, devices))
    w, batch, key = draw(16, 16), {"x": draw(8, 16, seed=1)}, jax.random.key(0)
    found = gathers(jax.device_put(w, NamedSharding(devices, STORED)), batch, key)
    right = predict(w, batch, key)
    np.testing.assert_array_equal(found["most"], right["most"])
    np.testing.assert_array_equal(found["noise"], right["noise"])


def test_nothing_to_gather_leaves_the_function_alone():
    whole = device_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    gathers = gathering(layer, P(), P(), whole)
    x, w = draw(8, 16), draw(16, 16)
    assert str(jax.make_jaxpr(gathers)(x, w)) == str(jax.make_jaxpr(layer)(x, w))


# What is moved.


def test_each_parameter_is_gathered_once_and_its_gradient_scattered():
    """Four kernels over fsdp 8; vectors are whole."""
    one = program("mlp-chain")
    plan = derive(one.loss_fn, one.params, one.batch, {"fsdp": 8})
    moved = attempt(one.loss_fn, one.values(), one.batch, plan, expected=expected("mlp-chain")).moved
    kernels, vectors, loss = (64 * 256 + 256 * 128) * 2 * 4, (256 + 128 + 256 + 64) * 4, 4
    gathered = [one for one in moved if one.kind == "all-gather"]
    assert [one.axes for one in gathered] == [("fsdp",)] * 4
    assert total_bytes(gathered) == kernels
    assert total_bytes(one for one in moved if one.kind == "all-reduce") == vectors + loss
    assert total_bytes(one for one in moved if one.kind == "reduce-scatter") == kernels / 8
    assert {one.kind for one in moved} == {"all-gather", "all-reduce", "reduce-scatter"}


def test_stacked_layers_are_gathered_one_at_a_time():
    """Of [6, 64, 1024] one layer, half of it on each tensor device."""
    loss_fn, params, batch = deep()
    plan = derive(loss_fn, params, batch, {"fsdp": 4, "tensor": 2})
    moved = attempt(loss_fn, params, batch, plan).moved
    gathered = [(one.axes, one.count, one.bytes) for one in moved if one.kind == "all-gather"]
    assert gathered == [(("fsdp",), LAYERS, 64 * WIDE * 4 // 2)] * 2


def test_a_cast_parameter_is_gathered_in_fewer_bits():
    def loss_fn(params, batch):
        return jnp.mean((batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    params, batch = {"w": draw(64, 256)}, {"x": draw(8, 64)}
    plan = derive(loss_fn, params, batch, {"fsdp": 8})
    gathers = gathering(loss_fn, plan.specs, plan.gathered, device_mesh(plan.mesh))
    assert plan.specs["w"] == P("fsdp")
    text = str(jax.make_jaxpr(gathers)(params, batch))
    casts = re.findall(r"(\w+\[\d+,\d+\]) = sharding_constraint", text)
    assert casts == ["bf16[64,256]"] * 2  # where it lives, and where it is used


def test_products_that_each_cast_one_array_add_up_its_gradient_in_that_precision():
    """As those of queries, keys and values, whose input a norm leaves in float32; over tensor it is summed once."""

    def loss_fn(params, batch):
        x = batch["x"] * params["scale"]
        made = [x.astype(jnp.bfloat16) @ params[name].astype(jnp.bfloat16) for name in "abc"]
        return sum((one.astype(jnp.float32) ** 2).sum() for one in made)

    params = {name: draw(64, 128, seed=seed) for seed, name in enumerate("abc")} | {"scale": draw(64)}
    specs = dict.fromkeys("abc", P("fsdp", "tensor")) | {"scale": P()}
    used = dict.fromkeys("abc", P(None, "tensor")) | {"scale": P()}
    gathers = gathering(loss_fn, specs, used, device_mesh(MESH))
    text = str(jax.make_jaxpr(jax.grad(gathers))(params, {"x": draw(8, 64)}))
    casts = re.findall(r"(\w+)\[8,64\] = convert_element_type\[new_dtype=(\w+)", text)
    assert casts == [("bf16", "bfloat16"), ("f32", "float32")]
    sums = re.findall(r"(\w+)\[8,64\] = add_any", text)
    assert sums == ["bf16"] * 2


def test_products_of_one_array_in_another_shape_add_up_its_gradient_before_what_is_beside_them():
    """As a residual connection is, in layers without a norm before them."""

    def loss_fn(params, batch):
        x = batch["x"] * params["scale"]
        made = [x.reshape(-1, 64) @ params[name] for name in "abc"]
        return sum((one**2).sum() for one in made) + (x**3).sum()

    params = {name: draw(64, 128, seed=seed) for seed, name in enumerate("abc")} | {"scale": draw(64)}
    specs = dict.fromkeys("abc", P("fsdp", "tensor")) | {"scale": P()}
    used = dict.fromkeys("abc", P(None, "tensor")) | {"scale": P()}
    gathers = gathering(loss_fn, specs, used, device_mesh(MESH))
    text = str(jax.make_jaxpr(jax.grad(gathers))(params, {"x": draw(8, 4, 64)}))
    assert len(re.findall(r"f32\[32,64\] = add_any", text)) == 2
    assert len(re.findall(r"f32\[8,4,64\] = add_any", text)) == 1


LAYERS, WIDE = 6, 1024


def deep(remat=False, transposed=False):
    """Six layers whose weights are far larger than their activations."""

    def block(x, p):
        return x + jnp.tanh(x @ (p["a"].T if transposed else p["a"])) @ p["b"], None

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, batch["x"], params)
        return (x**2).mean()

    shape = (LAYERS, WIDE, 64) if transposed else (LAYERS, 64, WIDE)
    return loss_fn, {"a": draw(*shape) * 0.1, "b": draw(LAYERS, WIDE, 64) * 0.1}, {"x": draw(64, 64)}


def memory_and_gathers(reshard_after_forward, **how):
    loss_fn, params, batch = deep(**how)
    plan = derive(loss_fn, params, batch, {"fsdp": 8})
    trial = attempt(loss_fn, params, batch, plan, reshard_after_forward=reshard_after_forward)
    assert trial.worst < 1e-5
    return trial.temporary, sum(one.count for one in trial.moved if one.kind == "all-gather")


ALL_WEIGHTS = 2 * LAYERS * WIDE * 64 * 4


@pytest.mark.parametrize("transposed", [False, True])
def test_gathering_again_forgets_gathered_parameters_after_the_forward_pass(transposed):
    kept, once = memory_and_gathers(reshard_after_forward=False, transposed=transposed)
    forgotten, twice = memory_and_gathers(reshard_after_forward=True, transposed=transposed)
    assert (once, twice) == (2 * LAYERS, 4 * LAYERS)
    assert kept > ALL_WEIGHTS
    assert forgotten < kept - ALL_WEIGHTS * 0.8


def test_gathering_again_leaves_the_rematerialisation_of_the_program_alone():
    once, gathers = memory_and_gathers(reshard_after_forward=False, remat=True)
    again, more = memory_and_gathers(reshard_after_forward=True, remat=True)
    assert once < ALL_WEIGHTS
    assert again <= once * 1.1
    assert (gathers, more) == (4 * LAYERS, 4 * LAYERS)


@pytest.mark.parametrize("again", [False, True])
def test_a_constant_that_parameters_multiply_within_loops_and_outside(again):
    features = np.asarray(draw(8, 64))

    def loss_fn(params, batch):
        def body(total, _):
            return total + jnp.tanh(features @ params["w"]).mean(), None

        total, _ = jax.lax.scan(body, 0.0, None, length=3)
        bent = jax.lax.cond(total > 0, lambda: (features @ params["w"]).mean(), lambda: 0.0)
        return total + bent + jnp.mean((batch["x"] @ params["w"]) * (features @ params["w"]))

    params, batch = {"w": draw(64, 64)}, {"x": draw(8, 64)}
    mesh = device_mesh({"data": 1, "fsdp": 4, "tensor": 2})
    gathers = gathering(
        loss_fn, {"w": P("fsdp", "tensor")}, {"w": P(None, "tensor")}, mesh, reshard_after_forward=again
    )
    found, expected = (jax.jit(jax.grad(one))(params, batch)["w"] for one in (gathers, loss_fn))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
