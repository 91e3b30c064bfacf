"""What a backward pass computes once more, and moves once more then."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import compiled_collectives, derive
from redco_cli.sharding.compiled.traffic import total_bytes
from redco_cli.sharding.recomputed import computed_again
from tests.sharding.shorthand import f32
from tests.sharding.trial import compiled

B, L, D, F, LAYERS = 8, 8, 64, 256, 3
MESH = {"data": 1, "fsdp": 2, "tensor": 4}
POLICIES = jax.checkpoint_policies


def normed(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(x, own):
    x = x + checkpoint_name(jnp.tanh(x @ own["a"]) @ own["b"], "mixed")
    return x + jax.nn.gelu(normed(x) @ own["c"]) @ own["d"]


def post_normed(x, own):
    x = normed(x + checkpoint_name(jnp.tanh(x @ own["a"]) @ own["b"], "mixed"))
    return normed(x + jax.nn.gelu(x @ own["c"]) @ own["d"])


def masked(x, own):
    x = x + checkpoint_name(jnp.tanh(x @ own["a"]) @ own["b"], "mixed")
    kept = (jnp.arange(L) > 2).astype(x.dtype)
    return x + kept[:, None] * (jax.nn.gelu(normed(x) @ own["c"]) @ own["d"])


def held_back(x, own):
    made = jnp.tanh(x @ own["a"]) @ own["b"]
    made, x = jax.lax.optimization_barrier((made, normed(x)))
    return made + jax.nn.gelu(x @ own["c"]) @ own["d"]


OWN = {"a": f32(D, F), "b": f32(F, D), "c": f32(D, F), "d": f32(F, D)}


def products_of(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0]
        for inner in core.jaxprs_in_params(equation.params):
            yield from products_of(inner)


@pytest.mark.parametrize(
    ("function", "policy", "expected"),
    [
        (layer, None, [True, True, True, False]),
        (layer, POLICIES.nothing_saveable, [True, True, True, False]),
        (layer, POLICIES.save_only_these_names("mixed"), [True, False, True, False]),
        (layer, POLICIES.dots_saveable, [False] * 4),
        (layer, POLICIES.everything_saveable, [False] * 4),
        (post_normed, None, [True] * 4),
        (jax.jit(post_normed), None, [True] * 4),
        (masked, None, [True, True, True, False]),
        (jax.jit(masked), None, [True, True, True, False]),
        (held_back, None, [True, False, True, False]),
        (jax.jit(layer), POLICIES.save_only_these_names("mixed"), [True, False, True, False]),
    ],
)
def test_products_that_gradients_need_once_more(function, policy, expected):
    (equation,) = jax.make_jaxpr(jax.checkpoint(function, policy=policy))(f32(B, L, D), OWN).eqns
    again = computed_again(equation.params["jaxpr"], equation.params["policy"])
    assert [product in again for product in products_of(equation.params["jaxpr"])] == expected


@pytest.mark.parametrize("function", [layer, post_normed, masked])
@pytest.mark.parametrize(
    "policy",
    [
        None,
        POLICIES.save_only_these_names("mixed"),
        pytest.param(POLICIES.everything_saveable, marks=pytest.mark.slow),
    ],
)
def test_sums_that_move_once_more_are_foreseen(function, policy):
    """In layers that are scanned, as XLA moves them: in the forward pass, and for what the backward pass recomputes."""

    def loss_fn(params, batch):
        layers = jax.checkpoint(function, policy=policy)
        x, _ = jax.lax.scan(lambda x, own: (layers(x, own), None), batch["x"], params)
        return (x**2).mean()

    params = {name: f32(LAYERS, *own.shape) for name, own in OWN.items()}
    batch = {"x": f32(B, L, D)}
    plan = derive(loss_fn, params, batch, MESH)
    assert plan.gathered["b"] == plan.gathered["d"] == P(None, "tensor")
    step, _ = compiled(loss_fn, params, batch, plan)
    moved = [one for one in compiled_collectives(step, MESH) if one.axes == ("tensor",)]
    foreseen = [one for one in plan.collectives if one.axis == "tensor"]
    assert total_bytes(moved) == sum(one.bytes for one in foreseen)
