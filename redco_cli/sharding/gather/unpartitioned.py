"""What XLA's partitioner gets wrong, or splits badly or not at all, and is told.

- Grouped convolutions. XLA (with JAX 0.10) adds up the gradient of a grouped kernel once for each device of an axis
  that splits nothing of the convolution while another axis splits its batch: the gradient comes out too large by the
  size of that axis.
- Fourier transforms. XLA gathers what is transformed, examples and all, on every device.
- What is cut across devices and given to many, as the shifts and scales that one product makes of a condition (DiT,
  arXiv 2212.09748). XLA splits the pieces anew, and with them all that they meet: the whole residual stream, for the
  sake of some vectors. Before they are cut, they are made whole.

The first two are in a `shard_map`, where there is nothing to partition. JAX adds up the gradients; it is told which
arrays are the same on which devices, so that they are added up over those alone that have parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.gather.sharded import Sharded
from redco_cli.sharding.plan import BATCH_AXES, TENSOR, as_dims
from redco_cli.sharding.program.examples import Dim, Examples, follow_dims
from redco_cli.sharding.program.matrices import leading
from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.program.rewrite import variables_of

_MANY = 16
"""How often what is cut is repeated, as over tokens, at least; heads of keys are for fewer of queries."""
_ENTRY_BY_ENTRY = frozenset(ELEMENTWISE.split()) | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}


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

    def of_own(inputs: Any, weights: Any) -> Any:
        weights = jax.lax.pcast(weights, over, to="varying") if over else weights
        return equation.primitive.bind(inputs, weights, **params)

    convolve = jax.shard_map(
        of_own,
        mesh=mesh,
        in_specs=(spec(*numbers.lhs_spec[:2]), spec(None, out)),
        out_specs=spec(*numbers.out_spec[:2]),
    )
    return convolve(inputs, weights)


def whole_where_cut(equation: Any, operands: Sequence[Any], mesh: Mesh, features: Features) -> Sequence[Any]:
    """The operands of an equation; what is cut along a dim that `tensor` splits, and given to many, is whole.

    Args:
        equation: any.
        operands: its own.
        mesh: the devices.
        features: of the program.
    """
    if equation.primitive.name not in ("split", "slice") or features.spread.isdisjoint(equation.outvars):
        return operands
    params, operand = equation.params, equation.invars[0]
    place, shape = features.dims.get(operand), operand.aval.shape
    if place is None or place < 0 or not isinstance(operands[0], jax.Array):
        return operands
    left = params["sizes"][0] if "sizes" in params else params["limit_indices"][place] - params["start_indices"][place]
    if params.get("axis", place) != place or left == shape[place]:
        return operands
    dims: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(shape)
    dims[place] = None
    return [jax.lax.with_sharding_constraint(operands[0], NamedSharding(mesh, PartitionSpec(*dims)))]


def has_transforms(jaxpr: Any) -> bool:
    """Whether any equation of a program, or of the programs inside it, is a Fourier transform."""
    inside = (inner for equation in jaxpr.eqns for inner in core.jaxprs_in_params(equation.params))
    return any(equation.primitive.name == "fft" for equation in jaxpr.eqns) or any(map(has_transforms, inside))


@dataclass(frozen=True)
class Features:
    """Where features are that `tensor` splits. Variables of a program, and of the programs inside it.

    Attributes:
        dims: by those computed from weights that it splits: which dim that is; None where that is not known.
        spread: those that are repeated, so that what they meet has more entries.
    """

    dims: Mapping[Any, Dim]
    spread: frozenset[Any]


def features_of(closed: Any, weights: Sequence[Any]) -> Features:
    """Follows them through a program.

    Args:
        closed: the program, as `jax.make_jaxpr` returns it.
        weights: specs of its first inputs; the others have no such dim.
    """
    dims: list[Dim] = [None] * len(closed.jaxpr.invars)
    for place, spec in enumerate(weights):
        dims[place] = next((dim for dim, axes in enumerate(spec) if axes in (TENSOR, (TENSOR,))), None)
    split = follow_dims(closed, dims)
    return Features(split, frozenset(_spread(closed.jaxpr)) if split else frozenset())


def _spread(jaxpr: Any) -> set[Any]:
    found: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        for inner in core.jaxprs_in_params(equation.params):
            found |= _spread(inner)
        if equation.primitive.name in _ENTRY_BY_ENTRY:
            (result,) = equation.outvars
            of_one = [x for x in variables_of(equation.invars) if x.aval.size > 1]
            found.update(x for x in of_one if result.aval.size >= _MANY * x.aval.size)
            found.update(x for x in of_one if result.aval.size == x.aval.size and result in found)
    return found


def transformed(equation: Any, x: Any, mesh: Mesh, examples: Examples, features: Features) -> Any:
    """The result of a Fourier transform, of the examples and features of each device.

    Args:
        equation: the transform.
        x: its operand.
        mesh: the devices.
        examples: where they are in its program.
        features: of the program.
    """
    operand = equation.invars[0]
    shape = operand.aval.shape[: leading("fft", equation.params, operand.aval.ndim)]
    dims: list[Any] = [None] * len(shape)
    feature, example = features.dims.get(operand), 0 if examples.lead(operand) else examples.dims.get(operand)
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
