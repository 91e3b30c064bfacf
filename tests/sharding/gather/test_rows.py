"""Rows that are looked up move, not the table, where they are fewer: the same numbers, and far fewer bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.decide.tables import are_fewer
from redco_cli.sharding.gather.gathering import gathering
from tests.sharding.beside import moved, slowly
from tests.sharding.gather.test_gathering import CUBE, MESH, approximately, draw, in_parts, on_mesh
from tests.sharding.measure import device_mesh

ROWS, FEATURES = 4096, 64  # a MiB
STORED = P(None, "fsdp")
LOOKUPS = {
    "rows": lambda table, at: jnp.tanh(table[at]),
    "of a table whose first row is zero": lambda table, at: jnp.tanh(table.at[0].set(0.0)[at]),
    "rows of rows": lambda table, at: jnp.tanh(table[at.reshape(8, 2, 2)]).sum((1, 2)),
    "taken": lambda table, at: jnp.tanh(jnp.take(table, at, axis=0)).sum(1),
    "columns": lambda table, at: jnp.tanh(table.T[:, at]).sum(0),
    "twice": lambda table, at: jnp.tanh(table[at] * table[at + 1]),
    "cast before": lambda table, at: jnp.tanh(table.astype(jnp.bfloat16)[at]).astype(jnp.float32),
    "cast after": lambda table, at: jnp.tanh(table[at].astype(jnp.bfloat16)).astype(jnp.float32),
    "rematerialised": lambda table, at: jax.checkpoint(lambda table: jnp.tanh(table[at]))(table),
    "in a loop": lambda table, at: jax.lax.fori_loop(
        0, 3, lambda _, x: jnp.tanh(table[at] + x), jnp.zeros((*at.shape, FEATURES))
    ),
    "others in each turn of a loop": lambda table, at: jax.lax.scan(
        lambda x, now: (jnp.tanh(table[now] + x), None), jnp.zeros((len(at), FEATURES)), at.T
    )[0],
    "tied": lambda table, at: jnp.tanh(table[at]) @ table.T,
}


def ids():
    """Of 8 examples, some more than once."""
    return np.random.default_rng(0).integers(0, ROWS - 1, (8, 4)) // 64 * 64


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("mesh", [pytest.param(MESH, marks=pytest.mark.slow), CUBE], ids=["fsdp", "cube"])
@pytest.mark.parametrize("used", [P(), *slowly(P(None, "fsdp"))], ids=["gathered", "in shards"])
def test_rows_are_those_of_one_device(name, mesh, used):
    function, table = LOOKUPS[name], draw(ROWS, FEATURES)
    close = 2e-2 if name.startswith("cast") else 2e-6
    found, right = on_mesh(function, table, ids(), specs=STORED, gathered=used, mesh=mesh)
    approximately(found, right, close)
    _, found, right = in_parts(function, table, ids(), specs=STORED, gathered=used, mesh=mesh)
    approximately(found, right, close)


@pytest.mark.parametrize("name", ["rows", "columns", "tied"])
def test_a_table_that_tensor_splits_by_rows(name):
    where = {"specs": P("tensor", "fsdp"), "gathered": P("tensor"), "mesh": CUBE}
    found, right = on_mesh(LOOKUPS[name], draw(ROWS, FEATURES), ids(), **where)
    approximately(found, right)


def test_ids_along_the_second_dim():
    """Of a table [features, rows]: the result has its features first."""
    found, right = on_mesh(
        lambda table, at: jnp.tanh(table[:, at]), draw(FEATURES, ROWS), ids(), specs=P("fsdp"), gathered=P(), mesh=CUBE
    )
    approximately(found, right)


def test_rows_are_moved_in_the_precision_that_they_are_used_in():
    gathers = gathering(lambda table, at: table[at].astype(jnp.bfloat16), STORED, P(), device_mesh(CUBE))
    text = str(jax.make_jaxpr(gathers)(draw(ROWS, FEATURES), ids()))
    assert re.findall(r"(\w+)\[8,4,64\] = sharding_constraint", text) == ["bf16", "bf16"]


@pytest.mark.parametrize("mesh", [CUBE, *slowly(MESH)], ids=["cube", "fsdp"])
@pytest.mark.parametrize("count", [26, *slowly(27)])
def test_a_number_of_rows_that_does_not_divide(count, mesh):
    """XLA fills such ids up with zeros, and would add gradients of theirs to the first row."""
    where = {"specs": P("tensor", "fsdp"), "gathered": P("tensor", "fsdp"), "mesh": mesh}
    some = on_mesh(lambda table, at: table[at.ravel()[:count]].mean(0), draw(ROWS, FEATURES), ids(), **where)
    approximately(*some)
    joined = on_mesh(
        lambda table, at: table[jnp.concatenate([at[:, 0], jnp.arange(count - 8)])].mean(0),
        draw(ROWS, FEATURES),
        ids(),
        **where,
    )
    approximately(*joined)


def test_gradients_of_a_row_are_added_up_in_float32():
    """A thousand of them: in bfloat16 the sum would stop at 256."""
    table, at = draw(ROWS, FEATURES).astype(jnp.bfloat16), np.zeros((8, 128), np.int32)
    (_, (found,)), _ = on_mesh(
        lambda table, at: table[at].sum(1), table, at, specs=STORED, gathered=P(), mesh={"data": 1, "fsdp": 8}
    )
    np.testing.assert_array_equal(np.asarray(found[0], np.float32), 1024.0)


def model(tied=False, wide=256):
    """A loss of tokens [B, 16] whose table has far more rows than they."""

    def loss_fn(params, batch):
        x = jnp.tanh(params["table"][batch["ids"]] @ params["mix"])
        return ((x @ (params["table"].T if tied else params["head"])) ** 2).mean()

    params = {"table": draw(ROWS, wide) * 0.1, "mix": draw(wide, wide) * 0.1}
    return loss_fn, params if tied else {**params, "head": draw(wide, 8)}, {"ids": np.zeros((16, 16), np.int32)}


@pytest.mark.parametrize("tied", [False, True], ids=["only looked up", "tied"])
def test_what_moves_is_what_is_predicted(tied):
    """Rows and their gradients, 32 on a device; the table only where a product needs it."""
    loss_fn, params, batch = model(tied)
    plan = derive(loss_fn, params, batch, {"fsdp": 8})
    assert plan.specs["table"] == P(None, "fsdp")
    devices = device_mesh(plan.mesh)
    places = jax.tree.map(lambda spec: NamedSharding(devices, spec), plan.specs)
    gathers = gathering(loss_fn, plan.specs, plan.gathered, devices)
    step = jax.jit(
        jax.value_and_grad(gathers),
        in_shardings=(places, NamedSharding(devices, P("fsdp"))),
        out_shardings=(None, places),
    )
    moved = compiled_collectives(step.lower(params, batch).compile(), plan.mesh)
    rows = [one for one in moved if one.kind == "all-to-all"]
    (predicted,) = [one for one in plan.collectives if one.kind == "all-to-all"]
    assert sum(one.bytes for one in rows) == predicted.bytes == 2 * 32 * 256 * 4
    gathered = sum(one.bytes for one in moved if one.kind == "all-gather") - batch["ids"].nbytes
    kernels = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - (0 if tied else params["table"].nbytes)
    assert gathered == kernels == sum(one.bytes for one in plan.collectives if one.kind == "all-gather")


@pytest.mark.parametrize("name", ["others in each turn of a loop", "of a table whose first row is zero"])
def test_tables_that_are_not_gathered(name):
    def loss(params, batch):
        return jnp.square(LOOKUPS[name](params["table"], batch["ids"])).mean()

    table, mesh = draw(ROWS, FEATURES), {"data": 1, "fsdp": 8, "tensor": 1}
    assert moved(loss, {"table": table}, {"ids": np.tile(ids(), (2, 1))}, mesh) < table.nbytes / 8


def test_a_plan_says_what_moves():
    loss_fn, params, batch = model()
    plan = derive(loss_fn, params, batch, {"fsdp": 8})
    (row,) = [row for row in plan.rows if row.path == "table"]
    assert row.spec == row.gathered == P(None, "fsdp")
    assert row.reason == "table: rows that are looked up move over fsdp 8, the table does not"
    plan = derive(loss_fn, params, batch, {"fsdp": 4, "tensor": 2})
    assert plan.gathered["table"][1] == "fsdp"


def test_a_table_with_fewer_rows_than_are_looked_up_is_gathered():
    loss_fn, params, _ = model()
    plan = derive(loss_fn, params, {"ids": np.zeros((16, 16 * ROWS), np.int32)}, {"fsdp": 8})
    assert plan.specs["table"] == P("fsdp")
    assert plan.gathered["table"] == P()
    assert not [one for one in plan.collectives if one.kind == "all-to-all"]


def test_rows_are_counted_on_a_device():
    assert are_fewer(8 * ROWS - 1, 8, ROWS, 2**20)
    assert not are_fewer(8 * ROWS, 8, ROWS, 2**20)
    assert not are_fewer(1, 8, ROWS, 2**20 - 1)


def test_a_table_whose_rows_do_not_divide_is_never_whole():
    """100,000,003 rows of 64 features: 23.8 GiB, of which a device has an eighth and moves what it looks up."""

    def loss_fn(params, batch):
        return params["table"][batch["ids"]].mean()

    params = {"table": jax.ShapeDtypeStruct((100_000_003, 64), "float32")}
    plan = derive(loss_fn, params, {"ids": jax.ShapeDtypeStruct((4096, 32), "int32")}, {"fsdp": 8})
    assert plan.bytes_per_device == plan.bytes // 8
    assert {(one.kind, one.bytes) for one in plan.collectives} == {("all-to-all", 2 * 4096 * 32 // 8 * 64 * 4)}


@pytest.mark.parametrize("name", ["rows", "cast after", "tied"])
def test_a_table_whose_features_do_not_divide_is_split_by_its_rows(name):
    """Each device looks up the rows that it has."""
    where = {"specs": P("fsdp"), "gathered": P(), "mesh": {"data": 2, "fsdp": 4, "tensor": 1}}
    found, right = on_mesh(LOOKUPS[name], draw(ROWS, FEATURES + 1), ids(), **where)
    approximately(found, right, 2e-2 if name.startswith("cast") else 2e-6)
    _, found, right = in_parts(LOOKUPS[name], draw(ROWS, FEATURES + 1), ids(), **where)
    approximately(found, right, 2e-2 if name.startswith("cast") else 2e-6)


def test_what_moves_of_a_table_that_is_split_by_its_rows_is_what_it_is_looked_up_for():
    def loss_fn(params, batch):
        return jnp.tanh(params["table"][batch["ids"]]).mean()

    plan = derive(loss_fn, {"table": draw(ROWS, 65)}, {"ids": np.zeros((16, 4), np.int32)}, {"fsdp": 8})
    assert plan.specs["table"] == plan.gathered["table"] == P("fsdp")
    rows = 16 * 4 // 8 * 65 * 4
    assert {(one.kind, one.bytes) for one in plan.collectives} == {("reduce-scatter", rows), ("all-gather", 8 * rows)}
