"""Convolutions whose channels are an array and its gate, or several arrays, and nothing but these."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding.program.channels import cut_channels

X, KERNEL = jax.ShapeDtypeStruct((4, 16, 8), "float32"), jax.ShapeDtypeStruct((3, 8, 32), "float32")


def convolved(x, kernel, **how):
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), **how)


def gated(made):
    value, gate = jnp.split(made, 2, -1)
    return value * jax.nn.sigmoid(gate)


CUT = {
    "gate": lambda x, k: gated(convolved(x, k)),
    "biased and activated": lambda x, k: gated(jax.nn.silu(convolved(x, k) + 1.0)),
    "in slices": lambda x, k: convolved(x, k)[..., :16] * convolved(x, k)[..., 16:],
    "in a call": lambda x, k: jax.jit(gated)(convolved(x, k)),
    "in a loop": lambda x, k: jax.lax.scan(lambda h, _: (gated(convolved(x, k))[..., :8] + h, None), x, None, length=2),
}
KEPT = {
    "not cut": lambda x, k: jnp.tanh(convolved(x, k)),
    "cut along another dim": lambda x, k: jnp.split(convolved(x, k), 2, 1),
    "normed over all": lambda x, k: gated((made := convolved(x, k)) / (1 + made.mean(-1, keepdims=True))),
    "returned besides": lambda x, k: (gated(made := jnp.tanh(convolved(x, k))), made),
    "moved": lambda x, k: gated(convolved(x, k).swapaxes(0, 1)),
    "grouped": lambda x, k: gated(convolved(x, k[:, :4], feature_group_count=2)),
}


@pytest.mark.parametrize("function", CUT.values(), ids=CUT)
def test_channels_that_are_cut(function):
    assert list(cut_channels(jax.make_jaxpr(function)(X, KERNEL).jaxpr))


@pytest.mark.parametrize("function", KEPT.values(), ids=KEPT)
def test_channels_that_are_used_together(function):
    assert list(cut_channels(jax.make_jaxpr(function)(X, KERNEL).jaxpr)) == []


def doubled(made):
    for _ in range(60):
        made = made + jnp.tanh(made) * made
    return gated(made)


@pytest.mark.timeout(20)
def test_each_array_on_the_way_is_looked_at_once():
    """Of what meets itself again and again there are more ways than anyone can go."""
    closed = jax.make_jaxpr(lambda x, k: doubled(convolved(x, k)))(X, KERNEL)
    assert list(cut_channels(closed.jaxpr))
