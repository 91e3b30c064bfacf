"""Operations of the matrix products of traced programs."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.chips.target import parse_target, targeting
from redco_cli.sharding.program.flops import Products, count_products, gradient_flops

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


def looped(w, v, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]


def chosen(w, v, x):
    return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: (x @ w) @ v)


@jax.custom_vjp
def with_a_rule(w, held, x):
    return x @ held


with_a_rule.defvjp(
    lambda *given: (with_a_rule(*given), given), lambda given, dy: (given[2].T @ dy, None, dy @ given[1].T)
)

BACKWARD = {
    "a layer, whose input has no gradient": (lambda w, v, x: x @ w, (True, True), 1),
    "two layers": (lambda w, v, x: jnp.tanh(x @ w) @ v, (True, True), 3),
    "the first one frozen": (lambda w, v, x: jnp.tanh(x @ w) @ v, (False, True), 1),
    "the last one frozen": (lambda w, v, x: jnp.tanh(x @ w) @ v, (True, False), 2),
    "both frozen": (lambda w, v, x: jnp.tanh(x @ w) @ v, (False, False), 0),
    "a teacher": (lambda w, v, x: x @ w + jax.lax.stop_gradient(jnp.tanh(x @ v)), (True, True), 1),
    "a weight that is held": (lambda w, v, x: jnp.tanh(x @ w) @ jax.lax.stop_gradient(v), (True, True), 2),
    "turns of a loop": (looped, (True, False), 6),
    "turns of a loop over what is frozen": (lambda w, v, x: looped(v, w, x @ w), (True, False), 1 + 3),
    "the dearest branch": (chosen, (True, True), 3),
    "in a jit, and recomputed": (lambda w, v, x: jax.checkpoint(jax.jit(lambda x: x @ w))(x) @ v, (True, True), 3),
    "with a rule of its own": (lambda w, v, x: with_a_rule(w, jax.lax.stop_gradient(w), x @ v), (True, False), 1),
    "with a rule of its own, all frozen": (lambda w, v, x: with_a_rule(w, w, x @ v), (False, False), 0),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_products_of_a_backward_pass(name):
    function, trained, expected = BACKWARD[name]
    closed = jax.make_jaxpr(lambda *given: function(*given).sum())(W, W, X)
    assert gradient_flops(closed, [*trained, False]) == expected * ONE
