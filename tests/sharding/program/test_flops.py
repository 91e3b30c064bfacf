"""Operations of the matrix products of traced programs."""

import jax
import jax.numpy as jnp

from redco_cli.chips.target import parse_target, targeting
from redco_cli.sharding.program.flops import Products, count_products

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
ONE = 2 * 8 * 16 * 16


def test_loops_count_as_often_as_they_turn():
    def scanned(x, w):
        return jax.lax.scan(jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None)), x, length=5)[0]

    assert count_products(scanned, X, W) == Products(5 * ONE, 0, 5 * 8 * 16 * 4)


def test_of_branches_the_dearest_counts():
    def chosen(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)

    assert count_products(chosen, X, W).flops == 2 * ONE


def test_convolutions_and_groups():
    image, kernel = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 4, 6), jnp.bfloat16)

    def convolved(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert count_products(convolved, image, kernel) == Products(2 * 2 * 6 * 6 * 6 * 3 * 3 * 4, 0, 2 * 2 * 6 * 6 * 6)


def test_what_loops_add_to_counts_in_each_turn():
    """A sum that is carried along, not the state that each turn makes anew."""

    def added(x, w):
        def turn(carry, _):
            state, total = carry
            state = jnp.tanh(state @ w)
            return (state, total + state.T @ x), None

        return jax.lax.scan(turn, (x, jnp.zeros((16, 16))), length=5)[0]

    assert count_products(added, X, W).summed == 5 * 16 * 16 * 4


def test_attention_says_how_wide_its_heads_are():
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    with targeting(parse_target("h100:1", "--target")):
        found = count_products(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn"), q, q, q)
    assert found.attention > 0
    assert found.width == 64
    assert (found * 2 + count_products(jnp.matmul, X, W)).width == 64
