"""What XLA's partitioner gets wrong or does not split: each device is told to take its own examples.

- Grouped convolutions. XLA (with JAX 0.10) adds up the gradient of a grouped kernel once for each device of an axis
  that splits nothing of the convolution while another axis splits its batch: the gradient comes out too large by the
  size of that axis.
- Fourier transforms. XLA gathers what is transformed, examples and all, on every device.

Inside of a `shard_map` there is nothing to partition, and JAX adds up the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.gather.sharded import Sharded
from redco_cli.sharding.plan import BATCH_AXES, TENSOR, as_dims
from redco_cli.sharding.program.examples import Dim, Examples, follow_dims
from redco_cli.sharding.program.matrices import leading


def is_grouped(equation: Any, mesh: Mesh) -> bool:
    """Whether an equation is a grouped convolution on a mesh of which an axis splits none of its examples.

    Args:
        equation: any.
        mesh: the devices.
    """
    if equation.primitive.name != "conv_general_dilated" or equation.params["feature_group_count"] == 1:
        return False
    over = math.prod(mesh.shape[axis] for axis in _over_examples(_examples_of(equation), mesh))
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
    tensor, over, out = mesh.shape.get(TENSOR, 1), _over_examples(_examples_of(equation), mesh), numbers.rhs_spec[0]
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


def has_transforms(jaxpr: Any) -> bool:
    """Whether any equation of a program, or of the programs inside it, is a Fourier transform."""
    inside = (inner for equation in jaxpr.eqns for inner in core.jaxprs_in_params(equation.params))
    return any(equation.primitive.name == "fft" for equation in jaxpr.eqns) or any(map(has_transforms, inside))


def features_of(closed: Any, weights: Sequence[Any]) -> Mapping[Any, Dim]:
    """By variable of a program, which of its dims is split over `tensor`, as its weights are where they are used.

    Args:
        closed: the program, as `jax.make_jaxpr` returns it.
        weights: specs of its first inputs; the others have no such dim.
    """
    dims: list[Dim] = [None] * len(closed.jaxpr.invars)
    for place, spec in enumerate(weights):
        dims[place] = next((dim for dim, axes in enumerate(spec) if axes in (TENSOR, (TENSOR,))), None)
    return follow_dims(closed, dims)


def transformed(equation: Any, x: Any, mesh: Mesh, examples: Examples, features: Mapping[Any, Dim]) -> Any:
    """The result of a Fourier transform, of the examples and features of each device.

    Args:
        equation: the transform.
        x: its operand.
        mesh: the devices.
        examples: where they are in its program.
        features: see `features_of`.
    """
    operand = equation.invars[0]
    shape = operand.aval.shape[: leading("fft", equation.params, operand.aval.ndim)]
    dims: list[Any] = [None] * len(shape)
    feature, example = features.get(operand), 0 if examples.lead(operand) else examples.dims.get(operand)
    if feature is not None and 0 <= feature < len(shape) and shape[feature] % mesh.shape.get(TENSOR, 1) == 0:
        dims[feature] = TENSOR
    if example is not None and 0 <= example < len(shape):
        dims[example] = _over_examples(shape[example], mesh) or None
    spec = PartitionSpec(*dims)
    transform = jax.shard_map(
        lambda own: equation.primitive.bind(own, **equation.params),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return transform(x)  # type: ignore[no-untyped-call]


def _examples_of(equation: Any) -> int:
    """How many examples a convolution takes."""
    return int(equation.invars[0].aval.shape[equation.params["dimension_numbers"].lhs_spec[0]])


def _over_examples(examples: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes that so many examples are split over: the first that divide them, as they do a batch."""
    over = list[str]()
    for axis in BATCH_AXES:
        ways = math.prod(mesh.shape[one] for one in (*over, axis) if one in mesh.shape)
        if axis not in mesh.shape or examples % ways:
            break
        over.append(axis)
    return tuple(over)
