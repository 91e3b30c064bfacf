"""A weight that is made of smaller ones, as a product of two factors is, with another weight to add it to perhaps.

    y = x·w,    w = w0 + a·b        a [D, R], b [R, F] of a small R, as in LoRA (arXiv 2106.09685)

Left to the compiler, the gradient of w is added up over devices, which moves as many bytes as w has, to be multiplied
with the factors then. Here every device makes w of gathered factors, and takes the gradient of its own examples back to
these:

    parts = xᵀ·dy                   [D·F, ..]    over D x F devices of `data` and `fsdp`: nothing moves
    da = parts·bᵀ,  db = aᵀ·parts   [D·F, ..]    nothing moves
    scatter(da), scatter(db)                     and the gradient of w0, where it is asked for

Where what it is made of takes more bytes than it does itself, it is not made so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from redco_cli.sharding.gather.local.loops import ENTERED, adds_up, is_array, read_by, repeated_of
from redco_cli.sharding.gather.repeated import Repeated
from redco_cli.sharding.gather.sharded import SMALL, Sharded
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.primitives import OF_EACH_ENTRY
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, VIEWS
from redco_cli.sharding.program.unevaluated import Unevaluated
from redco_cli.sharding.scans import scan_counts

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})
_TAKEN_WHOLE = CONTROL_FLOW | {"fft"}
_ROOM = 1.5
"""Of the bytes of what is made, how many it may be made of: a weight to add it to, and factors."""


@dataclass(frozen=True)
class Composed(Unevaluated):
    """What an equation makes of weights alone, each a `Sharded`, and perhaps of arrays that have to do with no example.

    Attributes:
        is_layer: its weights are one layer each of those that the equations are of.
    """

    is_layer: bool = False

    @cached_property
    def leaves(self) -> list[Any]:
        """The weights and arrays that it is made of, each once."""
        given = [x for node in self.nodes for x in (node.leaves if self._is_layer_of(node) else node.operands)]
        return list({id(x): x for x in given if isinstance(x, Sharded | jax.Array)}.values())

    def before(self, node: Composed) -> Sequence[Composed]:
        """What one of its `nodes` is made of; of a layer, which is made by itself, nothing."""
        return () if self._is_layer_of(node) else super().before(node)

    def _is_layer_of(self, node: Composed) -> bool:
        return node.is_layer and node is not self

    @property
    def sources(self) -> list[Sharded]:
        """The weights that it is made of, however each is seen."""
        weights = [leaf for leaf in self.leaves if isinstance(leaf, Sharded)]
        return list({id(weight.value): weight for weight in weights}.values())

    @property
    def arrays(self) -> list[Any]:
        """What these and the others consist of."""
        return [leaf.arrays if isinstance(leaf, Sharded) else leaf for leaf in self.leaves]

    def having(self, arrays: Sequence[Any]) -> Composed:
        """The same of other arrays."""
        pairs = zip(self.leaves, arrays, strict=True)
        return self._of([leaf.having(own) if isinstance(leaf, Sharded) else own for leaf, own in pairs])

    def viewed(self, equation: Any) -> Composed:
        """The same, seen in another way."""
        return Composed(equation, (self,))

    @property
    def is_worth_it(self) -> bool:
        """Whether something on the way to it takes about as many bytes as the weights that it is made of, or more."""
        return bool(sum(leaf.value.nbytes for leaf in self.sources) <= _ROOM * self.largest)

    @property
    def largest(self) -> int:
        """Bytes of the largest array on the way to it."""
        return max(_nbytes(node.equation.outvars[0].aval) for node in self.nodes)

    @cached_property
    def repeated(self) -> Repeated:
        """The array on every device, whose products give their gradients to what it is made of."""
        sources, weights = self.sources, [leaf for leaf in self.leaves if isinstance(leaf, Sharded)]
        others = [leaf for leaf in self.leaves if not isinstance(leaf, Sharded)]

        def made(bases: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
            of_value = {id(one.value): base for one, base in zip(sources, bases, strict=True)}
            seen = {id(one): one.seen(of_value[id(one.value)]) for one in weights}
            return [_value(self, seen | dict(zip(map(id, others), beside, strict=True)))]

        return repeated_of(sources, others, made)[0]

    def array(self, use: str = "") -> Any:
        """The array, whole."""
        return self.repeated.plain

    def stacked(self) -> Any:
        """Itself where each layer is made of those of its weights; else the array."""
        layers = self.equation.outvars[0].aval.shape[:1]
        are_stacks = all(
            isinstance(leaf, Sharded) and leaf.stacked() is leaf and leaf.value.shape[:1] == layers
            for leaf in self.leaves
        )
        others = (x for node in self.nodes for x in node.operands if not isinstance(x, Sharded | Composed))
        are_stacks = are_stacks and not any(getattr(x, "ndim", 0) for x in others)
        return self if are_stacks and all(map(_is_of_each_layer, self.nodes)) else self.array()

    def layer(self, arrays: Sequence[Any]) -> Composed:
        """One layer of it, made of these."""
        layers = [leaf.layer(own) for leaf, own in zip(self.leaves, arrays, strict=True)]
        return replace(self._of(layers, _on_one_layer), is_layer=True)

    def _of(self, leaves: Sequence[Any], instead: Callable[[Any], Any] = lambda equation: equation) -> Composed:
        """The same made of others, by other equations."""
        known = dict(zip(map(id, self.leaves), leaves, strict=True))
        for node in self.nodes:
            if self._is_layer_of(node):
                known[id(node)] = node._of([known[id(leaf)] for leaf in node.leaves])
            else:
                operands = tuple(known.get(id(x), x) for x in node.operands)
                known[id(node)] = replace(node, equation=instead(node.equation), operands=operands)
        found: Composed = known[id(self)]
        return found


def composed(equation: Any, operands: Sequence[Any], examples: Examples, *, whole: bool = False) -> Composed | None:
    """What an equation makes of weights, if it is a product of such, or made of one, and large beside them; else None.

    Args:
        equation: any.
        operands: its own, of which some may be a `Sharded` or `Composed`.
        examples: where they are in its program.
        whole: the equation would have to take its weights whole: it need be no product.
    """
    name = equation.primitive.name
    weights = [x for x in operands if isinstance(x, Sharded)]
    starts = name == "dot_general" or (whole and any(x.is_apart or x.spec != x.gathered for x in weights))
    is_of_weights = (starts and weights) or any(isinstance(x, Composed) for x in operands)
    if not is_of_weights or equation.effects or len(equation.outvars) != 1 or name in _TAKEN_WHOLE:
        return None
    if any(not _may_be_part(*pair, examples) for pair in zip(operands, equation.invars, strict=True)):
        return None
    found = Composed(equation, tuple(operands))
    if name == "broadcast_in_dim" and _nbytes(equation.outvars[0].aval) > _nbytes(equation.invars[0].aval):
        return None
    return found if all(map(adds_up, found.sources)) and found.is_worth_it else None


def composes(jaxpr: Any, is_weight: Sequence[bool]) -> bool:
    """Whether a program makes something of weights alone that is no small one of them in another form.

    Args:
        jaxpr: the program.
        is_weight: for each of its inputs.
    """

    def is_made(equation: Any, given: Sequence[bool]) -> bool:
        others = (x for x, yes in zip(equation.invars, given, strict=True) if not yes)
        return equation.primitive.name not in ENTERED and all(isinstance(x, core.Literal) for x in others)

    return any(
        is_made(one, given) and one.primitive.name not in VIEWS and any(_nbytes(x.aval) >= SMALL for x in one.outvars)
        for one, given in read_by(jaxpr, is_weight, is_made)
    )


def outside_of_loop(params: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of a loop, those that all iterations use made before it.

    Args:
        params: of the loop's equation.
        operands: its own, of which some may be a `Composed`.
    """
    count, _ = scan_counts(params)
    return [x.repeated if place < count and isinstance(x, Composed) else x for place, x in enumerate(operands)]


def _may_be_part(operand: Any, atom: Any, examples: Examples) -> bool:
    if isinstance(operand, Sharded | Composed) or isinstance(atom, core.Literal):
        return True
    return atom not in examples.dims and (is_array(operand) or not hasattr(operand, "arrays"))


def _nbytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)


def _value(one: Composed, arrays: Mapping[int, Any]) -> Any:
    """The array, of arrays in the place of its leaves, by the `id` of these; layers of them are stacks of one."""
    if one.is_layer:
        return one.evaluated({id(leaf): arrays[id(leaf)][None] for leaf in one.leaves})[0]
    layers = {id(node): _value(node, arrays) for node in one.nodes if node.is_layer}
    return one.evaluated({**arrays, **layers})


def _is_of_each_layer(node: Composed) -> bool:
    """Whether an equation does the same to each layer of stacks, their leading dim, and no more."""
    equation = node.equation
    name, params, layers = equation.primitive.name, equation.params, equation.outvars[0].aval.shape[:1]
    stacks = [x.aval for x in equation.invars if not isinstance(x, core.Literal)]
    if node.is_layer or any(one.shape[:1] != layers for one in stacks):
        return False
    if name == "dot_general":
        return all(dims[:1] == (0,) for dims in params["dimension_numbers"][1])
    if name == "transpose":
        return bool(params["permutation"][0] == 0)
    if name == "broadcast_in_dim":
        return bool(params["broadcast_dimensions"][:1] == (0,))
    return name in OF_EACH_ENTRY or name == "reshape" or (name in _REDUCTIONS and 0 not in params["axes"])


def _on_one_layer(equation: Any) -> Any:
    """An equation that `_is_of_each_layer`, on a stack of one."""
    shapes = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
    key, params = shapes.get(equation.primitive.name), equation.params
    return equation if key is None else equation.replace(params={**params, key: (1, *params[key][1:])})
