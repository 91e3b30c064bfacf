"""How often branches are taken, by what a program knows without its arguments."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding.program.branches import branch_shares, by_number
from redco_cli.sharding.program.flops import count_products
from redco_cli.sharding.program.marks import usually
from redco_cli.sharding.program.reading import read

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
ONE = 2 * 8 * 16 * 16
WINDOWS = (128, 128, 4096, 128, 128)


def layers(x, w):
    """As a decoder has them: what differs between layers is taken from an array, inside of what is recomputed."""

    @jax.checkpoint
    def layer(h, window):
        kind = jnp.argmax(jnp.array([4096, 128]) == window)
        return jax.lax.switch(kind, (lambda h: h @ w @ w, lambda h: h @ w), h), None

    return jax.lax.scan(layer, x, jnp.array(WINDOWS))[0]


def test_layers_of_two_kinds():
    traced = jax.make_jaxpr(jax.jit(layers))(X, W)
    assert list(branch_shares(traced).values()) == [(0.2, 0.8)]
    assert by_number(traced) == {2: (0.2, 0.8)}
    assert count_products(layers, X, W).flops == pytest.approx(6 * ONE, rel=1e-3)


def test_what_data_decide_is_not_known():
    def chosen(x, w):
        return jax.lax.scan(lambda h, _: (jax.lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h), None), x @ w, length=3)[0]

    traced = jax.make_jaxpr(chosen)(X, W)
    assert branch_shares(traced) == by_number(traced) == {}


def test_conditionals_that_differ_have_no_share_in_common():
    def both(x, w):
        def turn(carry, number):
            h, seen = carry
            h = jax.lax.cond(number < 1, jnp.sin, jnp.cos, h)
            return (jax.lax.cond(seen < 2, jnp.sin, jnp.cos, h), seen + 1), number

        return jax.lax.scan(turn, (x @ w, 0), jnp.arange(4), reverse=True)[0][0]

    traced = jax.make_jaxpr(both)(X, W)
    assert sorted(branch_shares(traced).values()) == [(0.5, 0.5), (0.75, 0.25)]
    assert by_number(traced) == {}


def products(index, w, x):
    """Nothing, one product or two, each of which sums over the axis of `w` that the one before made."""

    def one(x):
        return (x @ w) @ w.T

    return jax.lax.switch(index, (lambda x: x, one, lambda x: one(one(x))), x)


@pytest.mark.parametrize(
    ("index", "count"),
    [
        (lambda x: x.sum().astype(int), 2),
        (lambda x: usually(x.sum().astype(int), 0), 0),
        (lambda x: usually(x.sum().astype(int), 1), 1),
        (lambda _: 1, 1),
    ],
    ids=["not known: the dearest", "usually none", "usually one", "always one"],
)
def test_what_would_be_moved_is_that_of_the_branches_that_are_taken(index, count):
    reading = read(lambda w, x: products(index(x), w, x).sum(), jnp.zeros((16, 8)), jnp.zeros((4, 16)))
    sums = [one for one in reading.collectives if one.what.startswith("partial sums") and len(one.moved) == 2]
    assert sum(one.count for one in sums if one.moved[1][0].size == 16) == count
