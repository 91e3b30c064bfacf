"""Weights that a program takes apart, or multiplies with what it joined: each piece is used by itself."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive, make_plan, read
from redco_cli.sharding.pieces.reading import read_in_pieces
from redco_cli.sharding.pieces.rules import in_pieces
from redco_cli.sharding.plan import Partition
from redco_cli.sharding.rings import ring_bytes
from tests.sharding.beside import draw, slowly
from tests.sharding.trial import attempt

B, L, D, H, N, F = 16, 16, 64, 8, 8, 256
MESHES = [{"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}]
EVERY = [{"data": 2, "fsdp": 2, "tensor": 2}, *slowly(*MESHES)]
WIDTHS = [H * N, N, N, F, F]
ENDS = [64, 72, 80, 336]


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attend(q, k, v):
    """Heads of queries beside one of keys and values."""
    q = q.reshape(*q.shape[:2], H, N)
    scores = jax.nn.softmax(jnp.einsum("bqhp,bkp->bhqk", q, k))
    return jnp.einsum("bhqk,bkp->bqhp", scores, v).reshape(*q.shape[:2], D)


def parallel(p, x):
    """Attention and feed-forward of one input, in one weight each way, as PaLM has them."""
    q, k, v, up, gate = jnp.split(norm(x) @ p["in"] + p["bias"], ENDS, -1)
    return x + jnp.concatenate([attend(q, k, v), jax.nn.silu(gate) * up], -1) @ p["out"]


def by_slices(p, x):
    made = (norm(x) @ p["in"] + p["bias"]) * 1.0
    q, k, v, up, gate = (made[..., i : i + n] for i, n in zip([0, *ENDS], WIDTHS, strict=True))
    both = jnp.concatenate([attend(q, k, v), jnp.tanh(gate) * up], -1)
    return x + jnp.where(both > -3, both, 0) @ p["out"]


def transposed(p, x):
    """Kernels the other way round, as PyTorch has them."""
    q, k, v, up, gate = jnp.split(jnp.einsum("bld,nd->bln", norm(x), p["in"].T), ENDS, -1)
    return x + jnp.concatenate([attend(q, k, v), jax.nn.silu(gate) * up], -1) @ p["out"].T.T


def layers(block):
    def loss_fn(params, batch):
        x = batch["x"]
        for p in params.values():
            x = block(p, x)
        return ((norm(x) - batch["y"]) ** 2).mean()

    return loss_fn


def stacked(params, batch):
    def layer(x, p):
        return jax.jit(parallel)(p, x), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
    return ((norm(x) - batch["y"]) ** 2).mean()


def gated(p, x):
    """Two projections of one size in a piece, and columns beside what is in pieces."""
    q, k, v, both = jnp.split(norm(x) @ p["in"] * (x[..., :1] + 2), ENDS[:-1], -1)
    up, gate = jnp.split(both, 2, -1)
    joined = jnp.concatenate([attend(q, k, v), jax.nn.silu(gate) * up], -1)
    return x + (joined * x.mean(-1, keepdims=True)) @ p["out"]


def empty(p, x):
    nothing, q, k, v, up, gate = jnp.split(norm(x) @ p["in"], [0, *ENDS], -1)
    made = (norm(x) @ p["in"])[..., 64:64]
    x = x + nothing.sum() + made.sum()
    return x + jnp.concatenate([attend(q, k, v), jax.nn.silu(gate) * up], -1) @ p["out"]


def skipped(params, batch):
    """What comes out of some layers joined with what goes into them, twice."""
    x = batch["x"]
    h = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
    h = jnp.tanh(jnp.concatenate([jnp.concatenate([h, x], -1), x * 2], -1) @ params["c"])
    return ((h @ params["d"] - batch["y"]) ** 2).mean()


def images(params, batch):
    """A U-Net: channels of what comes up joined with those of what went down."""

    def conv(x, w, stride=1):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def up(x):
        return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)

    first = jax.nn.silu(conv(batch["x"], params["in"]))
    second = jax.nn.silu(conv(first, params["down"], 2))
    third = jax.nn.silu(conv(second, params["deep"], 2))
    x = jax.nn.silu(conv(third, params["middle"]))
    x = jax.nn.silu(conv(jnp.concatenate([x, third], -1), params["high"]))
    x = jax.nn.silu(conv(jnp.concatenate([up(x), second], -1), params["higher"]))
    return ((conv(jnp.concatenate([up(x), first], -1), params["out"]) - batch["y"]) ** 2).mean()


LAYER = {"in": draw(D, sum(WIDTHS)) / 4, "bias": draw(sum(WIDTHS), seed=1) / 8, "out": draw(D + F, D, seed=2) / 4}
TWO = {"first": LAYER, "second": {name: leaf[::-1].copy() for name, leaf in LAYER.items()}}
KERNELS = {
    "in": (4, F // 8),
    "down": (F // 8, D),
    "deep": (D, 2 * D),
    "middle": (2 * D, 2 * D),
    "high": (4 * D, D),
    "higher": (2 * D, F // 8),
    "out": (D, 4),
}
CASES = {
    "split": (layers(parallel), TWO),
    "slices": (layers(by_slices), TWO),
    "transposed": (layers(transposed), TWO),
    "gated": (layers(gated), TWO),
    "stacked": (stacked, {name: jnp.stack([TWO[one][name] for one in TWO]) for name in LAYER}),
    "skipped": (
        skipped,
        {"a": draw(D, F) / 2, "b": draw(F, F, seed=1) / 4, "c": draw(F + 2 * D, F, seed=2) / 4, "d": draw(F, D) / 4},
    ),
    "images": (images, {name: draw(3, 3, *shape, seed=i) / 4 for i, (name, shape) in enumerate(KERNELS.items())}),
}
BATCH = {"x": draw(B, L, D), "y": draw(B, L, D, seed=1)}
IMAGES = {"x": draw(B, 32, 32, 4), "y": draw(B, 32, 32, 4, seed=1)}


def sent(found):
    return sum(ring_bytes(one.kind, one.bytes, one.devices) * one.count for one in found.moved)


@pytest.mark.parametrize("mesh", EVERY, ids=str)
@pytest.mark.parametrize(
    "name", ["gated", "skipped", *slowly(*(name for name in CASES if name not in ("gated", "skipped")))]
)
def test_pieces_beside_one_device_and_beside_blocks(name, mesh, monkeypatch):
    (loss_fn, params), batch = CASES[name], IMAGES if name == "images" else BATCH
    plan = derive(loss_fn, params, batch, mesh)
    assert any(row.usage.cut for row in plan.rows)
    found = attempt(loss_fn, params, batch, plan)
    assert found.worst < 1e-5
    monkeypatch.setattr(sys.modules[derive.__module__], "read_in_pieces", lambda *_: None)
    blocks = derive(loss_fn, params, batch, mesh)
    assert not any(row.usage.cut for row in blocks.rows)
    if name != "slices":  # which no device of `tensor` would have a part of then
        assert sent(found) < sent(attempt(loss_fn, params, batch, blocks))


def decayed(params, batch):
    return skipped(params, batch) + (params["c"] ** 2).sum()


def by_rows_too(params, batch):
    return skipped(params, batch) + (params["c"][batch["ids"]] ** 2).mean()


def normed(params, batch):
    """What needs what is joined whole."""
    x = jnp.concatenate([jnp.tanh(batch["x"] @ params["a"]) @ params["b"], batch["x"], batch["x"] * 2], -1)
    return ((jnp.tanh(norm(x) @ params["c"]) @ params["d"] - batch["y"]) ** 2).mean()


def recurrent(params, batch):
    """A state joined with what comes in, in each of some steps."""

    def step(h, x):
        return jnp.tanh(jnp.tanh(jnp.concatenate([h, x], -1) @ params["w"]) @ params["u"]), None

    return (jax.lax.scan(step, jnp.zeros((B, F)), batch["x"].swapaxes(0, 1))[0] ** 2).mean()


RECURRENT = {"w": draw(F + D, F) / 8, "u": draw(F, F, seed=1) / 8}
IDS = BATCH | {"ids": np.arange(B * 2).reshape(B, 2)}


@pytest.mark.parametrize(
    ("loss_fn", "params", "batch"),
    [
        (decayed, CASES["skipped"][1], BATCH),
        (by_rows_too, CASES["skipped"][1], IDS),
        (normed, CASES["skipped"][1], BATCH),
        (recurrent, RECURRENT, BATCH),
    ],
)
def test_a_weight_that_is_used_whole_somewhere_is_not_taken_apart(loss_fn, params, batch):
    assert not any(row.usage.cut for row in derive(loss_fn, params, batch, MESHES[0]).rows)
    assert attempt(loss_fn, params, batch, derive(loss_fn, params, batch, MESHES[1])).worst < 1e-5


@pytest.mark.parametrize("mesh", EVERY, ids=str)
def test_parts_without_elements(mesh):
    loss_fn = layers(empty)
    assert attempt(loss_fn, TWO, BATCH, derive(loss_fn, TWO, BATCH, mesh)).worst < 1e-5


@pytest.mark.slow
def test_what_the_user_decided_is_not_taken_apart():
    loss_fn, params = CASES["split"]
    plan = derive(loss_fn, params, BATCH, MESHES[1], override=[("first/in", ["fsdp", "tensor"])])
    assert [row.path for row in plan.rows if row.usage.cut] == ["first/out", "second/in", "second/out"]
    assert attempt(loss_fn, params, BATCH, plan).worst < 1e-5


def test_where_pieces_live_and_why():
    loss_fn, params = CASES["split"]
    rows = {row.path: row for row in derive(loss_fn, params, BATCH, MESHES[1]).rows}
    assert rows["first/in"].spec == P(("fsdp", "tensor"))
    assert rows["first/in"].usage.cut == Partition(1, tuple(WIDTHS))
    assert [piece for piece, _ in rows["first/in"].usage.pieces] == [
        P(None, "tensor"),
        P(),
        P(),
        *[P(None, "tensor")] * 2,
    ]
    assert rows["first/out"].spec == P(None, ("fsdp", "tensor"))
    assert rows["first/out"].reason == (
        "in pieces, used apart: 64: rows: sums over 8 heads, 4 on each device; "
        "256: rows: sums over 256 features, 128 on each device"
    )


def taught(params, batch, teacher):
    """Beside a copy of the parameters that is not trained."""
    target = CASES["split"][0](teacher["params"], batch)
    return (CASES["split"][0](params, batch) - target) ** 2


def test_what_is_a_copy_of_a_weight_is_taken_apart_as_it_is():
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (CASES["split"][1], BATCH))
    reading = read(taught, *shapes, {"params": shapes[0]})
    found = read_in_pieces(reading, lambda *_: True)
    assert set(found.cuts) == {f"{layer}/{name}" for layer in TWO for name in ("in", "out")}
    moved = {one.what for one in make_plan(reading, MESHES[0]).collectives}
    assert "array that is cut into parts" not in moved
    assert "concatenated array" not in moved


def test_no_pieces_without_gathering():
    reading = read(*CASES["split"], BATCH)
    assert any(row.usage.cut for row in make_plan(reading, MESHES[0]).rows)
    assert not any(row.usage.cut for row in make_plan(reading, MESHES[0], gathers=False).rows)


def test_no_pieces_without_tensor():
    loss_fn, params = CASES["split"]
    assert not any(row.usage.cut for row in derive(loss_fn, params, BATCH, {"data": 2, "fsdp": 4}).rows)


def test_each_piece_is_taken_apart_where_it_is_used():
    """Of stacked layers within the loop, of a cast one after the cast."""

    def loss(params, batch):
        def layer(x, w):
            return jnp.concatenate([jnp.tanh(x), x], -1) @ w.astype(jnp.bfloat16), None

        return jax.lax.scan(layer, batch.astype(jnp.bfloat16), params)[0].sum()

    traced = jax.make_jaxpr(loss)(np.ones((3, 2 * D, D), np.float32), np.ones((B, D), np.float32))
    (loop,) = (one for one in in_pieces(traced, {0: Partition(1, (D, D))}).eqns if one.primitive.name == "scan")
    inner = [one.primitive.name for one in loop.params["jaxpr"].eqns]
    assert inner.index("convert_element_type") < inner.index("split") < inner.index("dot_general")
    assert inner.count("dot_general") == 2
