"""What is done with weights where they live: the numbers of one device, and nothing of them gathered for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding.gather.gathering import gathering
from tests.sharding.beside import CUBE, MESH, approximately, draw, in_parts, moved, on_mesh, slowly
from tests.sharding.measure import device_mesh

WIDTH, ROWS = 16, 8192
WEIGHTS = {
    "up": draw(WIDTH, 4 * WIDTH),
    "down": draw(4 * WIDTH, WIDTH, seed=1),
    "other": draw(WIDTH, 4 * WIDTH, seed=2),
}
TABLE = {"table": draw(ROWS, WIDTH * 2, seed=3)}
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
X = draw(8, WIDTH, seed=4)


def network(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def cosine(w):
    return w / jnp.sqrt(jnp.square(w).sum(0, keepdims=True))


def standardised(w):
    return (w - w.mean(0)) / (w.std(0) + 1e-3)


def stacked(p, x):
    layers = jnp.stack([p["up"], p["other"]])
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w)[:, : x.shape[1]], None), x, layers)[0]


SUMMED = {
    "squares": lambda p, x: (network(p, x), sum(jnp.sum(w**2) for w in p.values())),
    "inner products": lambda p, x: (network(p, x), jnp.vdot(p["up"], p["up"]) + jnp.vdot(p["up"], p["other"])),
    "within a jit": lambda p, x: (network(p, x), jax.jit(lambda p: sum(jnp.abs(w).sum() for w in p.values()))(p)),
    "beside another precision": lambda p, x: (
        network(jax.tree.map(jnp.bfloat16, p), jnp.bfloat16(x)),
        jnp.sum((p["up"] - p["other"]) ** 2),
    ),
    "beside its transpose": lambda p, x: (
        network(p, x),
        jnp.sum((p["up"] - p["down"].T) ** 2) + jnp.sum(p["up"][:, :WIDTH] * p["up"][:, :WIDTH].T),
    ),
    "in another shape": lambda p, x: (network(p, x), jnp.sum((p["up"].reshape(4 * WIDTH, WIDTH) - p["down"]) ** 2)),
    "put together": lambda p, x: (network(p, x), jnp.linalg.norm(jnp.concatenate([p["up"], p["other"]]))),
    "of columns": lambda p, x: (network(p, x), jnp.tanh((p["up"] * 2).max(0)).sum()),
}
MASKS = [draw(WIDTH, 4 * WIDTH, seed=seed) for seed in (5, 6)]
MADE = {
    "with a row set, and one added to": lambda p, x: x @ p["up"].at[0].set(1.0).at[3, :5].add(0.5),
    "times constants of each jit": lambda p, x: [x @ jax.jit(lambda w, c=c: w * c)(p["up"]) for c in MASKS],
    "a cosine": lambda p, x: jnp.tanh(x @ cosine(p["up"])) @ cosine(p["down"]),
    "standardised": lambda p, x: jnp.tanh(x @ standardised(p["up"])) @ p["down"],
    "masked": lambda p, x: jnp.tanh(x @ (p["up"] * np.tri(WIDTH, 4 * WIDTH, dtype=np.float32))) @ p["down"],
    "frozen in part": lambda p, x: x @ (jax.lax.stop_gradient(p["up"]) + 0.1 * p["other"]),
    "rematerialised": lambda p, x: jax.checkpoint(lambda p, x: jnp.tanh(x @ cosine(p["up"])) @ p["down"])(p, x),
    "side by side": lambda p, x: x @ jnp.concatenate([p["up"], p["other"]], 1),
    "one above the other": lambda p, x: jnp.concatenate([x, x], 1) @ jnp.concatenate([p["up"], p["other"]]),
    "stacked": stacked,
    "the largest of several": lambda p, x: x @ jnp.stack([p["up"], p["other"], 2 * p["up"]]).max(0),
    "used as it is, too": lambda p, x: jnp.tanh(x @ cosine(p["up"])) + x @ p["up"],
    "in a loop over layers": lambda p, x: jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ standardised(w[0])) @ w[1], None),
        x,
        (jnp.stack([p["up"], p["other"]]), jnp.stack([p["down"], p["down"]])),
    )[0],
}


def twice(make):
    """A model that makes what it multiplies with of its weight each time that it is applied."""
    return lambda p, x: (jnp.tanh(x @ make(p)) @ p["down"], jnp.sin(x @ make(p)) @ p["down"])


TWICE = {
    "cast": twice(lambda p: jnp.float32(jnp.bfloat16(p["up"]))),
    "scaled": twice(lambda p: p["up"] * 0.5),
    "masked": twice(lambda p: p["up"] * (jnp.arange(p["up"].shape[1]) % 2)),
    "normed": twice(lambda p: p["up"] / jnp.linalg.norm(p["up"], axis=0)),
    "added": twice(lambda p: p["up"] + p["other"]),
    "made once": lambda p, x: (lambda w: (jnp.tanh(x @ w) @ p["down"], jnp.sin(x @ w)))(p["up"] * 2),
    "in bfloat16": lambda p, x: [
        jnp.tanh(jnp.bfloat16(x) @ p["up"].astype(jnp.bfloat16)) @ p["down"].astype(jnp.bfloat16) for _ in range(3)
    ],
}


SPECS = {"up": P("fsdp", "tensor"), "down": P(("tensor", "fsdp")), "other": P("fsdp", "tensor")}
USED = {"up": P(None, "tensor"), "down": P("tensor"), "other": P(None, "tensor")}
ALL = {**SUMMED, **MADE, **TWICE}
ROUGH = ("beside another precision", "cast", "in bfloat16")


@pytest.mark.parametrize("name", [*SUMMED, *MADE, "made once", *slowly(*list(TWICE)[:-2], "in bfloat16")])
@pytest.mark.parametrize("mesh", [MESH, *slowly(CUBE, FSDP)], ids=["fsdp and tensor", "cube", "fsdp"])
def test_numbers_are_those_of_one_device(name, mesh):
    found, right = on_mesh(ALL[name], WEIGHTS, X, specs=SPECS, gathered=USED, mesh=mesh)
    approximately(found, right, 3e-2 if name in ROUGH else 1e-5)


@pytest.mark.parametrize("name", [*slowly(*SUMMED, *MADE)[:-3], "squares", "a cosine", "stacked", *slowly(*TWICE)])
def test_parts_of_replicas_add_up(name):
    parts, found, right = in_parts(ALL[name], WEIGHTS, X, specs=SPECS, gathered=USED, mesh=CUBE)
    assert parts["up"].shape == (*WEIGHTS["up"].shape, 2)
    approximately(found, right, 3e-2 if name in ROUGH else 1e-5)


def test_codes_are_summed_as_numbers():
    """Their squares would not be the same in eight bits."""
    codes = np.random.default_rng(5).integers(-127, 127, (WIDTH, 4 * WIDTH)).astype(np.int8)
    devices, specs = device_mesh(FSDP), {"codes": P("fsdp"), "up": P("fsdp")}

    def loss(p, x):
        return (x @ p["up"]).sum() + jnp.square(p["codes"].astype(jnp.float32) * 0.1 - p["up"]).sum()

    params = {"codes": codes, "up": WEIGHTS["up"]}
    gathers = gathering(loss, specs, {"codes": P(), "up": P()}, devices)
    found = jax.jit(jax.value_and_grad(lambda up: gathers({**params, "up": up}, X)))(WEIGHTS["up"])
    approximately(found, jax.value_and_grad(lambda up: loss({**params, "up": up}, X))(WEIGHTS["up"]), 1e-5)


def tiled():
    """Weights large enough to be in shards, and a batch."""
    return {key: np.tile(value, (4, 4)) for key, value in WEIGHTS.items()}, {"x": np.tile(X, (1, 4))}


def squared(function):
    return lambda p, batch: sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(function(p, batch["x"])))


@pytest.mark.parametrize("name", ["squares", "inner products", "within a jit"])
@pytest.mark.parametrize("mesh", [FSDP, *slowly(MESH, CUBE)], ids=["fsdp", "fsdp and tensor", "cube"])
def test_a_sum_of_weights_moves_none_of_them(name, mesh):
    params, x = tiled()
    plain = moved(squared(lambda p, x: (network(p, x), x @ p["other"])), params, x, mesh)
    decayed = squared(lambda p, x: (*SUMMED[name](p, x), x @ p["other"]))
    assert moved(decayed, params, x, mesh) < 1.02 * plain


@pytest.mark.parametrize("name", ["a cosine", "side by side", "stacked", "frozen in part"])
def test_what_is_made_of_weights_is_gathered_once_and_so_is_its_gradient(name):
    params, x = tiled()
    used = {"a cosine": ("up", "down"), "frozen in part": ("up",)}.get(name, ("up", "other"))
    each = sum(params[key].nbytes for key in used) * 7 // 8
    assert moved(squared(MADE[name]), params, x, FSDP) < 1.05 * 2 * each


def sampled(p, x, decay=0.0):
    """Rows of the examples, and some that all of them are compared with."""
    at = jnp.int32(jnp.abs(x[:, 0] * 1e4)) % ROWS
    others = jax.random.randint(jax.random.key(0), (12,), 0, ROWS)
    return jnp.tanh(p["table"][at] @ p["table"][others].T), decay * jnp.square(p["table"]).sum()


@pytest.mark.parametrize("mesh", [FSDP, *slowly(MESH, CUBE)], ids=["fsdp", "fsdp and tensor", "cube"])
def test_rows_that_all_look_up_and_the_decay_of_a_table(mesh):
    """Two thousandths of it move, and no more."""
    specs = {"table": P(None, ("tensor", "fsdp") if mesh["tensor"] > 1 else "fsdp")}
    found, right = on_mesh(lambda p, x: sampled(p, x, 1e-3), TABLE, X, specs=specs, gathered=specs, mesh=mesh)
    approximately(found, right, 1e-5)
    if mesh["data"] == 1:
        table = TABLE["table"].nbytes
        assert moved(squared(lambda p, x: sampled(p, x, 1e-3)), TABLE, {"x": X}, mesh) < table / 100


@pytest.mark.parametrize("name", ["made once", *slowly(*list(TWICE)[:-2]), "in bfloat16"])
def test_what_is_made_several_times_is_gathered_once(name):
    params, x = tiled()
    size = (params["up"].nbytes * (1 + (name == "added")) + params["down"].nbytes) * 7 // 8
    assert moved(squared(TWICE[name]), params, x, FSDP, "all-gather") < 1.01 * size
