"""Weights in four and eight bits: the codes of bitsandbytes, and programs that compute what dequantised weights do."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.quantized.layout import dense_places, kept_plan
from redco_cli.adapters.quantized.leaf import Form, Quantized, quantized
from redco_cli.adapters.quantized.program import dense_params, dequantizing, seen_params
from redco_cli.adapters.uses import Use, uses_of
from redco_cli.runtime.mesh import make_mesh
from redco_cli.sharding.derive import derive
from redco_cli.sharding.gather.gathering import gathering

GOLDEN = Path(__file__).with_name("nf4_of_bitsandbytes.npz")
LINEAR = Use("product", 0, (), 128, 16, (1, 0), ())
"""Of a weight [out, in], as PyTorch keeps it."""


def drawn(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def quantise(weight, use, kind="nf4", mesh=None, spec=()):
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, str) if mesh is None else mesh
    form = Form(kind, use, weight.shape, "float32")
    scales = NamedSharding(mesh, PartitionSpec(*spec))
    codes = NamedSharding(mesh, PartitionSpec(*spec[:-1], None, *spec[-1:]))
    return quantized(form, weight, Quantized(codes, scales, form))


def codes_of(leaf):
    """Those of nf4 as [in, out]."""
    packed = np.asarray(leaf.codes)
    return np.stack([packed & 15, packed >> 4], -3).reshape(leaf.form.use.inputs, -1)


def test_nf4_is_that_of_bitsandbytes_bit_for_bit():
    golden = np.load(GOLDEN)
    leaf = quantise(jnp.asarray(golden["weight"]), LINEAR)
    np.testing.assert_array_equal(codes_of(leaf).T, golden["codes"])
    np.testing.assert_array_equal(np.asarray(leaf.scales).T, golden["absmax"])
    np.testing.assert_array_equal(jax.jit(lambda leaf: leaf.dense())(leaf), golden["dequantized"])


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.5 + 4 / 64), ("int8", 1 + 4 / 64)])
def test_what_a_weight_takes_and_how_far_it_is_off(kind, most):
    weight = drawn((16, 128))
    leaf = quantise(weight + 0, LINEAR, kind)
    assert sum(array.nbytes for array in jax.tree.leaves(leaf)) == weight.size * most
    largest = np.abs(weight).reshape(16, 2, 64).max(-1, keepdims=True)
    step = 1 / 254 if kind == "int8" else 0.1520  # half of what is between two codes, at most
    assert (np.abs(leaf.dense() - weight).reshape(16, 2, 64) <= largest * step * 1.001).all()


def scanned(params, x):
    def body(x, w):
        return jnp.tanh(jax.checkpoint(lambda x, w: x @ w.astype(x.dtype))(x, w)), None

    return jax.lax.scan(body, x, params["w"])[0]


def einsum(text):
    return lambda params, x: jnp.einsum(text, x, params["w"])


PROGRAMS = {
    "transposed": (einsum("bsi,oi->bso"), (6, 64)),
    "heads": (einsum("bsi,ihd->bshd"), (64, 2, 3)),
    "from heads": (lambda p, x: jnp.einsum("bshd,hdo->bso", x.reshape(3, 5, 4, 16), p["w"]), (4, 16, 6)),
    "reshaped": (lambda p, x: jnp.einsum("bsi,ihd->bshd", x, p["w"].T.reshape(64, 3, 2)), (6, 64)),
    "layers": (scanned, (3, 64, 64)),
    "while": (lambda p, x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"]), x), (64, 64)),
    "experts": (lambda p, x: jnp.einsum("bxsi,xio->bxso", jnp.stack([x, 2 * x], 1), p["w"]), (2, 64, 6)),
}


SLOW = ("heads", "reshaped", "while")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in PROGRAMS])
def test_a_program_computes_with_the_dequantised_weight_and_its_adapter(name):
    program, shape = PROGRAMS[name]
    x, weight = drawn((3, 5, 64), 7), drawn(shape)
    use = uses_of(program, {"w": weight}, x)["w"][0]
    factors = {"A": drawn((*use.stack, use.inputs, 2), 1), "B": drawn((*use.stack, 2, use.outputs), 2)}
    factors["magnitude"] = 1 + drawn((*use.stack, use.outputs), 3) ** 2
    kept = {"w": quantise(weight, use)}
    adapted = adapting(program, {"w": LowRank(2, 0.3)})

    def loss(run, params, factors, x):
        return jnp.sin(run(params, {"w": factors}, None, x)).sum()

    slopes = jax.grad(loss, argnums=(2, 3))
    own = jax.jit(partial(slopes, dequantizing(adapted)))(kept, factors, x)
    expected = jax.jit(partial(slopes, adapted))(dense_params(kept), factors, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), own, expected)


WIDTH, LAYERS = 256, 8


def stack(params, batch):
    def body(x, layer):
        x = jnp.tanh(x @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype)
        return x + batch["x"].astype(x.dtype), None

    return jax.lax.scan(body, batch["x"].astype(jnp.bfloat16), params)[0].astype(jnp.float32)


@pytest.mark.parametrize(
    ("kind", "byte", "sizes"), [("nf4", 0.5, {}), ("int8", 1, {"fsdp": 8}), ("nf4", 0.5, {"fsdp": 4, "tensor": 2})]
)
def test_compiled_programs_hold_codes_and_one_layer_of_weights(kind, byte, sizes):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, **sizes}
    use, shape = Use("product", 1, (LAYERS,), WIDTH, WIDTH, (0, 1), ()), (LAYERS, WIDTH, WIDTH)
    kept = {name: Form(kind, use, shape, "float32").abstract for name in ("down", "up")}
    batch = {"x": jax.ShapeDtypeStruct((16, WIDTH), "float32")}
    plan = kept_plan(kept, derive(lambda p, b: stack(p, b).sum(), seen_params(kept), batch, sizes))
    mesh = make_mesh(sizes, str)
    run = gathering(dequantizing(stack), plan.specs, plan.gathered, mesh)

    def step(x, kept):
        return jax.grad(lambda x: run(kept, {"x": x}).sum())(x)

    places = jax.tree.map(partial(NamedSharding, mesh), plan.specs, is_leaf=lambda one: isinstance(one, PartitionSpec))
    over = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    compiled = jax.jit(step, in_shardings=(over, places), out_shardings=over).lower(batch["x"], kept).compile()
    weights, shards = 2 * LAYERS * WIDTH * WIDTH, sizes["fsdp"] * sizes["tensor"]
    memory = compiled.memory_analysis()
    inputs = 16 * WIDTH * 4 // sizes["fsdp"]
    assert memory.argument_size_in_bytes == weights * (byte + 4 / 64) / shards + inputs
    assert memory.temp_size_in_bytes < weights * 2 / sizes["tensor"]  # of all layers in bfloat16
    text = compiled.as_text()
    assert not re.search(rf"(f32|bf16)\[{LAYERS},(\d+,)*{WIDTH},\d+\]", text)
    if sizes["fsdp"] > 1:
        moved = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather", text)
        assert {kind for kind, _ in moved} <= {"u8", "s8", "f32"}
        assert all(
            np.prod(list(map(int, shape.split(",")))) <= WIDTH * WIDTH / 64 for kind, shape in moved if kind == "f32"
        )


def test_shards_are_cut_between_tiles():
    def loss(params, batch):
        return (jax.nn.relu(batch["x"] @ params["up"]) @ params["down"]).sum()

    def planned(width, sizes):
        uses = {
            "down": Use("product", 0, (), width, 64, (0, 1), ()),
            "up": Use("product", 0, (), 64, width, (0, 1), ()),
        }
        shapes = {"down": (width, 64), "up": (64, width)}
        kept = {name: Form("nf4", use, shapes[name], "float32").abstract for name, use in uses.items()}
        batch = {"x": jax.ShapeDtypeStruct((16, 64), "float32")}
        return kept_plan(kept, derive(loss, seen_params(kept), batch, sizes))

    plan = planned(256, {"fsdp": 2, "tensor": 4})
    assert {row.path: tuple(row.spec) for row in plan.rows} == {
        "down/codes": ("tensor", None, "fsdp"),
        "down/scales": ("tensor", "fsdp"),
        "up/codes": (None, None, ("tensor", "fsdp")),
        "up/scales": (None, ("tensor", "fsdp")),
    }
    assert plan.rows[0].bytes_per_device == 256 * 64 // 2 // 8
    plan = planned(192, {"fsdp": 2, "tensor": 2})
    assert tuple(plan.specs["down"].codes) == (None, None, "fsdp")
    assert "between which it cannot be cut" in plan.rows[0].reason


def test_a_weight_that_is_reshaped_is_in_shards_too():
    program, shape = PROGRAMS["reshaped"]
    x, weight = jax.ShapeDtypeStruct((8, 5, 64), "float32"), jax.ShapeDtypeStruct(shape, "float32")
    use = uses_of(program, {"w": weight}, x)["w"][0]
    kept = {"w": Form("nf4", use, shape, "float32").abstract}
    plan = kept_plan(kept, derive(lambda p, b: program(p, b["x"]).sum(), seen_params(kept), {"x": x}, {"fsdp": 2}))
    assert tuple(plan.specs["w"].codes) == (None, None, "fsdp")


def test_a_weight_in_shards_has_the_same_codes():
    weight, mesh = drawn((2, 512, 24)), make_mesh({"data": 1, "fsdp": 4, "tensor": 2}, str)
    use = Use("product", 1, (2,), 512, 24, (0, 1), ())
    whole = quantise(weight + 0, use)
    form = whole.form
    spec = (None, "fsdp", "tensor")
    scales, codes = (NamedSharding(mesh, PartitionSpec(*one)) for one in (spec, (*spec[:2], None, *spec[2:])))
    place = dense_places({"w": Quantized(codes, scales, form)})["w"]
    assert place.spec == PartitionSpec(None, "fsdp", "tensor")
    parts = quantise(jax.device_put(weight, place), use, mesh=mesh, spec=spec)
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.scales, whole.scales)
    assert parts.codes.addressable_shards[0].data.shape == (2, 2, 32, 12)
