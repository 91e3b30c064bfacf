"""Conditionals whose branches are rematerialised: the same numbers, and nothing kept but what went in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.sharding.gather.conditionals import is_rematerialised, rematerialised_switch

X, W, AT = jnp.linspace(-1, 1, 8), jnp.linspace(0.5, 2, 16).reshape(2, 8), jnp.array([3, 1])


def nothing(x, params, at):
    return [jnp.zeros_like(x), x.sum()]


@jax.checkpoint
def once(x, params, at):
    return [jnp.tanh(x * params["w"][0]), params["w"][1][at].sum()]


@jax.checkpoint
def twice(x, params, at):
    return [jnp.sin(once(x, params, at)[0] * params["w"][1]), (x[at] ** 2).sum()]


BRANCHES = [nothing, once, twice]


def loss(switch, which, x, params, at=AT):
    first, second = switch(which, BRANCHES, x, params, at)
    return (first**2).sum() + 3 * second


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "derived",
    [
        lambda switch, which: jax.value_and_grad(lambda x, w: loss(switch, which, x, {"w": w}), argnums=(0, 1)),
        lambda switch, which: jax.jacrev(jax.grad(lambda x, w: loss(switch, which, x, {"w": w}))),
    ],
    ids=["once", "twice"],
)
def test_numbers_and_gradients_are_those_of_a_switch(derived, which):
    found, expected = (jax.jit(derived(switch, which))(X, W) for switch in (rematerialised_switch, jax.lax.switch))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6), found, expected)


def conditionals(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield equation
        for part in equation.params.values():
            inner = getattr(part, "jaxpr", part)
            yield from conditionals(inner) if hasattr(inner, "eqns") else ()


def test_only_what_has_a_gradient_is_given_back():
    """Of three arrays that are given one is derived by: the second conditional has no result but its gradient."""
    traced = jax.make_jaxpr(jax.grad(lambda x: loss(rematerialised_switch, AT[1], x, {"w": W})))(X)
    assert [[one.aval.shape for one in each.outvars] for each in conditionals(traced.jaxpr)][-1] == [X.shape]


def test_which_conditionals_they_are():
    def zeros(x, *_):
        return [jnp.zeros(8), jnp.zeros(())]

    def of(*branches):
        traced = jax.make_jaxpr(lambda which, x: jax.lax.switch(which, branches, x, {"w": W}, AT))(0, X)
        return is_rematerialised(next(conditionals(traced.jaxpr)))

    assert of(zeros, once, twice)
    assert not of(nothing, once)  # which sums its x
    assert not of(zeros, zeros)
