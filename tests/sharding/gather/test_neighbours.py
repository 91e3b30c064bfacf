"""Graph networks: edges take rows of nodes, and add rows to them, on meshes that split both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.sharding.derive import derive
from redco_cli.sharding.gather import gathering
from redco_cli.sharding.gather.neighbours import has_neighbours
from redco_cli.sharding.program.events import NEIGHBOURS
from tests.sharding.beside import slowly
from tests.sharding.trial import attempt

NODES, EDGES, D, F = 64, 384, 32, 128
MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]
MESHES += slowly({"fsdp": 8}, {"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2})


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / np.sqrt(shape[0])


def graph():
    numbers = np.random.default_rng(1).integers(0, NODES, (2, EDGES)).astype(np.int32)
    return {"x": draw(NODES, D), "y": draw(NODES, D, seed=2), "from": numbers[0], "to": numbers[1]}


def taken(x, numbers):
    return x[numbers]


def jitted(x, numbers):
    return jnp.take(x, numbers, axis=0)


def add(rows, numbers):
    return jax.ops.segment_sum(rows, numbers, NODES)


def largest(rows, numbers):
    return jnp.maximum(jax.ops.segment_max(rows, numbers, NODES), -9)


def network(take, gather):
    def loss_fn(params, batch):
        x = batch["x"]
        for p in params.values():
            both = jnp.concatenate([take(x, batch["from"]), take(x, batch["to"])], -1)
            sent = jax.nn.relu(both @ p["up"]) @ p["down"]
            x = x + jax.nn.relu(gather(sent, batch["to"]) @ p["in"]) @ p["out"]
        return ((x - batch["y"]) ** 2).mean()

    return loss_fn


def sent(trial):
    return sum(one.sent for one in trial.moved)


def parameters():
    layer = {"up": draw(2 * D, F), "down": draw(F, D), "in": draw(D, F), "out": draw(F, D)}
    return {"first": layer, "second": {name: leaf / 2 for name, leaf in layer.items()}}


@pytest.mark.parametrize("gather", [add, pytest.param(largest, marks=pytest.mark.slow)])
@pytest.mark.parametrize("take", [taken, *slowly(jitted)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_nodes_move_and_not_what_edges_take_of_them(mesh, take, gather, monkeypatch):
    loss_fn = network(take, gather)
    plan = derive(loss_fn, parameters(), graph(), mesh)
    found = attempt(loss_fn, parameters(), graph(), plan)
    assert found.worst < 1e-5
    monkeypatch.setattr(gathering, "are_neighbours", lambda *_: False)
    alone = attempt(loss_fn, parameters(), graph(), plan)
    assert sent(found) <= (0.85 if "tensor" in mesh else 1.0) * sent(alone)
    foreseen = {(one.kind, one.what): one.count for one in plan.collectives if NEIGHBOURS in one.what}
    assert foreseen == {
        ("all-gather", NEIGHBOURS): 4,
        ("reduce-scatter", f"gradient of {NEIGHBOURS}"): 2,  # the first nodes are the batch
        ("reduce-scatter", NEIGHBOURS): 2,
        ("all-gather", f"gradient of {NEIGHBOURS}"): 2,
    }


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, batch: batch["x"][jnp.arange(NODES), batch["from"][:NODES] % D].sum(),  # one of each example
        lambda params, batch: jnp.take_along_axis(batch["x"], batch["from"][:NODES, None] % D, 1).sum(),
        lambda params, batch: batch["x"][batch["from"][:8]].sum(),  # fewer rows than nodes
    ],
)
def test_what_is_left_to_the_compiler(loss_fn):
    batch = jax.tree.map(jnp.asarray, graph())
    assert not has_neighbours(jax.make_jaxpr(loss_fn)({}, batch).jaxpr)
