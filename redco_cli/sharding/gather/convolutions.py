"""Grouped convolutions: each device convolves its own examples, told so where XLA's partitioner would have to find it.

XLA (with JAX 0.10) adds up the gradient of a grouped kernel once for each device of an axis that splits nothing of the
convolution while another axis splits its batch: the gradient comes out too large by the size of that axis. Inside of a
`shard_map` there is nothing to partition, and JAX adds up the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.gather.sharded import Sharded
from redco_cli.sharding.plan import BATCH_AXES, TENSOR, as_dims


def is_grouped(equation: Any, mesh: Mesh) -> bool:
    """Whether an equation is a grouped convolution on a mesh of which an axis splits none of its examples.

    Args:
        equation: any.
        mesh: the devices.
    """
    if equation.primitive.name != "conv_general_dilated" or equation.params["feature_group_count"] == 1:
        return False
    over = math.prod(mesh.shape[axis] for axis in _split_examples(equation, mesh))
    return bool(equation.params["batch_group_count"] == 1 and over < mesh.size)


def grouped(equation: Any, images: Any, kernel: Any, mesh: Mesh) -> Any:
    """The result of an equation that `is_grouped`; its channels are split over `tensor` where the kernel's are.

    Args:
        equation: the convolution.
        images: an array, or a `Sharded`.
        kernel: the same.
        mesh: the devices.
    """
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
    inputs, weights = (x.array() if isinstance(x, Sharded) else x for x in (images, kernel))
    tensor, over, out = mesh.shape.get(TENSOR, 1), _split_examples(equation, mesh), numbers.rhs_spec[0]
    used = as_dims(kernel.gathered, weights.ndim) if isinstance(kernel, Sharded) and not kernel.views else None
    is_split = used is not None and TENSOR in used[out] and groups % tensor == 0

    def spec(batch: int | None, channels: int) -> PartitionSpec:
        dims: list[Any] = [None] * weights.ndim
        if batch is not None:
            dims[batch] = over
        dims[channels] = TENSOR if is_split else None
        return PartitionSpec(*dims)

    params = {**equation.params, "feature_group_count": groups // tensor if is_split else groups}
    convolve = jax.shard_map(
        lambda *operands: equation.primitive.bind(*operands, **params),
        mesh=mesh,
        in_specs=(spec(*numbers.lhs_spec[:2]), spec(None, out)),
        out_specs=spec(*numbers.out_spec[:2]),
        check_vma=False,
    )
    return convolve(inputs, weights)  # type: ignore[no-untyped-call]


def _split_examples(equation: Any, mesh: Mesh) -> tuple[str, ...]:
    """The axes that examples of a convolution are split over: the first that divide them, as they do a batch."""
    examples, over = equation.invars[0].aval.shape[equation.params["dimension_numbers"].lhs_spec[0]], list[str]()
    for axis in BATCH_AXES:
        ways = math.prod(mesh.shape[one] for one in (*over, axis) if one in mesh.shape)
        if axis not in mesh.shape or examples % ways:
            break
        over.append(axis)
    return tuple(over)
