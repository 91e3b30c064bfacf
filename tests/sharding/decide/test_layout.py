"""Weights that no chosen axis splits: by rows, where that is cheaper than gathering them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.decide.choose import by_rows, choose
from redco_cli.sharding.program.reading import read
from tests.sharding.trial import attempt

B, L, D, F, K = 8, 8, 64, 256, 48
"""K columns in front of the others, so that shards of all of them are cut in the middle of what they are; as a penalty
needs them whole, they are not taken apart."""
MESH = {"data": 1, "fsdp": 2, "tensor": 4}
SHAPES = {"a": (D, K + F), "b": (F, D), "c": (K, D)}


def loss_fn(params, batch):
    made = batch["x"] @ params["a"]
    y = batch["x"] + jnp.tanh(made[..., K:]) @ params["b"] + made[..., :K] @ params["c"]
    return ((y - batch["y"]) ** 2).mean() + 1e-3 * (params["a"] ** 2).mean()


def given(length=L):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in SHAPES.items()}
    return params, {name: rng.normal(size=(B, length, D)).astype(np.float32) for name in "xy"}


def test_what_follows_columns_that_are_cut_unevenly_is_used_by_rows():
    params, batch = given()
    plan = derive(loss_fn, params, batch, MESH)
    assert plan.gathered["b"] == P("tensor")
    assert plan.specs["b"] == P(("tensor", "fsdp"))
    (row,) = (row for row in plan.rows if row.path == "b")
    assert row.reason.endswith("by rows alone, its results are summed")
    found = attempt(loss_fn, params, batch, plan)
    assert found.loss < 1e-5
    assert max(found.gradients.values()) < 1e-5
    gathered = [one.shape for one in found.moved if one.kind == "all-gather" and one.axes == ("tensor",)]
    assert not any(f"[{F},{D}]" in shape or f"[{D},{F}]" in shape for shape in gathered)


def test_what_rows_move_is_foreseen():
    params, batch = given()
    plan = derive(loss_fn, params, batch, MESH)
    rows = B // MESH["fsdp"] * L
    foreseen = {(one.kind, one.axis, one.what): one.bytes for one in plan.collectives}
    assert foreseen["all-gather", "tensor", "gradient of a matmul's input"] == rows * F * 4
    assert foreseen["all-reduce", "tensor", "partial sums of a matmul"] == rows * D * 4


@pytest.mark.parametrize(("length", "rows"), [(8, True), (4096, False)])
def test_a_weight_is_gathered_where_its_results_are_more(length, rows):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    batch = {name: jax.ShapeDtypeStruct((B, length, D), jnp.float32) for name in "xy"}
    reading = read(loss_fn, params, batch)
    chosen = choose(reading, MESH["tensor"], MESH["fsdp"])
    weight = next(parameter for parameter in reading.parameters if parameter.path == "b")
    assert (by_rows(weight, chosen, reading, MESH) is not None) == rows
    assert (derive(loss_fn, params, batch, MESH).gathered["b"] == P("tensor")) == rows


def test_a_weight_whose_input_is_split_is_not_split_once_more():
    def loss_fn(params, batch):
        return ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2).mean()

    params = {"a": jax.ShapeDtypeStruct((D, F), jnp.float32), "b": jax.ShapeDtypeStruct((F, D), jnp.float32)}
    reading = read(loss_fn, params, {"x": jax.ShapeDtypeStruct((B, L, D), jnp.float32)})
    chosen = choose(reading, MESH["tensor"], MESH["fsdp"])
    assert [by_rows(parameter, chosen, reading, MESH) for parameter in reading.parameters] == [None, None]


def test_what_is_used_by_rows_splits_no_residual_stream():
    width, features, vocabulary, length = 512, 1024, 1024, 4

    def normed(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def loss_fn(params, batch):
        x = params["table"][batch["ids"]]
        for up, down in (("up1", "down1"), ("up2", "down2")):
            x = normed(x + jax.nn.gelu(x @ params[up]) @ params[down])
        x = normed(jax.nn.gelu(x @ params["transform"]))
        return jax.nn.logsumexp(x @ params["table"].T, -1).mean()

    shapes = {"table": (vocabulary, width), "transform": (width, width)}
    shapes |= {"up1": (width, features), "up2": (width, features)}
    shapes |= {"down1": (features, width), "down2": (features, width)}
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) * 0.04 for name, shape in shapes.items()}
    batch = {"ids": rng.integers(0, vocabulary, (B, length)).astype(np.int32)}
    plan = derive(loss_fn, params, batch, MESH)
    assert plan.usage["transform"].alone == P("tensor")
    assert {row.path for row in plan.rows if row.usage.alone} == {"transform"}
    found = attempt(loss_fn, params, batch, plan)
    assert found.loss < 1e-5
    assert max(found.gradients.values()) < 1e-5
    over_tensor = [one.kind for one in found.moved if one.axes == ("tensor",)]
    foreseen = {(one.kind, one.what): one.count for one in plan.collectives if one.axis == "tensor"}
    assert over_tensor.count("all-gather") == foreseen["all-gather", "gradient of a matmul's input"] == 1
