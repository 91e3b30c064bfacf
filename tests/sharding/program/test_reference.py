"""Opaque kernels are read through their reference forms, and ones without a form are needed whole, with a warning."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl

from redco_cli.sharding import derive, make_plan, read, register_reference
from redco_cli.sharding.program import reference as references
from tests.sharding.programs.small import attend, norm, token_loss
from tests.sharding.shorthand import axis_kinds, shaped, stored

B, L, D, H, HEAD = 8, 16, 64, 8, 8
TOKENS = {"x": jax.ShapeDtypeStruct((B, L), "int32")}
QKVO = {"e": (96, D), "d": (D, 96), "n": (D,), **dict.fromkeys("qkvo", (D, D))}
HEADS = {"q": "64 8h*8!", "k": "64 8h*8!", "v": "64 8h*8!", "o": "8h*8! 64"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test registers is not known to the next."""
    monkeypatch.setattr(references, "_REFERENCES", {})


def model(attention, dtype="float32"):
    """A layer of attention of [B, L, H, HEAD] behind an embedding."""

    def loss_fn(params, batch):
        x = params["e"][batch["x"]]
        y = norm(x, params["n"])
        q, k, v = ((y @ params[name]).reshape(B, L, H, HEAD) for name in "qkv")
        x = x + attention(q, k, v).reshape(B, L, D) @ params["o"]
        return token_loss(x @ params["d"], batch["x"])

    return read(loss_fn, shaped(QKVO, dtype), TOKENS)


def kernel(q, k, v):
    """Some attention in Pallas."""
    return pl.pallas_call(lambda *_: None, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), name="my_kernel")(q, k, v)


def foreign(q, k, v):
    """Some attention in C++."""
    return jax.ffi.ffi_call("my_target", jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, v)


@jax.jit
def wrapped(q, k, v):
    """A kernel in a function that says its name."""
    return jax.pure_callback(lambda q, k, v: v, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)


@pytest.mark.parametrize(
    ("attention", "name"),
    [(kernel, "my_kernel"), (kernel, "pallas_call"), (foreign, "my_target"), (wrapped, "wrapped")],
    ids=["kernel", "primitive", "target", "jit"],
)
def test_a_kernel_with_a_reference_is_read_like_the_reference(attention, name):
    register_reference(name, attend)
    found = model(attention)
    assert {path: axis_kinds(found)[path] for path in HEADS} == HEADS
    assert found.unknown == ()
    mesh = {"fsdp": 2, "tensor": 4}
    assert stored(make_plan(found, mesh)) == stored(make_plan(model(attend), mesh))


@pytest.mark.parametrize(
    ("attention", "primitive"), [(kernel, "pallas_call"), (foreign, "ffi_call"), (wrapped, "pure_callback")]
)
def test_a_kernel_without_a_reference_is_a_warning(attention, primitive):
    found = model(attention)
    assert found.unknown == ((primitive, 1),)
    assert not found.heads
    (warning,) = (text for text in make_plan(found, {"data": 8}).warnings)
    assert warning == (
        f"no rule for the primitive {primitive} (met 1 times): its operands count as needed whole; "
        "if it is a kernel, redco_cli.sharding.register_reference tells what it computes"
    )


def test_a_reference_of_several_results_in_any_tree():
    """The results of the equation in order, whatever holds them."""

    @jax.jit
    def both(x, up, gate):
        shape = jax.ShapeDtypeStruct((B, L, 256), "float32")
        return jax.pure_callback(lambda *_: None, (shape, shape), x, up, gate)

    def loss_fn(params, batch):
        one, other = both(params["e"][batch["x"]], params["up"], params["gate"])
        return jnp.mean(jax.nn.silu(one) * other @ params["down"])

    params = shaped({"e": (96, D), "up": (D, 256), "gate": (D, 256), "down": (256, D)})
    register_reference("both", lambda x, up, gate: {"a": x @ up, "b": [x @ gate]})
    assert stored(derive(loss_fn, params, TOKENS, {"tensor": 4})) == {
        "e": "t -",
        "up": "- t",
        "gate": "- t",
        "down": "t -",
    }


def test_the_last_reference_of_a_name_counts():
    register_reference("my_kernel", lambda q, k, v: v)
    register_reference("my_kernel", attend)
    assert {path: axis_kinds(model(kernel))[path] for path in HEADS} == HEADS


# Attention by cuDNN, as JAX traces it where there is an NVIDIA GPU.


@pytest.fixture
def nvidia(monkeypatch):
    """Lets JAX believe that cuDNN is there; tracing needs no more."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)


def fused(q, k, v, **how):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.5}], ids=["plain", "causal", "scaled"])
def test_fused_attention_has_heads(nvidia, how):
    found = model(lambda q, k, v: fused(q, k, v, **how), "bfloat16")
    assert {path: axis_kinds(found)[path] for path in HEADS} == HEADS
    assert found.unknown == ()
    assert [stored(make_plan(found, {"tensor": 8}))[path] for path in "qkvo"] == ["- t", "- t", "- t", "t -"]


def test_fused_attention_with_a_bias_and_a_mask(nvidia):
    def attention(q, k, v):
        bias, mask = jnp.zeros((B, H, L, L), q.dtype), jnp.ones((B, 1, L, L), bool)
        return fused(q, k, v, bias=bias, mask=mask)

    found = model(attention, "bfloat16")
    assert {path: axis_kinds(found)[path] for path in HEADS} == HEADS
    assert found.unknown == ()


def test_fused_attention_of_grouped_heads(nvidia):
    def loss_fn(params, batch):
        x = params["e"][batch["x"]]
        q = (x @ params["q"]).reshape(B, L, H, HEAD)
        k, v = ((x @ params[name]).reshape(B, L, 2, HEAD) for name in "kv")
        return jnp.mean((x + fused(q, k, v).reshape(B, L, D) @ params["o"]).astype("float32"))

    params = shaped({**QKVO, "k": (D, 16), "v": (D, 16)}, "bfloat16")
    found = read(loss_fn, params, TOKENS)
    assert {path: axis_kinds(found)[path] for path in HEADS} == {
        "q": "64 2h*4h*8!",
        "k": "64 2h*8!",
        "v": "64 2h*8!",
        "o": "2h*4h*8! 64",
    }


def test_the_gradient_of_fused_attention_is_read_too(nvidia):
    """A loss with a gradient inside traces to the kernel that also returns statistics."""

    def loss_fn(params, batch):
        x = params["e"][batch["x"]]

        def attended(x):
            q, k, v = ((x @ params[name]).reshape(B, L, H, HEAD) for name in "qkv")
            return fused(q, k, v).reshape(B, L, D) @ params["o"]

        y, _ = jax.vjp(attended, x)
        return jnp.mean(y.astype("float32"))

    found = read(loss_fn, shaped(QKVO, "bfloat16"), TOKENS)
    assert {path: axis_kinds(found)[path] for path in HEADS} == HEADS
