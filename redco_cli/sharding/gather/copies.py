"""Copies of arrays that parameters multiply: all products with one array have the same copy of it.

With `tensor`, each product has a part of the array's gradient on each device. The copy's gradient is the sum of all of
them, and XLA adds up the parts in one all-reduce; without it, what a residual connection adds may come between, or the
whole gradient of a product with a parameter that is not split, and each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from redco_cli.sharding.gather.by_rows import whole_input, whole_sum
from redco_cli.sharding.gather.fused import Unmerged
from redco_cli.sharding.gather.repeated import Repeated, batch_ways
from redco_cli.sharding.gather.sharded import Sharded, cut
from redco_cli.sharding.plan import TENSOR, as_dims
from redco_cli.sharding.program.rewrite import bind

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass
class _Made:
    """What was made of an array.

    Attributes:
        of: the array, kept so that no other has its `id`.
        where: the trace that it was made in: no other around or beside that knows it.
        result: what was made.
    """

    of: Any
    where: Any
    result: Any


@dataclass(frozen=True)
class Copies:
    """The copies so far.

    Attributes:
        mesh: the devices.
        outermost: the trace of the whole program, whose arrays are known in all loops and branches of it.
        made: by the `id` of an array and what was asked for, what was made of it, in each trace.
    """

    mesh: Mesh
    outermost: Any = field(default_factory=core.get_opaque_trace_state)
    made: dict[tuple[int, Any], list[_Made]] = field(default_factory=dict)

    @property
    def _is_over_tensor(self) -> bool:
        return bool(self.mesh.shape.get(TENSOR, 1) > 1)

    def are_shared(self, x: Any) -> bool:
        """Whether an array may have a copy; a constant has no gradient, and is seen by more than one trace."""
        return self._is_over_tensor and isinstance(x, jax.core.Tracer)

    def as_products_see(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands of an equation; of a product of an array and a parameter, with the copy of the array."""
        place = self._multiplied(equation, operands)
        if place is None or not self.are_shared(operands[1 - place]):
            return operands
        seen = self._once(operands[1 - place], _is_in_parts(operands[place]), _copy)
        seen = whole_input(seen, equation, operands[place], place, self.mesh)
        return [x if _is_weight(x) else seen for x in operands]

    def summed(self, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation; of such a product, as they are summed over devices."""
        place = self._multiplied(equation, operands)
        return results if place is None else whole_sum(results, equation, operands[place], place, self.mesh)

    def viewed(self, equation: Any, x: Any) -> Any:
        """The array cast or in another shape; the same for all that do so, whose products then share one copy."""
        view = f"{equation.primitive.name} {equation.params}"
        return self._once(x, view, lambda x: bind(equation, [x])[0])

    def cut(self, x: Any) -> Any:
        """The examples of an array in as many parts as devices have; of all products with it XLA then gathers one."""
        return self._once(x, "cut", lambda x: cut(x, 0, batch_ways(self.mesh)))

    def _once(self, x: Any, asked: Any, make: Callable[[Any], Any]) -> Any:
        """What is made of an array, unless it is there already, in this trace or in the outermost."""
        now, made = core.get_opaque_trace_state(), self.made.setdefault((id(x), asked), [])
        known = [one.result for one in made if one.where in (now, self.outermost)]
        if not known:
            known.append(make(x))
            made.append(_Made(x, now, known[0]))
        return known[0]

    def _multiplied(self, equation: Any, operands: Sequence[Any]) -> int | None:
        """Which operand of a product is its one parameter, on a mesh with `tensor`."""
        if equation.primitive.name not in _PRODUCTS or not self._is_over_tensor:
            return None
        places = [place for place, x in enumerate(operands) if _is_weight(x)]
        return places[0] if len(places) == 1 else None


def _is_weight(x: Any) -> bool:
    return isinstance(x, Sharded | Repeated | Unmerged)


def _is_in_parts(parameter: Any) -> bool:
    """Whether each device of `tensor` multiplies with a part of a parameter, whose results or gradients are summed."""
    used = parameter.plain if isinstance(parameter, Repeated) else parameter
    return not isinstance(used, Sharded) or any(TENSOR in axes for axes in as_dims(used.gathered))


@jax.custom_vjp
def _copy(x: Any) -> Any:
    return x


_copy.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))
