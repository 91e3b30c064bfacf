"""What is refused and what is warned of, word for word."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.errors import DeviceError
from redco_cli.sharding import derive, make_plan, read
from tests.sharding.programs.small import attend, norm, token_loss
from tests.sharding.shorthand import shaped

D, F = 8, 64
EXAMPLES = {"x": jax.ShapeDtypeStruct((16, D), "float32")}


def pair(params, batch):
    """An MLP of 1024 elements, and whatever else there is, used element by element."""
    rest = sum(jnp.mean(leaf) for name, leaf in params.items() if name not in "ab")
    return jnp.mean(jax.nn.relu(batch["x"] @ params["a"]) @ params["b"]) + rest


def pair_with(**shapes):
    return shaped({"a": (D, F), "b": (F, D), **shapes})


def refused(params, mesh, loss_fn=pair, batch=EXAMPLES):
    with pytest.raises(DeviceError) as caught:
        derive(loss_fn, params, batch, mesh)
    return str(caught.value)


def test_an_unknown_axis():
    assert refused(pair_with(), {"model": 2}) == (
        "mesh: there is no mesh axis 'model'\n  -> the axes are data, fsdp, tensor"
    )


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0"), (-1, "-1"), ("4", "'4'"), (True, "True"), (2.0, "2.0"), (None, "None")]
)
def test_a_size_that_is_no_number_of_devices(size, shown):
    assert refused(pair_with(), {"data": 2, "tensor": size}) == (
        f"mesh.tensor: {shown} is no number of devices\n  -> give 1 or more"
    )


def test_places_are_those_of_the_recipe():
    reading = read(pair, pair_with(), EXAMPLES)
    with pytest.raises(DeviceError) as caught:
        make_plan(reading, {"model": 2}, where=lambda key: f"recipes/x.yaml:7: {key}")
    assert caught.value.problems[0].where == "recipes/x.yaml:7: mesh"
    with pytest.raises(DeviceError) as caught:
        make_plan(reading, {"tensor": 3}, where=lambda key: f"recipes/x.yaml:7: {key}")
    assert caught.value.problems[0].where == "recipes/x.yaml:7: mesh.tensor"


def test_what_divides_over_nothing_is_refused_over_tensor():
    assert refused(pair_with(), {"tensor": 3}) == (
        "mesh.tensor: 100.0% of the parameter bytes are whole on every tensor device: "
        "a [8, 64] (no axis that divides and is cheap to split over tensor 3), "
        "b [64, 8] (no axis that divides and is cheap to split over tensor 3)\n"
        "  -> lower tensor, or split them with sharding.override"
    )


def test_what_divides_over_nothing_is_refused_over_fsdp():
    assert refused(pair_with(), {"fsdp": 3}) == (
        "mesh.fsdp: 100.0% of the parameter bytes are whole on every fsdp device: "
        "a [8, 64] (no dim divides over fsdp 3), b [64, 8] (no dim divides over fsdp 3)\n"
        "  -> lower fsdp, or split them with sharding.override"
    )


def test_the_three_largest_are_named_and_the_others_counted():
    text = refused(pair_with(c=(100,), d=(200,), e=(150,), g=(90,)), {"tensor": 2})
    assert text == (
        "mesh.tensor: 34.5% of the parameter bytes are whole on every tensor device: "
        "d [200] (vector of the residual stream), e [150] (vector of the residual stream), "
        "c [100] (vector of the residual stream) and 1 more\n"
        "  -> lower tensor, or split them with sharding.override"
    )


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
@pytest.mark.parametrize(("elements", "expected"), [(20, "silent"), (21, "2.0%"), (113, "9.9%"), (114, "refused")])
def test_bounds(axis, elements, expected):
    """20 of 1044 elements are 1.92 %, 21 of 1045 2.01 %; 113 of 1137 are 9.94 %, 114 of 1138 10.02 %."""
    params = pair_with(v=(elements,))
    reason = {
        "tensor": "vector of the residual stream",
        "fsdp": "vector: whole, too small to be worth gathering",
    }[axis]
    what = f"of the parameter bytes are whole on every {axis} device: v [{elements}] ({reason})"
    if expected == "refused":
        text = refused(params, {axis: 2})
        assert text == f"mesh.{axis}: 10.0% {what}\n  -> lower {axis}, or split them with sharding.override"
        return
    warnings = derive(pair, params, EXAMPLES, {axis: 2}).warnings
    if expected == "silent":
        assert warnings == ()
    else:
        assert warnings == (f"{expected} {what}; lower {axis}, or split them with sharding.override",)


def test_both_axes_are_warned_of_in_order():
    warnings = derive(pair, pair_with(v=(60,)), EXAMPLES, {"fsdp": 2, "tensor": 2}).warnings
    assert [text.split(":")[0] for text in warnings] == [
        "5.5% of the parameter bytes are whole on every fsdp device",
        "5.5% of the parameter bytes are whole on every tensor device",
    ]


def test_a_mesh_of_one_warns_of_nothing():
    assert derive(pair, pair_with(v=(5000,)), EXAMPLES, {"data": 8}).warnings == ()


# Heads.

B, L, HIDDEN = 8, 16, 64


def attention(heads, head_dim, width=0):
    """One layer, beside an MLP of some width."""

    def loss_fn(params, batch):
        x = params["e"][batch["x"]]
        q, k, v = ((x @ params[name]).reshape(B, L, heads, head_dim) for name in "qkv")
        y = x + attend(q, k, v).reshape(B, L, heads * head_dim) @ params["o"]
        if width:
            y = y + jax.nn.relu(y @ params["a"]) @ params["b"]
        return jnp.mean(y)

    inner = heads * head_dim
    shapes = {"e": (96, HIDDEN), "q": (HIDDEN, inner), "k": (HIDDEN, inner), "v": (HIDDEN, inner), "o": (inner, HIDDEN)}
    shapes |= {"a": (HIDDEN, width), "b": (width, HIDDEN)} if width else {}
    return loss_fn, shaped(shapes), {"x": jax.ShapeDtypeStruct((B, L), "int32")}


def test_more_shards_than_heads():
    loss_fn, params, batch = attention(8, 8)
    assert refused(params, {"tensor": 16}, loss_fn, batch) == (
        "mesh.tensor: more shards (16) than heads (8) over tensor 16; each device would compute "
        "k [64, 64] (8 heads), o [64, 64] (8 heads), q [64, 64] (8 heads) and 1 more\n"
        "  -> take tensor 8 and give the other devices to fsdp or data"
    )


def test_heads_that_do_not_divide():
    loss_fn, params, batch = attention(6, 8)
    assert refused(params, {"tensor": 4}, loss_fn, batch) == (
        "mesh.tensor: 6 heads do not divide over tensor 4; each device would compute "
        "k [64, 48] (6 heads), o [48, 64] (6 heads), q [64, 48] (6 heads) and 1 more\n"
        "  -> take tensor 2 and give the other devices to fsdp or data"
    )


@pytest.mark.parametrize(("heads", "tensor", "remedy"), [(12, 8, 4), (9, 6, 3), (5, 2, 1), (7, 4, 1)])
def test_the_remedy_is_the_largest_size_that_works(heads, tensor, remedy):
    loss_fn, params, batch = attention(heads, 8)
    text = refused(params, {"tensor": tensor}, loss_fn, batch)
    assert text.endswith(f"\n  -> take tensor {remedy} and give the other devices to fsdp or data")
    plan = derive(loss_fn, params, batch, {"tensor": remedy})
    assert not [text for text in plan.warnings if "heads" in text]


def test_a_little_attention_that_does_not_divide_is_a_warning():
    """4 x 64 x 48 of 224 256 elements are 5.5 %."""
    loss_fn, params, batch = attention(6, 8, width=1600)
    warnings = derive(loss_fn, params, batch, {"tensor": 4}).warnings
    assert warnings[0] == (
        "6 heads do not divide over tensor 4; each device would compute "
        "k [64, 48] (6 heads), o [48, 64] (6 heads), q [64, 48] (6 heads) and 1 more; "
        "take tensor 2 and give the other devices to fsdp or data"
    )


def test_very_little_attention_that_does_not_divide_is_no_warning():
    loss_fn, params, batch = attention(6, 8, width=9600)
    assert derive(loss_fn, params, batch, {"tensor": 4}).warnings == ()


def test_heads_that_divide_are_no_error_where_another_axis_is_cheaper():
    """Without norms and with a tied embedding the residual stream itself is as good to split."""

    def loss_fn(params, batch):
        x = params["e"][batch["x"]]
        q, k, v = ((x @ params[name]).reshape(B, L, 8, 8) for name in "qkv")
        x = x + attend(q, k, v).reshape(B, L, HIDDEN) @ params["o"]
        return token_loss(x @ params["e"].T, batch["x"])

    params = shaped({"e": (96, HIDDEN), **dict.fromkeys("qkvo", (HIDDEN, HIDDEN))})
    plan = derive(loss_fn, params, {"x": jax.ShapeDtypeStruct((B, L), "int32")}, {"tensor": 4})
    assert plan.warnings == ()
    assert all("tensor" in row.spec for row in plan.rows)


def test_grouped_heads_are_counted_together():
    """Two KV heads of four queries each are eight heads: sixteen shards are too many, eight are not."""

    def loss_fn(params, batch):
        x = params["e"][batch["x"]]
        q = (x @ params["q"]).reshape(B, L, 2, 4, 8)
        k, v = ((x @ params[name]).reshape(B, L, 2, 8) for name in "kv")
        scores = jax.nn.softmax(jnp.einsum("bqkgp,bskp->bkgqs", q, k))
        return jnp.mean(x + jnp.einsum("bkgqs,bskp->bqkgp", scores, v).reshape(B, L, HIDDEN) @ params["o"])

    params = shaped({"e": (96, HIDDEN), "q": (64, 64), "k": (64, 16), "v": (64, 16), "o": (64, 64)})
    text = refused(params, {"tensor": 16}, loss_fn, {"x": jax.ShapeDtypeStruct((B, L), "int32")})
    assert text == (
        "mesh.tensor: more shards (16) than heads (8) over tensor 16; each device would compute "
        "o [64, 64] (8 heads), q [64, 64] (8 heads)\n"
        "  -> take tensor 8 and give the other devices to fsdp or data"
    )


@pytest.mark.parametrize("tensor", [4, 8])
def test_few_key_value_heads_are_no_error_however_many_bytes_they_are(tensor):
    """Two for eight queries: a seventh of the bytes, kept in shards and gathered."""

    def loss_fn(params, batch):
        x = params["e"][batch["x"]]
        y = norm(x, params["n"])
        q = (y @ params["q"]).reshape(B, L, 8, 8)
        k, v = (jnp.repeat((y @ params[name]).reshape(B, L, 2, 8), 4, axis=2) for name in "kv")
        return jnp.mean(x + attend(q, k, v).reshape(B, L, HIDDEN) @ params["o"])

    shapes = {"e": (48, HIDDEN), "n": (HIDDEN,), "q": (64, 64), "k": (64, 16), "v": (64, 16), "o": (64, 64)}
    plan = derive(loss_fn, shaped(shapes), {"x": jax.ShapeDtypeStruct((B, L), "int32")}, {"tensor": tensor})
    assert all("tensor" in row.spec for row in plan.rows if row.path in "qkvoe")


def test_a_primitive_that_is_not_understood_is_a_warning():
    """On every mesh, as its operands count as needed whole."""

    def loss_fn(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["a"])
        for _ in range(2):
            hidden = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((16, F), "float32"), hidden)
        return jnp.mean(hidden @ params["b"])

    for mesh in ({"data": 8}, {"tensor": 2}):
        assert derive(loss_fn, pair_with(), EXAMPLES, mesh).warnings == (
            "no rule for the primitive pure_callback (met 2 times): its operands count as needed whole; "
            "if it is a kernel, redco_cli.sharding.register_reference tells what it computes",
        )


def test_what_is_small_may_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(params, batch):
        return (batch["x"] * params["v"]).sum()

    params, batch = {"v": jnp.ones(7)}, {"x": jnp.ones((8, 7))}
    with pytest.raises(DeviceError):
        derive(loss_fn, params, batch, {"fsdp": 8})
    monkeypatch.setattr("redco_cli.sharding.decide.guards.SMALL", 2**20)
    assert derive(loss_fn, params, batch, {"fsdp": 8}).warnings == ()
