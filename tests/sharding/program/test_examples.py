"""Which arrays of a program have examples in their leading dim."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding.program.examples import find_examples


def layer(x, w):
    return jnp.tanh(x @ w)


def looped(w, x):
    def turn(carry, _):
        here, _ = carry
        return (layer(here, w), here), None

    return jax.lax.scan(turn, (x, jnp.zeros_like(x)), None, length=3)[0]


FUNCTIONS = {
    "an activation": (layer, [True]),
    "merged with a dim": (lambda x, w: (x[:, None] * jnp.ones((1, 5, 1))).reshape(-1, 12) @ w, [True]),
    "of the weight alone": (lambda x, w: w @ w, [False]),
    "of positions alone": (lambda x, w: jnp.eye(8, 12) @ w, [False]),
    "a sum": (lambda x, w: layer(x, w).sum(0), [False]),
    "in a jit": (lambda x, w: jax.jit(lambda x, w: (layer(x, w), jnp.eye(8, 12) @ w))(x, w), [True, False]),
    "in a remat": (lambda x, w: jax.checkpoint(lambda x, w: (layer(x, w), w[:9]))(x, w), [True, False]),
    "carried by a loop": (lambda x, w: looped(w, x), [True, True]),
    "of a branch": (lambda x, w: jax.lax.cond(w.sum() > 0, lambda: x, lambda: jnp.eye(8, 12)), [True]),
    "of a loop of unknown length": (lambda x, w: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), [True]),
    "with a derivative of its own": (lambda x, w: jax.nn.relu(x), [True]),
    "of its rows": (lambda x, w: x[:, None, :] @ w, [True]),
    "in groups": (lambda x, w: jnp.stack([x, x], 1).reshape(16, 12) @ w, [True]),
    "cut along another dim": (lambda x, w: jnp.concatenate([x[:, :3], jnp.pad(x, ((0, 0), (1, 2)))], 1), [True]),
    "with and without them": (lambda x, w: x + x.mean(0), [True]),
}
ELSEWHERE = {
    "transposed": lambda x, w: x.swapaxes(0, 1),
    "transposed, and through a layer": lambda x, w: layer(x.swapaxes(0, 1), w),
    "rows of theirs, transposed": lambda x, w: w[jnp.int32(x[..., 0])].swapaxes(0, 1),
    "behind another dim": lambda x, w: layer(x.swapaxes(0, 1).reshape(-1, 12), w),
    "repeated in front": lambda x, w: jnp.broadcast_to(x, (8, *x.shape)),
    "stacked": lambda x, w: jnp.stack([x] * 8),
    "carried by a loop over time": lambda x, w: jax.lax.scan(
        lambda carry, part: (layer(carry, w), part), x.swapaxes(0, 1), jnp.swapaxes(x, 0, 1)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_computed_from_the_batch(name):
    function, expected = FUNCTIONS[name]
    closed = jax.make_jaxpr(function)(jnp.ones((8, 12)), jnp.ones((12, 12)))
    examples = find_examples(closed, [True, False])
    assert examples.counts == {8}
    assert [examples.lead(one) for one in closed.jaxpr.outvars] == expected


def test_inside_of_a_loop_too():
    closed = jax.make_jaxpr(looped)(jnp.ones((12, 12)), jnp.ones((8, 12)))
    examples = find_examples(closed, [False, True])
    (loop,) = [one for one in closed.jaxpr.eqns if one.primitive.name == "scan"]
    (product,) = [one for one in loop.params["jaxpr"].jaxpr.eqns if one.primitive.name == "dot_general"]
    assert [examples.lead(one) for one in product.invars] == [True, False]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_was_taken_to_another_dim(name):
    """Though as many stand in front of it."""
    closed = jax.make_jaxpr(ELSEWHERE[name])(jnp.ones((8, 16, 12)), jnp.ones((12, 12)))
    examples = find_examples(closed, [True, False])
    assert [examples.lead(one) for one in closed.jaxpr.outvars] == [False] * len(closed.jaxpr.outvars)


def test_an_iteration_over_time_has_them_in_front():
    def recurrent(w, x):
        return jax.lax.scan(lambda h, part: (layer(part + h, w), h), jnp.zeros((8, 12)), x.swapaxes(0, 1))

    closed = jax.make_jaxpr(recurrent)(jnp.ones((12, 12)), jnp.ones((8, 16, 12)))
    examples = find_examples(closed, [False, True])
    (loop,) = [one for one in closed.jaxpr.eqns if one.primitive.name == "scan"]
    (product,) = [one for one in loop.params["jaxpr"].jaxpr.eqns if one.primitive.name == "dot_general"]
    assert examples.lead(product.outvars[0])
    assert [examples.lead(one) for one in closed.jaxpr.outvars] == [True, False]


def test_a_batch_of_no_examples_has_none():
    closed = jax.make_jaxpr(lambda x: x.reshape(-1))(jnp.ones((0, 12)))
    assert not find_examples(closed, [True]).lead(closed.jaxpr.outvars[0])
