"""Through which arrays of a program no gradient goes back: beside what JAX differentiates, and in what is predicted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from redco_cli.sharding import derive
from redco_cli.sharding.gradients import without_gradient
from redco_cli.sharding.rings import ring_bytes, sent_bytes
from tests.sharding.shorthand import f32
from tests.sharding.trial import attempt

still = lax.stop_gradient


def looped(carries, a, b):
    """What `a` makes comes to the result after two rounds, or never; `b` is in each."""

    def turn(carry, _):
        first, second, third = carry
        return (first * b, second + (first if carries else still(first)), third + a), None

    return lax.scan(turn, (a, b, jnp.zeros(())), length=3)[0][1]


@jax.custom_jvp
def doubled(a, b):
    return a * b


doubled.defjvp(lambda primals, tangents: (primals[0] * primals[1], 2 * tangents[0]))
CASES = {
    "both": lambda a, b: a * b,
    "stopped": lambda a, b: still(jnp.exp(a)) * b,
    "stopped once of twice": lambda a, b: still(a) * b + a,
    "in a comparison": lambda a, b: jnp.where(a > 0, b, 2 * b),
    "by its place": lambda a, b: b * (1 + jnp.stack([a, b]).argmax()),
    "as a whole number": lambda a, b: b * (1 + a.astype(int)),
    "in a call": jax.jit(lambda a, b: jax.jit(still)(a) + b),
    "recomputed": jax.checkpoint(lambda a, b: jnp.sin(still(jnp.sin(a)) + b)),
    "carried": lambda a, b: looped(True, a, b),
    "carried, stopped": lambda a, b: looped(False, a, b),
    "in slices": lambda a, b: lax.scan(lambda c, x: (c + still(x), b * c), 0.0, jnp.stack([a, a]))[1].sum(),
    "in one branch": lambda a, b: lax.cond(b > 0, lambda a: still(a), lambda a: a, a) + b,
    "in no branch": lambda a, b: lax.cond(b > 0, lambda a: still(a), lambda a: 2 * still(a), a) + b,
    "of its own": lambda a, b: doubled(a, b) + b,
    "unused": lambda a, b: b,
}


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_is_where_jax_finds_none(name):
    function = CASES[name]
    jaxpr = jax.make_jaxpr(function)(0.5, -0.7).jaxpr
    found = [variable not in without_gradient(jaxpr) for variable in jaxpr.invars]
    assert found == [gradient != 0 for gradient in jax.grad(function, (0, 1))(0.5, -0.7)]


def test_a_derivative_of_its_own_is_taken_to_need_every_operand():
    @jax.custom_vjp
    def through(a):
        return still(jnp.round(a))

    through.defvjp(lambda a: (jnp.round(a), None), lambda _, g: (g,))
    jaxpr = jax.make_jaxpr(through)(0.5).jaxpr
    assert jax.grad(through)(0.5) == 1
    assert not without_gradient(jaxpr).intersection(jaxpr.invars)


def test_where_nothing_is_returned_nothing_is_said():
    assert not without_gradient(jax.make_jaxpr(lambda _: ())(1.0).jaxpr)


D, F, B = 64, 128, 32


def net(params, x):
    return jax.nn.relu(jax.nn.relu(x @ params["a"]) @ params["b"]) @ params["c"]


def bootstrapped(params, batch):
    """Values learnt from those of a target network, which has no gradient."""
    target = still(batch["r"][:, None] + 0.9 * net(params["target"], batch["next"]))
    return ((net(params["own"], batch["x"]) - target) ** 2).mean()


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}], ids=str)
def test_what_a_target_network_moves_is_predicted(mesh):
    one = {"a": f32(D, F), "b": f32(F, F), "c": f32(F, 8)}
    abstract = {"own": one, "target": one}
    batch = {"x": f32(B, D), "next": f32(B, D), "r": f32(B)}
    plan = derive(bootstrapped, abstract, batch, mesh)
    rng = np.random.default_rng(0)
    params, examples = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("float32") / 8, (abstract, batch))
    found = attempt(bootstrapped, params, examples, plan)
    assert found.worst < 1e-5
    sent = sum(ring_bytes(one.kind, one.bytes, one.devices) * one.count for one in found.moved)
    assert sum(sent_bytes(one, plan.mesh) for one in plan.collectives) == pytest.approx(sent, rel=0.1)
