"""Several projections in one weight: each is split over `tensor`, in whatever way a program takes them apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from redco_cli.sharding import derive
from redco_cli.sharding.plan import Usage
from tests.sharding.beside import draw, slowly
from tests.sharding.trial import attempt

B, L, D, H, P = 16, 64, 64, 8, 8
MESHES = [(2, 2, 2), *slowly((2, 1, 4), (1, 4, 2))]
SHAPES = {"qkv": (D, 3 * D), "bias": (3 * D,), "out": (D, D)}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attend(q, k, v):
    q, k, v = (x.reshape(*x.shape[:2], H, P) for x in (q, k, v))
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), jnp.einsum("bqhp,bkhp->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhp->bqhp", jax.nn.softmax(scores), v).reshape(*q.shape[:2], D)


def in_thirds(p, x):
    return jnp.split(x @ p["qkv"] + p["bias"], 3, -1)


def in_slices(p, x):
    made = jnp.tanh(x @ p["qkv"] * 2 + p["bias"])[:, ::1]
    return made[..., :D], made[..., D : 2 * D], made[..., 2 * D :]


def in_a_dim(p, x):
    made = (x @ p["qkv"] + p["bias"]).reshape(B, L, 3, D)
    return made[:, :, 0], made[:, :, 1], made[:, :, 2]


def in_heads(p, x):
    """As nanoGPT has it: rows of heads, those of the queries first."""
    made = (x @ p["qkv"] + p["bias"]).reshape(B, L, 3 * H, P)
    return jnp.split(made, 3, 2)


def two_and_one(p, x):
    made = checkpoint_name(x @ p["qkv"] + p["bias"], "made")
    queries_and_keys, values = made[..., : 2 * D], made[..., 2 * D :]
    return *jnp.split(queries_and_keys, 2, -1), values


def narrow(p, x):
    made = x.astype(jnp.bfloat16) @ p["qkv"].astype(jnp.bfloat16)
    return jnp.split(made.astype(jnp.float32) + p["bias"], 3, -1)


def transposed(p, x):
    """As GPT-2 of Hugging Face has it: kernels are the other way round."""
    return jnp.split(x @ p["qkv"].T + p["bias"], 3, -1)


def block(cut, p, x):
    q, k, v = cut(p, norm(x))
    return x + attend(q, k, v) @ p["out"]


def attention(cut, params, batch):
    x = batch["x"]
    for name in ("first", "second"):
        x = block(cut, params[name], x)
    return ((norm(x) - batch["y"]) ** 2).mean()


def stacked(params, batch):
    def layer(x, p):
        return block(in_thirds, p, x), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["layers"])
    return ((norm(x) - batch["y"]) ** 2).mean()


def gated(params, batch):
    x = batch["x"]
    for p in params.values():
        made = norm(x) @ p["in"]
        x = x + jax.nn.silu(made[..., : 2 * D]) * made[..., 2 * D :] @ p["out"]
    return ((norm(x) - batch["y"]) ** 2).mean()


def recurrent(params, batch):
    """An LSTM: four gates are made of each state, and a state of them."""

    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ params["wx"] + h @ params["wh"] + params["bias"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((B, D))
    _, states = jax.lax.scan(step, (zeros, zeros), batch["x"].swapaxes(0, 1))
    return ((states.swapaxes(0, 1) @ params["out"] - batch["y"]) ** 2).mean()


def convolved(params, batch):
    """As WaveNet has it: causal convolutions whose channels are those of an array and of its gate."""
    x = batch["x"]
    for p in params.values():
        made = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), [(2, 0)], rhs_dilation=(2,), dimension_numbers=("NHC", "HIO", "NHC")
        )
        value, gate = jnp.split(made + p["bias"], 2, -1)
        x = x + jnp.tanh(value) * jax.nn.sigmoid(gate) @ p["out"]
    return ((norm(x) - batch["y"]) ** 2).mean()


LAYER = {name: draw(*shape, seed=len(name)) / 4 for name, shape in SHAPES.items()}
CONVOLVED = {"kernel": draw(2, D, 4 * D) / 4, "bias": draw(4 * D, seed=2), "out": draw(2 * D, D, seed=1)}
GATED = {"in": draw(D, 4 * D), "out": draw(2 * D, D, seed=1)}
PROGRAMS = {
    **{
        cut.__name__: (functools.partial(attention, cut), {"first": LAYER, "second": LAYER})
        for cut in (in_thirds, in_slices, in_a_dim, in_heads, two_and_one, narrow)
    },
    "transposed": (
        functools.partial(attention, transposed),
        dict.fromkeys(("first", "second"), LAYER | {"qkv": np.ascontiguousarray(LAYER["qkv"].T)}),
    ),
    "stacked": (stacked, {"layers": jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), LAYER)}),
    "gated": (gated, {"first": GATED, "second": GATED}),
    "convolved": (convolved, {"first": CONVOLVED, "second": CONVOLVED}),
    "recurrent": (
        recurrent,
        {"wx": draw(D, 4 * D), "wh": draw(D, 4 * D, seed=1), "bias": draw(4 * D), "out": draw(D, D, seed=2)},
    ),
}
QUICK = ("in_thirds", "two_and_one", "in_heads", "stacked", "recurrent", "convolved")


def given(name, sizes):
    loss_fn, params = PROGRAMS[name]
    batch = {"x": draw(B, L, D, seed=3), "y": draw(B, L, D, seed=4)}
    return (
        loss_fn,
        params,
        batch,
        derive(loss_fn, params, batch, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))),
    )


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", [*QUICK, *slowly(*(name for name in PROGRAMS if name not in QUICK))])
def test_loss_and_gradients_are_those_of_one_device(name, sizes):
    loss_fn, params, batch, plan = given(name, sizes)
    fused = {row.path: row.usage.parts for row in plan.rows if row.usage.parts > 1}
    counts = {"gated": {2}, "convolved": {2}, "recurrent": {4}}.get(name, {3})
    assert set(fused.values()) == counts
    assert len(fused) == sum(row.reason.endswith("each split, exchanged where it is used") for row in plan.rows)
    found = attempt(loss_fn, params, batch, plan, reshard_after_forward=name == "gated")
    assert found.worst < (2e-2 if name == "narrow" else 1e-5)


@pytest.mark.parametrize(
    "name", ["in_thirds", "stacked", "convolved", *slowly("in_slices", "in_a_dim", "in_heads", "transposed", "gated")]
)
def test_what_they_make_is_not_moved(name):
    """Between the pairs of matmuls nothing moves: two sums forward and back for two blocks, and the weights."""
    loss_fn, params, batch, plan = given(name, (2, 1, 4))
    found = attempt(loss_fn, params, batch, plan)
    kinds = {one.kind for one in found.moved if one.axes == ("tensor",) and one.bytes > 2**10}
    assert kinds == {"all-reduce", "all-to-all"}
    assert not any("cut into parts" in one.what for one in plan.collectives)
    over_tensor = sum(one.bytes * one.count for one in found.moved if one.axes == ("tensor",))
    assert over_tensor == pytest.approx(sum(one.bytes for one in plan.collectives if one.axis == "tensor"), rel=0.1)


def test_few_tokens_are_moved_and_not_the_weight():
    """What modulates a layer by a vector of each example is less than its weight."""

    def loss_fn(params, batch):
        shift, scale = jnp.split((batch["c"] @ params["kernel"])[:, None], 2, -1)
        return ((jnp.tanh(batch["x"] @ params["in"]) * scale + shift) @ params["out"]).mean()

    params = {"kernel": draw(D, 4 * D), "in": draw(D, 2 * D), "out": draw(2 * D, D)}
    plan = derive(loss_fn, params, {"x": draw(B, L, D), "c": draw(B, D)}, {"data": 2, "tensor": 4})
    assert plan.usage["kernel"] == Usage()
    found = attempt(loss_fn, params, {"x": draw(B, L, D), "c": draw(B, D)}, plan)
    assert found.worst < 1e-5


def test_a_use_that_needs_all_of_it_is_given_all_of_it():
    """A weight that is multiplied in another way besides, and a product that is summed over its projections."""

    def loss_fn(params, batch):
        made = norm(batch["x"]) @ params["in"]
        gate, up = jnp.split(made, 2, -1)
        penalty = (made**2).mean() + (params["in"] ** 2).sum() + jnp.sort(made, -1)[..., 0].mean()
        again = made @ params["in"].T
        return ((jax.nn.silu(gate) * up @ params["out"] + again - batch["y"]) ** 2).mean() + penalty

    params, batch = {"in": draw(D, 4 * D), "out": draw(2 * D, D)}, {"x": draw(B, L, D), "y": draw(B, L, D, seed=1)}
    plan = derive(loss_fn, params, batch, {"data": 1, "fsdp": 2, "tensor": 4})
    found = attempt(loss_fn, params, batch, plan)
    assert found.worst < 1e-5
