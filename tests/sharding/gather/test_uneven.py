"""A vocabulary that `tensor` does not divide, in a table that is looked up and is the head, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.compiled.traffic import total_bytes
from tests.sharding.beside import slowly
from tests.sharding.trial import attempt

B, L, D, V = 16, 4, 64, 8191
MESHES = [(1, 4, 2), (2, 2, 2), *slowly((1, 2, 4), (4, 1, 2))]


def head(x, table):
    return jax.nn.logsumexp(x @ table.T, -1)


def tied(params, batch):
    x = jnp.tanh(params["table"][batch["ids"]])
    return head(x, params["table"]).mean()


def only_head(params, batch):
    return head(batch["x"], params["table"]).mean()


def in_pieces(params, batch):
    x = jnp.tanh(params["table"][batch["ids"]])
    pieces = jnp.moveaxis(x.reshape(B, 2, L // 2, D), 1, 0)
    losses = jax.lax.map(jax.checkpoint(lambda piece: head(piece, params["table"]).sum()), pieces)
    return losses.sum() / (B * L)


def given():
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(V, D)).astype(np.float32) * 0.1}
    ids = rng.integers(0, V, (B, L)).astype(np.int32)
    ids[0] = [V - 1, V - 1, 0, V - 2]  # rows beside those that are added
    return params, {"ids": ids, "x": rng.normal(size=(B, L, D)).astype(np.float32)}


def attempted(loss_fn, sizes):
    params, batch = given()
    plan = derive(loss_fn, params, batch, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    return plan, attempt(loss_fn, params, batch, plan)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("loss_fn", [tied, only_head, in_pieces])
def test_loss_and_gradients_are_those_of_one_device(loss_fn, sizes):
    plan, found = attempted(loss_fn, sizes)
    assert plan.gathered["table"] == P("tensor")
    assert plan.specs["table"] == P(None, ("fsdp", "tensor") if sizes[1] > 1 else "tensor")
    assert found.loss < 1e-5
    assert found.gradients["table"] < 1e-5


@pytest.mark.parametrize("sizes", MESHES[:3], ids=str)  # without `fsdp` each use exchanges a gradient of its own
@pytest.mark.parametrize("loss_fn", [tied, only_head])
def test_the_table_is_exchanged_and_never_whole(loss_fn, sizes):
    """As much is moved as is foreseen, and no array of all rows has more features than a device of `fsdp` has."""
    plan, found = attempted(loss_fn, sizes)
    shapes = [one.shape for one in found.moved if one.kind != "all-to-all"]
    assert not any(f"[{rows},{D}]" in shape for shape in shapes for rows in (V, V + 1))
    foreseen = sum(one.bytes for one in plan.collectives)
    assert total_bytes(found.moved) == pytest.approx(foreseen, rel=0.05)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 2)], ids=str)
def test_ids_that_are_none_find_no_row_that_was_added(sizes):
    """`jnp.take` fills with nan there."""

    def loss_fn(params, batch):
        x = jnp.take(params["table"], batch["ids"], axis=0, mode="fill", fill_value=3.0)
        return (x * batch["x"]).sum() + head(batch["x"], params["table"]).mean()

    params, batch = given()
    batch["ids"][3] = [V, V + 1, 2 * V, V - 1]
    plan = derive(loss_fn, params, batch, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    found = attempt(loss_fn, params, batch, plan)
    assert plan.gathered["table"] == P("tensor")
    assert found.loss < 1e-5
    assert found.gradients["table"] < 1e-5
