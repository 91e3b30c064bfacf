"""Products with a weight that is split by rows and nothing else along with it: what they take and make is whole.

Each device of `tensor` multiplies the features that its rows are for, and the results are summed. Left to itself XLA
splits such an input as it is, and what it was made of as far back as it reaches, and gives each device a part of the
sum, to be moved where the program takes it apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.gather.repeated import Repeated
from redco_cli.sharding.gather.sharded import Sharded


def whole_input(x: Any, equation: Any, parameter: Any, place: int, mesh: Mesh) -> Any:
    """The other operand of a product, whole along the dims that the weight alone is split along.

    Args:
        x: the operand.
        equation: a product or a convolution.
        parameter: the weight.
        place: which operand that is.
        mesh: the devices.
    """
    return _whole_along(x, [other for _, other in _summed_alone(equation, parameter, place)], mesh)


def whole_sum(results: Sequence[Any], equation: Any, parameter: Any, place: int, mesh: Mesh) -> Sequence[Any]:
    """The results of such a product, whole along the dims that the weight brings; other arguments as there."""
    if not _summed_alone(equation, parameter, place):
        return results
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name != "dot_general":
        return [_whole_along(x, [numbers.out_spec[1]], mesh) for x in results]
    contracted, (batched, _) = numbers
    free = [x.aval.ndim - len(dims) - len(batched) for x, dims in zip(equation.invars, contracted, strict=True)]
    first = len(batched) + (free[0] if place else 0)
    return [_whole_along(x, range(first, first + free[place]), mesh) for x in results]


def _summed_alone(equation: Any, parameter: Any, place: int) -> list[tuple[int, int]]:
    """The dims of the weight that are summed over and split alone, each with that of the other operand."""
    weight = parameter.plain if isinstance(parameter, Repeated) else parameter
    if not isinstance(weight, Sharded) or weight.views:
        return []
    numbers, alone = equation.params["dimension_numbers"], weight.usage.alone
    if equation.primitive.name == "dot_general":
        pairs = list(zip(numbers[0][place], numbers[0][1 - place], strict=True))
    else:
        pairs = [(numbers.rhs_spec[1], numbers.lhs_spec[1])] if place == 1 else []
    return [(own, other) for own, other in pairs if own < len(alone) and alone[own]]


def _whole_along(x: Any, dims: Iterable[int], mesh: Mesh) -> Any:
    """An array that no mesh axis splits along some dims; where its others are split is left open."""
    along = set(dims)
    if not along:
        return x
    spec = PartitionSpec(*(None if dim in along else PartitionSpec.UNCONSTRAINED for dim in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
