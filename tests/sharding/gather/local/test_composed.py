"""Weights that are made of smaller ones: the numbers of one device, and gradients that move as what is small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.beside import CUBE, MESH, approximately, draw, in_parts, moved, on_mesh, slowly

WIDTH, WIDE, RANK = 16, 64, 4
DATA = {"data": 8, "fsdp": 1, "tensor": 1}
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
WEIGHTS = {
    "up": draw(WIDTH, WIDE),
    "left": draw(WIDTH, RANK, seed=1),
    "right": draw(RANK, WIDE, seed=2),
    "scale": draw(WIDE, seed=3),
    "down": draw(WIDE, WIDTH, seed=4),
}
LAYERS = {"left": draw(3, WIDTH, RANK, seed=5), "right": draw(3, RANK, WIDTH, seed=6)}
X = draw(8, WIDTH, seed=7)
SPECS = {
    "up": P("fsdp", "tensor"),
    "left": P("fsdp"),
    "right": P(None, ("tensor", "fsdp")),
    "scale": P(),
    "down": P(("tensor", "fsdp")),
}
USED = {"up": P(None, "tensor"), "left": P(), "right": P(None, "tensor"), "scale": P(), "down": P("tensor")}


def merged(p):
    return p["up"] + 0.5 * p["left"] @ p["right"]


def decomposed(p):
    w = merged(p)
    return p["scale"] * w / jnp.linalg.norm(w, axis=0)


def frozen(p):
    return jax.lax.stop_gradient(p["up"]) + p["left"] @ p["right"]


def recurrent(p, x):
    steps = jnp.stack([x, 2 * x, x + 1])
    return jax.lax.scan(lambda h, x: (jnp.tanh(x @ (p["left"] @ p["right"]) + h), h), jnp.zeros((8, WIDE)), steps)


def layered(p, x):
    """Factors of each layer, as a scan takes them."""
    layers = jnp.stack([p["left"], 2 * p["left"]]), jnp.stack([p["right"][:, :WIDTH], p["right"][:, WIDTH : 2 * WIDTH]])
    return jax.lax.scan(lambda x, ab: (jnp.tanh(x @ (ab[0] @ ab[1])), None), x, layers)[0]


def before_layers(make):
    """What a model's layers are made of, made before them."""

    def loss(p, x):
        left, right = (jnp.stack([p[key], 2 * p[key], p[key] - 1])[:, :, :WIDTH] for key in ("left", "right"))
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, make(p, left, right))[0]

    return loss


TURNED = draw(3, WIDTH, WIDTH, seed=8)
LOSSES = {
    "factors": lambda p, x: x @ (p["left"] @ p["right"]),
    "added to another": lambda p, x: jnp.tanh(x @ merged(p)) @ p["down"],
    "in magnitude and direction": lambda p, x: jnp.tanh(x @ decomposed(p)) @ p["down"],
    "beside what is frozen": lambda p, x: x @ frozen(p),
    "used twice": lambda p, x: (jnp.tanh(x @ merged(p)), jnp.sin(x @ merged(p)) @ p["down"]),
    "used for more than products": lambda p, x: (jnp.tanh(x @ merged(p)), (x[:, :, None] * merged(p)).sum(1)),
    "transposed": lambda p, x: jnp.tanh(x @ p["up"]) @ (p["left"] @ p["right"]).T,
    "in bfloat16": lambda p, x: jnp.bfloat16(x) @ merged(jax.tree.map(jnp.bfloat16, p)),
    "rematerialised": lambda p, x: jax.checkpoint(lambda p, x: jnp.tanh(x @ merged(p)) @ p["down"])(p, x),
    "within a jit": lambda p, x: [
        x @ jax.jit(lambda a, b: a @ b)(a, b) for a, b in [(p["left"], p["right"]), (p["right"].T[:WIDTH], p["right"])]
    ],
    "in each iteration": recurrent,
    "of each layer": layered,
    "of layers": before_layers(lambda p, a, b: a @ b),
    "of layers, in many ways": before_layers(
        lambda p, a, b: (
            (jnp.einsum("lir,lrj->lij", a, b).transpose(0, 2, 1) * 0.5).reshape(3, WIDTH, WIDTH)
            / (1 + jnp.square(a @ b).sum(1, keepdims=True))
        )
    ),
    "of layers, times constants of each": before_layers(lambda p, a, b: (a @ b) * TURNED),
    "of layers, with what all of them use": lambda p, x: jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ (w + p["up"][:, :WIDTH])), None),
        x,
        jnp.stack([p["left"]] * 2) @ jnp.stack([p["right"]] * 2)[:, :, :WIDTH],
    )[0],
    "of all layers": before_layers(lambda p, a, b: jnp.einsum("lir,mrj->lij", a, b) * 0.1),
    "of layers, and of one": before_layers(lambda p, a, b: a @ b + p["left"] @ p["right"][:, :WIDTH]),
    "in a branch": lambda p, x: jax.lax.cond(x[0, 0] > 9, lambda p: x @ merged(p), lambda p: x @ p["up"], p),
    "its norm": lambda p, x: (jnp.tanh(x @ merged(p)), jnp.square(merged(p)).sum()),
    "of its kind alone": lambda p, x: (x @ p["up"], jnp.square(p["up"].T @ p["up"] - jnp.eye(WIDE)).sum()),
    "with its transpose": lambda p, x: x @ (p["up"] @ p["up"].T) + x @ (p["up"] + p["down"].T)[:, :WIDTH],
    "times a number that is learnt": lambda p, x: x @ (p["scale"][0] * p["up"]),
    "in rows of zeros": lambda p, x: x @ jnp.pad(p["up"], ((0, 0), (0, 3))),
    "one above a bias": lambda p, x: jnp.pad(x, ((0, 0), (0, 1))) @ jnp.concatenate([p["up"], p["scale"][None]]),
    "positive": lambda p, x: jnp.tanh(x @ jax.nn.relu(p["up"])) @ jax.nn.softplus(p["down"]),
    "sorted": lambda p, x: x @ jnp.sort(p["up"], 0)[::-1],
    "rolled": lambda p, x: x @ jnp.roll(p["up"], 1, 0) + x @ jnp.roll(p["up"], 1, 0) * 2,
    "exponential": lambda p, x: x @ jax.scipy.linalg.expm(0.1 * (p["up"] - 1)[:, :WIDTH]),
    "with a constant": lambda p, x: x @ (p["left"] @ np.ones((RANK, WIDE), np.float32) + p["up"]),
    "with a number of the batch": lambda p, x: x @ (x.mean() * (p["left"] @ p["right"])),
    "as a table": lambda p, x: merged(p)[jnp.int32(jnp.abs(x * 10))[:, :3] % WIDTH],
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mesh", [MESH, *slowly(CUBE, FSDP, DATA)], ids=["fsdp and tensor", "cube", "fsdp", "data"])
@pytest.mark.parametrize("again", [False, *slowly(True)], ids=["", "again"])
def test_numbers_are_those_of_one_device(name, mesh, again):
    whole = dict.fromkeys(SPECS, P())
    places = (whole, whole) if mesh == DATA else (SPECS, USED)
    how = {"specs": places[0], "gathered": places[1], "mesh": mesh, "reshard_after_forward": again}
    approximately(*on_mesh(LOSSES[name], WEIGHTS, X, **how), 3e-2 if name == "in bfloat16" else 1e-5)


@pytest.mark.parametrize("name", slowly(*LOSSES))
def test_parts_of_replicas_add_up(name):
    _, found, right = in_parts(LOSSES[name], WEIGHTS, X, specs=SPECS, gathered=USED, mesh=CUBE)
    approximately(found, right, 3e-2 if name == "in bfloat16" else 1e-5)


def large(*names):
    """Weights large enough to be in shards."""
    return {
        key: np.tile(WEIGHTS[key], (32, 8) if key == "up" else (32, 1) if key == "left" else (1, 8)) for key in names
    }


BATCH = {"x": np.tile(X, (1, 32))}
LORA = {"frozen": frozen, "recurrent": lambda p: p["left"] @ p["right"]}


def squared(results):
    return sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(results))


@pytest.mark.parametrize("mesh", [FSDP, *slowly(CUBE)], ids=["fsdp", "cube"])
def test_gradients_of_factors_move_as_few_bytes_as_they_have(mesh):
    factors = large("left", "right")
    sent = moved(lambda p, batch: squared(batch["x"] @ (p["left"] @ p["right"])), factors, BATCH, mesh)
    assert 0 < sent < 3 * sum(leaf.nbytes for leaf in factors.values())
    again = moved(lambda p, batch: squared(recurrent_of(p, batch["x"])), factors, BATCH, mesh)
    assert again < 1.1 * sent


def recurrent_of(p, x):
    start = jnp.zeros((len(x), p["right"].shape[1]))
    return jax.lax.scan(lambda h, x: (jnp.tanh(x @ (p["left"] @ p["right"]) + h), None), start, jnp.stack([x, 2 * x]))[
        0
    ]


@pytest.mark.parametrize("mesh", [FSDP, *slowly(CUBE)], ids=["fsdp", "cube"])
def test_what_is_frozen_is_gathered_and_nothing_else_of_its_size_moves(mesh):
    params = large("up", "left", "right")
    sent = moved(lambda p, batch: squared(batch["x"] @ frozen(p)), params, BATCH, mesh)
    assert params["up"].nbytes * 7 / 8 / mesh["tensor"] / mesh["data"] < sent < 1.2 * params["up"].nbytes
