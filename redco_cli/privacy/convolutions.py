"""The gradient of a kernel for each example, as a product of patches and cotangents.

JAX makes of the gradients of many examples one convolution with a group for each, and XLA (JAX 0.10.2) computes that
wrongly where the examples are split over devices. A kernel's gradient is as well

    gradient[tap, input, output] = sum over places of patch[place, tap, input] * cotangent[place, output]

where a patch is what the kernel sees of an image from one place: a matrix product, which vectorises like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.errors import RecipeError
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, bind, rewritten

_CONVOLUTION = "conv_general_dilated"


class _Patches:
    """What becomes of a program: nothing is tracked, and each convolution has another gradient."""

    enters = CONTROL_FLOW
    calls = frozenset[str]()
    everywhere = True

    def is_tracked(self, operand: Any) -> bool:
        """No parameter is taken along in another form."""
        return False

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation as it is, or a convolution with the gradient from patches."""
        name, params = equation.primitive.name, equation.params
        if name == _CONVOLUTION and params["batch_group_count"] == 1:
            return [_convolution(equation)(*operands)]
        if _CONVOLUTION in name + str(params):
            problem = f"the model has a convolution with a gradient of its own (within {name}), and of one for each"
            problem += " example XLA computes wrong values on several devices"
            raise RecipeError("privacy", problem, "train on one device: mesh.data=1")
        return bind(equation, operands)


def by_patches(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose convolutions have kernel gradients that may be vectorised over examples.

    Args:
        function: any that JAX can trace.

    Raises:
        RecipeError: when it is called: a part that brings its own derivative (`jax.custom_vjp`) has a convolution,
            which would stay as it is.
    """

    def replaced(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        if _CONVOLUTION not in str(closed):
            return function(*arguments)
        results = rewritten(closed, jax.tree.leaves(arguments), _Patches())
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return replaced


def _convolution(equation: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The convolution of an equation."""

    def plain(images: jax.Array, kernel: jax.Array) -> jax.Array:
        result: jax.Array = bind(equation, [images, kernel])[0]
        return result

    def forward(images: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return plain(images, kernel), (images, kernel)

    def backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        images, kernel = saved
        to_images = jax.vjp(lambda images: plain(images, kernel), images)[1](cotangent)[0]
        return to_images, _kernel_gradient(equation.params, images, kernel, cotangent)

    convolution = jax.custom_vjp(plain)
    convolution.defvjp(forward, backward)
    return convolution


def _kernel_gradient(params: Any, images: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient of the kernel; letters: n places, g groups, i input channels and taps of a group, o its outputs."""
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    shape = [kernel.shape[dim] for dim in numbers.rhs_spec]  # outputs, inputs of a group, taps
    patches = jax.lax.conv_general_dilated_patches(
        images,
        filter_shape=shape[2:],
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=numbers,
        precision=params["precision"],
    )

    def by_place(array: jax.Array) -> jax.Array:
        batch, channels, *places = numbers.out_spec
        return array.transpose(batch, *places, channels).reshape(-1, groups, array.shape[channels] // groups)

    gradient = jnp.einsum("ngo,ngi->goi", by_place(cotangent), by_place(patches), precision=params["precision"])
    order = sorted(range(kernel.ndim), key=lambda dim: numbers.rhs_spec[dim])
    return gradient.reshape(shape).transpose(order).astype(kernel.dtype)
