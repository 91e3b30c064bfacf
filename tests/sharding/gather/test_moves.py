"""What parameters in shards move that are used in uncommon ways: no more than must be, and numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from tests.sharding.beside import draw
from tests.sharding.trial import attempt

B, L, D, F = 16, 16, 64, 256
DATA2, FSDP4 = {"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}
SMALL = 2**10


def examples():
    return {"x": draw(B, L, D, seed=8), "y": draw(B, L, D, seed=9)}


def over(found, axis):
    """Kinds and shapes of what is moved over a mesh axis, but for what is few bytes."""
    return [(one.kind, one.shape) for one in found.moved if one.axes == (axis,) and one.bytes > SMALL]


def gated_recurrent(params, batch):
    """A GRU, whose three gates are cut out of sums over what `tensor` splits."""

    def step(h, x):
        z, u = x @ params["wx"], h @ params["wh"]
        reset, keep = (jax.nn.sigmoid(z[:, at : at + D] + u[:, at : at + D]) for at in (0, D))
        h = (1 - keep) * jnp.tanh(z[:, 2 * D :] + reset * u[:, 2 * D :]) + keep * h
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros((B, D)), jax.nn.relu(batch["x"] @ params["in"]).swapaxes(0, 1))
    return ((jax.nn.relu(states.swapaxes(0, 1) @ params["up"]) @ params["down"] - batch["y"]) ** 2).mean()


RECURRENT = {"in": (D, D), "wx": (D, 3 * D), "wh": (D, 3 * D), "up": (D, F), "down": (F, D)}


def test_a_sum_in_a_loop_is_whole_before_it_is_cut():
    params = {name: draw(*shape, seed=len(name)) for name, shape in RECURRENT.items()}
    plan = derive(gated_recurrent, params, examples(), DATA2)
    found = attempt(gated_recurrent, params, examples(), plan)
    assert plan.specs["wx"] == P("tensor")
    assert found.worst < 1e-5
    assert not any(kind in ("collective-permute", "all-to-all", "reduce-scatter") for kind, _ in over(found, "tensor"))


def test_an_iteration_counts_each_time_it_moves():
    """Rows of the hidden state's weights would be summed in each of many steps: they are gathered, once."""
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in RECURRENT.items()}
    few, many = (
        derive(gated_recurrent, params, dict.fromkeys("xy", jax.ShapeDtypeStruct((B, steps, D), "float32")), DATA2)
        for steps in (2, 64)
    )
    assert (few.usage["wh"].alone, many.usage["wh"].alone) == (P("tensor"), P())


def stack_of_layers(params, batch):
    x = batch["x"]
    for number in range(4):
        x = x + jnp.tanh(x @ params["up"][number]) @ params["down"][number : number + 1][0]
    return ((x - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("mesh", [FSDP4, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_layer_of_a_stack_is_gathered_by_itself(mesh):
    params = {"up": draw(4, D, F) / 4, "down": draw(4, F, D, seed=1) / 4}
    plan = derive(stack_of_layers, params, examples(), mesh)
    found = attempt(stack_of_layers, params, examples(), plan)
    assert found.worst < 1e-5
    gathered = [shape for kind, shape in over(found, "fsdp") if kind == "all-gather"]
    assert gathered
    assert not any(shape.startswith("f32[4,") for shape in gathered)
    if mesh.get("data", 1) == 1:
        assert {kind for kind, _ in over(found, "fsdp")} == {"all-gather", "reduce-scatter"}


def tables_of_a_stack(params, batch):
    rows = jnp.stack([params["tables"][number][batch["ids"][:, number]] for number in range(3)], 1)
    return ((rows @ params["head"]) ** 2).mean()


def test_rows_of_a_table_in_a_stack_are_moved_and_not_the_table():
    params = {"tables": draw(3, 8192, D), "head": draw(D, 8)}
    batch = {"ids": np.random.default_rng(0).integers(0, 8192, (B, 3)).astype(np.int32)}
    plan = derive(tables_of_a_stack, params, batch, {"fsdp": 8})
    found = attempt(tables_of_a_stack, params, batch, plan)
    assert found.worst < 1e-5
    assert not any("8192" in shape for _, shape in over(found, "fsdp"))


def chain(params, batch):
    """The last weight is split no more: its neighbours have its dims over `tensor`, and it lives in shards."""
    x = jnp.tanh(batch["x"] @ params["a"])
    x = jnp.tanh(x @ params["b"])
    return ((x @ params["c"] - batch["y"]) ** 2).mean()


def test_replicas_add_up_what_each_device_keeps_of_a_gradient():
    """Of a weight that is used whole, and in shards over `tensor` where it lives."""
    params = {"a": draw(D, 1024), "b": draw(1024, 1024, seed=1) / 4, "c": draw(1024, 128, seed=2)}
    batch = {"x": draw(16, 64, D), "y": draw(16, 64, 128)}
    plan = derive(chain, params, batch, DATA2)
    whole = next(row for row in plan.rows if row.spec and not row.gathered)
    found = attempt(chain, params, batch, plan)
    assert found.worst < 1e-5
    summed = sum(one.bytes for one in found.moved if one.kind == "all-reduce" and one.axes == ("data",))
    assert whole.bytes_per_device == whole.bytes // 4
    assert summed == pytest.approx(plan.bytes_per_device, rel=0.01)


def shared(params, batch):
    x = batch["x"]
    for p in params.values():
        h = jnp.tanh(x)
        x = x + (h @ p["up"] * jax.nn.sigmoid(h @ p["gate"])) @ p["down"] * jax.nn.sigmoid(h @ p["whole"])
    return ((x - batch["y"]) ** 2).mean()


def test_a_weight_that_is_whole_does_not_part_the_sum_of_those_that_are_split():
    shapes = {"up": (D, F), "gate": (D, F), "down": (F, D), "whole": (D, D)}
    layer = {name: draw(*shape, seed=len(name)) for name, shape in shapes.items()}
    plan = derive(shared, {"first": layer, "second": layer}, examples(), DATA2)
    assert plan.gathered["first"]["whole"] == P()
    found = attempt(shared, {"first": layer, "second": layer}, examples(), plan)
    assert found.worst < 1e-5
    activation = [shape for kind, shape in over(found, "tensor") if kind == "all-reduce" and f"[8,{L},{D}]" in shape]
    assert len(activation) == 3  # two results, and the gradient of one input: the first is the batch


def convolved(params, batch):
    x = batch["x"]
    for p in params.values():
        numbers = ("NLC", "LIO", "NLC")
        made = jax.lax.conv_general_dilated(
            x, p["depth"], (1,), "SAME", dimension_numbers=numbers, feature_group_count=D
        )
        x = x + jnp.tanh(jnp.tanh(made) @ p["up"]) @ p["down"]
    return ((x - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("mesh", [DATA2, FSDP4, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_grouped_convolution_keeps_examples_where_they_are(mesh):
    layer = {"depth": draw(7, 1, D), "up": draw(D, F), "down": draw(F, D)}
    params = {"first": layer, "second": layer}
    plan = derive(convolved, params, examples(), mesh)
    found = attempt(convolved, params, examples(), plan)
    assert found.worst < 1e-5
    assert not any(kind == "all-gather" for kind, _ in over(found, "tensor"))


def _in_time(params, batch):
    """Images that are not the examples: steps lead them, both are one dim, or there is one that nothing divides."""
    x, w = batch["x"], params["depth"] / (1 + jnp.abs(params["depth"]).sum(0))
    first = jax.lax.conv_general_dilated(
        x.swapaxes(0, 1), w, (1,), "SAME", dimension_numbers=("LNC", "LIO", "LNC"), feature_group_count=D
    ).swapaxes(0, 1)
    parts = (x + first).reshape(-1, 4, D)
    second = jax.lax.conv_general_dilated(
        parts, params["depth"], (1,), "SAME", dimension_numbers=("NLC", "LIO", "NLC"), feature_group_count=D
    )
    one = (second.mean((0, 1)) + x.mean((0, 1)))[None, None]
    third = jax.lax.conv_general_dilated(
        one, params["depth"], (1,), "SAME", dimension_numbers=("NLC", "LIO", "NLC"), feature_group_count=D
    )
    made = jnp.tanh(jnp.tanh(second.reshape(x.shape) + third) @ params["up"]) @ params["down"]
    return ((made - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("mesh", [DATA2, FSDP4, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_grouped_convolution_of_any_images_has_the_gradient_of_one_device(mesh):
    params = {"depth": draw(7, 1, D), "up": draw(D, F), "down": draw(F, D)}
    plan = derive(_in_time, params, examples(), mesh)
    assert attempt(_in_time, params, examples(), plan).worst < 1e-5


def test_a_weight_from_an_axis_to_itself_makes_what_its_input_is_split_along():
    def loss_fn(params, batch):
        u = batch["x"] @ params["in"]
        made = u * jax.nn.sigmoid(u @ params["gate"])
        return ((made @ params["out"] - batch["y"]) ** 2).mean()

    params = {"in": draw(D, F), "gate": draw(F, F), "out": draw(F, D)}
    plan = derive(loss_fn, params, examples(), DATA2)
    assert plan.specs["gate"] == P(None, "tensor")
    assert attempt(loss_fn, params, examples(), plan).worst < 1e-5


def test_a_weight_without_a_gradient_goes_by_rows_as_one_with_a_gradient():
    def encode(p, x):
        return jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"]

    def loss_fn(params, batch):
        x = batch["x"].mean(1)
        return ((encode(params["own"], x) - encode(jax.lax.stop_gradient(params["teacher"]), x)) ** 2).mean()

    one = {"a": draw(D, 1024), "b": draw(1024, 1024, seed=1) / 8, "c": draw(1024, D, seed=2)}
    params = {"own": one, "teacher": {name: leaf / 2 for name, leaf in one.items()}}
    plan = derive(loss_fn, params, examples(), DATA2)
    assert {row.path for row in plan.rows if row.spec != row.gathered} == set()
    assert attempt(loss_fn, params, examples(), plan).worst < 1e-5
