"""Overrides: what they decide, and what is refused word for word."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.errors import DeviceError, RecipeError
from redco_cli.sharding import derive, make_plan, read
from tests.sharding.shorthand import f32, gathered, reasons, stored

MESH = {"fsdp": 2, "tensor": 4}
BATCH = {"x": jax.ShapeDtypeStruct((16, 96), "float32")}


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x * params["scale"] @ params["head"])


PARAMS = {"layers": [{"up": f32(96, 256), "down": f32(256, 96)} for _ in range(2)], "scale": f32(96)}
PARAMS["head"] = f32(96, 8)
READING = read(loss_fn, PARAMS, BATCH)


def plan_of(*overrides, mesh=MESH):
    return make_plan(READING, mesh, override=overrides)


def refused(*overrides, mesh=MESH):
    with pytest.raises(RecipeError) as caught:
        make_plan(READING, mesh, override=overrides, where=lambda key: f"r.yaml:3: {key}")
    return str(caught.value)


def test_without_overrides():
    assert stored(plan_of()) == {
        "head": "f t",
        "layers/0/up": "f t",
        "layers/0/down": "tf -",
        "layers/1/up": "f t",
        "layers/1/down": "tf -",
        "scale": "-",
    }


def test_an_override_decides_where_a_parameter_lives_and_gathers_it_over_fsdp():
    plan = plan_of((r"layers/0/up", ["tensor", "fsdp"]))
    assert (stored(plan)["layers/0/up"], gathered(plan)["layers/0/up"]) == ("t f", "t -")
    assert reasons(plan)["layers/0/up"] == "override layers/0/up"
    rest = {path: entry for path, entry in stored(plan).items() if path != "layers/0/up"}
    assert rest == {path: entry for path, entry in stored(plan_of()).items() if path != "layers/0/up"}


@pytest.mark.parametrize(
    ("axes", "spec", "at_use"),
    [
        (["tensor"], "t -", "t -"),
        ([None, "tensor"], "- t", "- t"),
        ([], "- -", "- -"),
        ([None, None], "- -", "- -"),
        ([["fsdp", "tensor"]], "ft -", "t -"),
        ([["tensor", "fsdp"], None], "tf -", "t -"),
        (["fsdp"], "f -", "- -"),
        ([[], ["fsdp"]], "- f", "- -"),
    ],
)
def test_every_way_to_write_axes(axes, spec, at_use):
    plan = plan_of(("^head$", axes))
    assert (stored(plan)["head"], gathered(plan)["head"]) == (spec, at_use)


def test_a_pattern_is_searched_for_and_the_last_one_counts():
    plan = plan_of(("up", ["tensor", "fsdp"]), (r"1/up$", [["fsdp", "tensor"]]))
    assert [stored(plan)[f"layers/{layer}/up"] for layer in range(2)] == ["t f", "ft -"]
    assert [reasons(plan)[f"layers/{layer}/up"] for layer in range(2)] == ["override up", "override 1/up$"]
    plan = plan_of((r"1/up$", [["fsdp", "tensor"]]), ("up", ["tensor", "fsdp"]))
    assert [stored(plan)[f"layers/{layer}/up"] for layer in range(2)] == ["t f", "t f"]


def test_an_override_that_leaves_much_whole_is_refused_like_a_rule_that_does():
    with pytest.raises(DeviceError) as caught:
        plan_of((r"layers/1/up", ["tensor"]))
    assert str(caught.value) == (
        "mesh.fsdp: 24.9% of the parameter bytes are whole on every fsdp device: "
        "layers/1/up [96, 256] (override layers/1/up), scale [96] (vector of the residual stream)\n"
        "  -> lower fsdp, or split them with sharding.override"
    )


def test_derive_takes_overrides_too():
    plan = derive(loss_fn, PARAMS, BATCH, MESH, override=[("scale", ["tensor"])])
    assert stored(plan)["scale"] == gathered(plan)["scale"] == "t"


def test_no_regular_expression():
    assert refused(("up", ["tensor"]), ("(", ["tensor"])) == (
        "r.yaml:3: sharding.override.1.path: '(' is no regular expression: "
        "missing ), unterminated subpattern at position 0\n"
        "  -> escape special characters with a backslash"
    )


def test_a_pattern_that_matches_nothing():
    assert refused(("attention", ["tensor"])) == (
        "r.yaml:3: sharding.override.0.path: 'attention' matches no parameter\n"
        "  -> redco inspect-sharding lists them; the first is head"
    )


def test_a_pattern_that_lacks_what_paths_begin_with():
    text = refused(("^1/up", ["tensor"]))
    assert text.endswith("'^1/up' matches no parameter\n  -> did you mean ^layers/1/up? paths begin so")


def test_too_many_dims():
    assert refused(("up", [None, None, "tensor"])) == (
        "r.yaml:3: sharding.override.0.axes: 3 entries for layers/0/up, which has the 2 dims [96, 256]\n"
        "  -> give one entry for each dim"
    )


def test_an_axis_for_two_dims():
    assert refused(("up", ["tensor", "tensor"])) == (
        "r.yaml:3: sharding.override.0.axes: tensor is used twice for layers/0/up\n  -> use each axis once"
    )


def test_an_axis_twice_for_one_dim():
    assert refused(("up", [["fsdp", "fsdp"]])) == (
        "r.yaml:3: sharding.override.0.axes: fsdp is used twice for layers/0/up\n  -> use each axis once"
    )


@pytest.mark.parametrize("axis", ["data", "model"])
def test_an_axis_that_splits_no_parameters(axis):
    assert refused(("up", [None, axis])) == (
        f"r.yaml:3: sharding.override.0.axes: '{axis}' does not split parameters\n  -> the axes are fsdp and tensor"
    )


def test_a_dim_that_does_not_divide():
    assert refused(("scale", [["fsdp", "tensor"]]), mesh={"fsdp": 5, "tensor": 4}) == (
        "r.yaml:3: sharding.override.0.axes: a dim of 96 of scale cannot be split into 20 equal parts\n"
        "  -> split another dim, or leave this one whole: null"
    )
