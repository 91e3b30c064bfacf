"""How a program uses each of its weights: what it sums over, what it makes, and how often.

Names say nothing here. A dim that a loop runs over, or that weight and activation share without a sum, counts layers or
experts: it is stacked. What a product sums over is the input of a weight, the rest its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax

from redco_cli.plugin.contract import ADAPTER_OFF, Params
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, bind, rewritten


@dataclass(frozen=True)
class Use:
    """One way in which a weight is used.

    Attributes:
        kind: a product with an activation, or rows looked up by their number.
        layers: how many dims come first in the weight because loops run over them.
        stack: sizes of these, and of the dims that count experts.
        inputs: size of what is summed over, or of the numbers.
        outputs: size of what is made.
        order: of the weight as it is used, without layers: its dims as [experts, inputs, outputs].
        views: equations between the weight as it is stored, without layers, and that.
    """

    kind: Literal["product", "lookup"]
    layers: int
    stack: tuple[int, ...]
    inputs: int
    outputs: int
    order: tuple[int, ...]
    views: tuple[Any, ...] = field(compare=False)

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two uses of one weight must have in common."""
        return self.kind, self.stack, self.inputs, self.outputs

    @property
    def signature(self) -> tuple[Any, ...]:
        """The same, and where each element of the weight stands in its matrix."""
        order = (*range(self.layers), *(self.layers + dim for dim in self.order))
        moved = [view for view in self.views if view.primitive.name != "convert_element_type"]
        views = tuple((view.primitive.name, str(view.params)) for view in moved)
        return (*self.shape, order, views, self.layers if views else None)

    def matrix(self, weight: Any) -> Any:
        """A weight, as it is stored, as matrices [*stack, inputs, outputs]."""
        return _layered(self._matrix, self.layers)(weight)

    def stored(self, matrix: Any, shape: tuple[int, ...]) -> Any:
        """The inverse of `matrix`: a weight of some shape, as it is stored; of one layer alone, or several, as many."""
        one = jax.ShapeDtypeStruct(shape[self.layers :], matrix.dtype)
        back = jax.linear_transpose(self._matrix, one)  # entries only change places, so that this undoes it
        inner = len(self.stack) - self.layers + 2
        return _layered(lambda matrix: back(matrix)[0], matrix.ndim - inner)(matrix)

    def by_layer(self, function: Callable[..., Any], weight: Any, *others: Any) -> Any:
        """What a function makes of each layer, one after another: no more is gathered, or computed with, at a time.

        Args:
            function: of a matrix [*experts, inputs, outputs] and trees of arrays of one layer.
            weight: as it is stored.
            others: trees of arrays whose leading dims count layers too.
        """

        def one(weight: Any, *others: Any) -> Any:
            return function(self._matrix(weight), *others)

        for _ in range(self.layers):
            one = partial(_mapped, one)
        return one(weight, *others)

    def _matrix(self, weight: Any) -> Any:
        for view in self.views:
            if view.primitive.name != "convert_element_type":
                (weight,) = bind(view, [weight])
        return weight.transpose(self.order).reshape(*self.stack[self.layers :], self.inputs, self.outputs)


def _layered(function: Callable[[Any], Any], layers: int) -> Callable[[Any], Any]:
    for _ in range(layers):
        function = jax.vmap(function)
    return function


def _mapped(function: Callable[..., Any], *arrays: Any) -> Any:
    return jax.lax.map(lambda one: function(*one), arrays)


@dataclass(frozen=True)
class Product:
    """The dims of one `dot_general` of a weight and an activation.

    Attributes:
        weight: which of the two operands is the weight.
        experts: dims of the weight that the activation has too, ascending; and of the activation, in the same order.
        inputs: dims that are summed over, likewise.
        outputs: the other dims of the weight, ascending.
        shared: for each dim that both have, in the order of the result, its place among `experts`.
    """

    weight: int
    experts: tuple[tuple[int, ...], tuple[int, ...]]
    inputs: tuple[tuple[int, ...], tuple[int, ...]]
    outputs: tuple[int, ...]
    shared: tuple[int, ...]


def product_of(equation: Any, weight: int) -> Product:
    """What a `dot_general` does with the operand `weight` (0 or 1) and the other one."""
    contracted, shared = equation.params["dimension_numbers"]
    ndim = len(equation.invars[weight].aval.shape)
    own, other = tuple(shared[weight]), tuple(shared[1 - weight])
    inputs = sorted(zip(contracted[weight], contracted[1 - weight], strict=True))
    experts = sorted(zip(own, other, strict=True))
    taken = {*own, *contracted[weight]}
    return Product(
        weight,
        (tuple(dim for dim, _ in experts), tuple(dim for _, dim in experts)),
        (tuple(dim for dim, _ in inputs), tuple(dim for _, dim in inputs)),
        tuple(dim for dim in range(ndim) if dim not in taken),
        tuple(sorted(own).index(dim) for dim in own),
    )


def is_lookup(equation: Any) -> bool:
    """Whether a `gather` looks up rows of its first operand [rows, width] by their number, width last."""
    if equation.primitive.name != "gather":
        return False
    numbers, (rows, result) = equation.params["dimension_numbers"], (equation.invars[0], equation.outvars[0])
    return (
        len(rows.aval.shape) == 2
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and tuple(equation.params["slice_sizes"]) == (1, rows.aval.shape[1])
        and tuple(numbers.offset_dims) == (len(result.aval.shape) - 1,)
        and not numbers.operand_batching_dims
    )


@dataclass(frozen=True)
class _Seen:
    """A weight that was not used yet.

    Attributes:
        path: of the parameter.
        arrays: the weight, as it is seen.
        layers: sizes of the leading dims that loops run over.
        views: how it is seen since then.
    """

    path: str
    arrays: Any
    found: dict[str, list[Use | str]] = field(compare=False)
    layers: tuple[int, ...] = ()
    views: tuple[Any, ...] = ()

    def array(self, use: str) -> Any:
        self.found.setdefault(self.path, []).append(use)
        return self.arrays

    def having(self, arrays: Any) -> _Seen:
        return replace(self, arrays=arrays)

    def viewed(self, equation: Any) -> _Seen:
        return replace(self, arrays=bind(equation, [self.arrays])[0], views=(*self.views, equation))

    def stacked(self) -> Any:
        is_moved = any(view.primitive.name != "convert_element_type" for view in self.views)
        return self.array("a loop over a part of it") if is_moved else replace(self, views=())

    def layer(self, arrays: Any) -> _Seen:
        return replace(self, arrays=arrays, layers=(*self.layers, self.arrays.shape[0]))

    def used(self, kind: Literal["product", "lookup"], stack: Sequence[int], order: Sequence[int], inputs: int) -> None:
        """Notes a use; `stack` of them and `inputs` dims come first in `order`."""
        shape = [self.arrays.shape[dim] for dim in order]
        first, last = len(stack), len(stack) + inputs
        use = Use(
            kind,
            len(self.layers),
            (*self.layers, *shape[:first]),
            math.prod(shape[first:last]),
            math.prod(shape[last:]),
            tuple(order),
            self.views,
        )
        self.found.setdefault(self.path, []).append(use)


class _Looking:
    """Notes how weights are used, and changes nothing."""

    enters = CONTROL_FLOW
    calls = frozenset[str]()
    everywhere = False

    def is_tracked(self, operand: Any) -> bool:
        return isinstance(operand, _Seen)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        seen = [number for number, operand in enumerate(operands) if isinstance(operand, _Seen)]
        if not seen:
            return bind(equation, operands)
        name = equation.primitive.name
        if name == "name":
            one = operands[0]
            return [one.arrays if equation.params["name"] == ADAPTER_OFF else one]
        weight = operands[seen[0]]
        if name == "dot_general" and len(seen) == 1:
            product = product_of(equation, seen[0])
            order = (*product.experts[0], *product.inputs[0], *product.outputs)
            weight.used("product", product.experts[0], order, len(product.inputs[0]))
        elif is_lookup(equation) and seen == [0]:
            weight.used("lookup", (), (0, 1), 1)
        else:
            for number in seen:
                operands[number].array(name)
        return bind(equation, [one.arrays if isinstance(one, _Seen) else one for one in operands])


def uses_of(function: Callable[..., Any], params: Params, *others: Any) -> dict[str, list[Use | str]]:
    """How a function uses its parameters, in the order of the program.

    Args:
        function: `function(params, *others)`; any that JAX can trace. Nothing is computed.
        params: nested dicts of arrays or `jax.ShapeDtypeStruct`s.
        others: likewise.

    Returns:
        The path of each parameter that is used to its uses: a `Use`, or the name of an operation that is neither a
        product with an activation nor a lookup of rows.
    """
    found: dict[str, list[Use | str]] = {}
    closed = jax.make_jaxpr(function)(params, *others)
    paths = ["/".join(str(key.key) for key in path) for path, _ in jax.tree.leaves_with_path(params)]

    def run(params: Params, *others: Any) -> Any:
        seen = [_Seen(path, leaf, found) for path, leaf in zip(paths, jax.tree.leaves(params), strict=True)]
        return rewritten(closed, [*seen, *jax.tree.leaves(others)], _Looking())

    jax.eval_shape(run, params, *others)
    return found
