"""Grouped convolutions: each device convolves its own examples, told so where XLA's partitioner would have to find it.

XLA (with JAX 0.10) adds up the gradient of a grouped kernel once for each device of an axis that splits nothing of the
convolution while another axis splits its batch: the gradient comes out too large by the size of that axis. Inside of a
`shard_map` there is nothing to partition, and JAX adds up the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.gather.sharded import Sharded, batch_ways
from redco_cli.sharding.plan import BATCH_AXES, TENSOR, as_dims
from redco_cli.sharding.program.examples import Examples


def is_grouped(equation: Any, operands: Sequence[Any], examples: Examples, mesh: Mesh) -> bool:
    """Whether an equation is a grouped convolution of examples that `data` and `fsdp` divide, on a mesh with `tensor`.

    Args:
        equation: any.
        operands: its own.
        examples: where they are in its program.
        mesh: the devices.
    """
    if equation.primitive.name != "conv_general_dilated" or equation.params["feature_group_count"] == 1:
        return False
    images = equation.invars[0]
    batch = equation.params["dimension_numbers"].lhs_spec[0]
    leads = batch == 0 and examples.lead(images) and not isinstance(operands[0], Sharded)
    divides = set(BATCH_AXES) <= set(mesh.shape) and images.aval.shape[batch] % batch_ways(mesh) == 0
    return bool(mesh.shape.get(TENSOR, 1) > 1 and leads and divides and equation.params["batch_group_count"] == 1)


def grouped(equation: Any, images: Any, kernel: Any, mesh: Mesh) -> Any:
    """The result of an equation that `is_grouped`; its channels are split over `tensor` where the kernel's are.

    Args:
        equation: the convolution.
        images: whole examples.
        kernel: an array, or a `Sharded`.
        mesh: the devices.
    """
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
    tensor = mesh.shape[TENSOR]
    weights = kernel.array() if isinstance(kernel, Sharded) else kernel
    out = numbers.rhs_spec[0]
    used = as_dims(kernel.gathered, weights.ndim) if isinstance(kernel, Sharded) and not kernel.views else None
    is_split = used is not None and TENSOR in used[out] and groups % tensor == 0

    def spec(batch: int | None, channels: int) -> PartitionSpec:
        dims: list[Any] = [None] * weights.ndim
        if batch is not None:
            dims[batch] = BATCH_AXES
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
    return convolve(images, weights)  # type: ignore[no-untyped-call]
