"""Kernel gradients from patches: those of JAX on one device, and right where XLA's are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.errors import RecipeError
from redco_cli.privacy.convolutions import by_patches

NHWC = ("NHWC", "HWIO", "NHWC")
KINDS = {
    "same": ((2, 7, 6, 4), (3, 3, 4, 5), {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}),
    "strided": ((2, 7, 6, 4), (3, 2, 4, 5), {"window_strides": (2, 3), "padding": "VALID", "dimension_numbers": NHWC}),
    "dilated": (
        (2, 9, 8, 4),
        (3, 2, 4, 5),
        {"window_strides": (1, 1), "padding": [(2, 1), (0, 3)], "rhs_dilation": (2, 3), "dimension_numbers": NHWC},
    ),
    "transposed": (
        (2, 4, 3, 4),
        (3, 3, 4, 5),
        {"window_strides": (1, 1), "padding": [(2, 1), (1, 2)], "lhs_dilation": (2, 2), "dimension_numbers": NHWC},
    ),
    "grouped": (
        (2, 7, 6, 4),
        (3, 3, 2, 6),
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2, "dimension_numbers": NHWC},
    ),
    "depthwise": (
        (2, 7, 6, 4),
        (3, 3, 1, 8),
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4, "dimension_numbers": NHWC},
    ),
    "channels_first": ((2, 4, 7, 6), (5, 4, 3, 2), {"window_strides": (1, 2), "padding": "SAME"}),
    "over_time": (
        (2, 9, 4),
        (3, 4, 5),
        {"window_strides": (2,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
}


def drawn(*shapes):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_convolution(kind):
    *shapes, how = KINDS[kind]
    images, kernel = drawn(*shapes)

    def loss(kernel, images):
        return jnp.sin(jax.lax.conv_general_dilated(images, kernel, **how)).sum()

    found = jax.jit(jax.value_and_grad(by_patches(loss), argnums=(0, 1)))(kernel, images)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5),
        found,
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(kernel, images),
    )


def deep(kernels, images):
    """Of one image: a loop over rematerialised convolutions, behind one whose kernel is normalised within a call."""
    first, layers = kernels

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC)

    x = jax.jit(lambda kernel: convolved(images[None], kernel / jnp.linalg.norm(kernel)))(first)
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, kernel: (jax.nn.relu(convolved(x, kernel)), None)), x, layers)
    return jnp.square(x).sum()


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_each_example_has_its_gradient_where_the_examples_are_split(shape):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), ("data", "tensor")[: len(shape)])
    first, layers, images = drawn((3, 3, 3, 4), (2, 3, 3, 4, 4), (16, 6, 6, 3))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    each = jax.jit(jax.vmap(jax.grad(by_patches(deep)), (None, 0)), in_shardings=(whole, rows))
    found = each((first, layers), images)
    alone = jax.jit(jax.grad(deep))
    for row, image in enumerate(images):
        jax.tree.map(
            lambda one, other, row=row: np.testing.assert_allclose(one[row], other, rtol=1e-4, atol=1e-4),
            found,
            alone((first, layers), image),
        )


def test_a_convolution_with_a_derivative_of_its_own_is_refused():
    @jax.custom_vjp
    def own(kernel, images):
        return jax.lax.conv(images, kernel, (1, 1), "SAME")

    own.defvjp(lambda kernel, images: (own(kernel, images), None), lambda _, cotangent: (None, cotangent))
    images, kernel = drawn((1, 2, 4, 4), (2, 2, 3, 3))
    with pytest.raises(RecipeError, match=r"privacy: the model has a convolution .* \(within custom_vjp_call"):
        by_patches(own)(kernel, images)


def test_a_function_without_convolutions_is_left_as_it_is():
    assert by_patches(lambda x: {"twice": 2 * x})(3.0) == {"twice": 6.0}
