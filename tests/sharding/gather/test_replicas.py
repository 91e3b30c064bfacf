"""Weights that a program uses several times, where replicas share the batch: their gradients are added up once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.sharding import derive
from tests.sharding.beside import draw, slowly
from tests.sharding.trial import attempt

ROWS, WIDTH, WIDE = 2048, 128, 2048
PARAMS = {"table": draw(ROWS, WIDTH), "up": draw(WIDTH, WIDE, seed=1) / 9, "down": draw(WIDE, WIDTH, seed=2) / 9}
NEW = {"new": draw(64, WIDTH, seed=3)}
IDS = np.random.default_rng(4).integers(0, ROWS, (16, 9)).astype(np.int32)
BATCH = {"ids": IDS[:, :-1], "next": IDS[:, 1:]}
DATA = {"data": 8}
MESHES = [DATA, *slowly({"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2})]


def hidden(params, table, ids):
    x = jnp.take(table, ids, axis=0)
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def head(x, table, ids):
    scores = jax.nn.log_softmax(x @ table.T)
    return -jnp.take_along_axis(scores, ids[..., None], -1).mean()


def tied(params, batch):
    return head(hidden(params, params["table"], batch["ids"]), params["table"], batch["next"])


def doubled(params, batch):
    """One that is computed with before it is looked up in, too."""
    table = 2 * params["table"]
    return head(hidden(params, table, batch["ids"]), table, batch["next"])


def with_new_rows(params, batch):
    table = jnp.concatenate([params["table"], params["new"]])
    return head(hidden(params, table, batch["ids"]), table, batch["next"])


def in_pieces(params, batch):
    """The head on a piece of the sequence at a time."""
    x = hidden(params, params["table"], batch["ids"])
    pieces = tuple(jnp.stack(jnp.split(one, 4, 1)) for one in (x, batch["next"]))

    def add(total, piece):
        return total + head(piece[0], params["table"], piece[1]) / 4, None

    return jax.lax.scan(add, 0.0, pieces)[0]


def applied_twice(params, batch):
    x = hidden(params, params["table"], batch["ids"])
    return jnp.square(jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"] @ params["up"]) @ params["down"]).mean()


LOSSES = {one.__name__: one for one in (tied, with_new_rows, doubled, in_pieces, applied_twice)}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_numbers_are_those_of_one_device_and_gradients_move_once(name, mesh):
    params = PARAMS | (NEW if name == "with_new_rows" else {})
    plan = derive(LOSSES[name], params, BATCH, mesh)
    found = attempt(LOSSES[name], params, BATCH, plan)
    assert found.worst < 3e-5
    if mesh == DATA:
        once = sum(leaf.nbytes for leaf in params.values()) * 2 * 7 / 8
        assert sum(one.sent for one in found.moved) < 1.03 * once


def beside_integers(params, batch):
    chosen = jnp.where(params["up"].astype(jnp.int8) == 0, 1.0, 2.0)
    x = params["table"][batch["ids"]]
    return jnp.square(x @ chosen + x @ params["up"]).mean()


def beside_narrow(params, batch):
    x = params["table"][batch["ids"]]
    few = (jnp.bfloat16(x) @ params["up"].astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.square(1e-3 * few + x @ params["up"]).mean()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("loss", [beside_integers, beside_narrow])
def test_a_sum_over_replicas_is_as_wide_as_the_widest_product(loss, mesh):
    assert attempt(loss, PARAMS, BATCH, derive(loss, PARAMS, BATCH, mesh)).worst < 3e-5
