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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from redco_cli.sharding.gather.local.loops import adds_up, is_array, repeated_of
from redco_cli.sharding.gather.repeated import Repeated
from redco_cli.sharding.gather.sharded import Sharded
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, bind
from redco_cli.sharding.scans import scan_counts

_OF_EACH_ENTRY = frozenset(ELEMENTWISE.split()) - {"sharding_constraint"}
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})
_ROOM = 1.5
"""Of the bytes of what is made, how many it may be made of: a weight to add it to, and factors."""


@dataclass(frozen=True)
class Composed:
    """What an equation makes of weights alone. Nothing is computed until it is used.

    Attributes:
        equation: of one result.
        operands: its own: a `Sharded` or `Composed`, or an array that has to do with no example.
        is_layer: its weights are one layer each of those that the equations are of.
    """

    equation: Any
    operands: tuple[Any, ...]
    is_layer: bool = False

    @cached_property
    def leaves(self) -> list[Any]:
        """The weights and arrays that it is made of, each once."""
        operands = [x for node in self.nodes for x in node.operands if isinstance(x, Sharded | jax.Array)]
        return list({id(x): x for x in operands}.values())

    @cached_property
    def nodes(self) -> list[Composed]:
        """It, and what is composed on the way to it, each once; what is made of others comes before these."""
        found: dict[int, Composed] = {}
        pending = [self]
        while pending:
            missing = [x for x in pending[-1].operands if isinstance(x, Composed) and id(x) not in found]
            if missing:
                pending += missing
            else:
                node = pending.pop()
                found[id(node)] = node
        return list(found.values())

    @property
    def sources(self) -> list[Sharded]:
        """The weights that it is made of."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Sharded)]

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
        largest = max(_nbytes(node.equation.outvars[0].aval) for node in self.nodes)
        return bool(sum(leaf.value.nbytes for leaf in self.sources) <= _ROOM * largest)

    @cached_property
    def repeated(self) -> Repeated:
        """The array on every device, whose products give their gradients to what it is made of."""
        sources = self.sources
        others = [leaf for leaf in self.leaves if not isinstance(leaf, Sharded)]

        def made(bases: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
            arrays = [one.seen(base) for one, base in zip(sources, bases, strict=True)]
            known = dict(zip(map(id, [*sources, *others]), [*arrays, *beside], strict=True))
            return [_value(self, known)]

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
        return self if are_stacks and all(map(_is_of_each_layer, self.nodes)) else self.array()

    def layer(self, arrays: Sequence[Any]) -> Composed:
        """One layer of it, made of these."""
        layers = [leaf.layer(own) for leaf, own in zip(self.leaves, arrays, strict=True)]
        return replace(self._of(layers), is_layer=True)

    def _of(self, leaves: Sequence[Any]) -> Composed:
        """The same made of others."""
        known = dict(zip(map(id, self.leaves), leaves, strict=True))
        for node in self.nodes:
            known[id(node)] = replace(node, operands=tuple(known.get(id(x), x) for x in node.operands))
        found: Composed = known[id(self)]
        return found


def composed(equation: Any, operands: Sequence[Any], examples: Examples) -> Composed | None:
    """What an equation makes of weights, if it is a product of such, or made of one, and large beside them; else None.

    Args:
        equation: any.
        operands: its own, of which some may be a `Sharded` or `Composed`.
        examples: where they are in its program.
    """
    name = equation.primitive.name
    starts = name == "dot_general" and any(isinstance(x, Sharded) for x in operands)
    if not starts and not any(isinstance(x, Composed) for x in operands):
        return None
    is_plain = not equation.effects and len(equation.outvars) == 1 and not any(core.jaxprs_in_params(equation.params))
    if not is_plain or name in CONTROL_FLOW:
        return None
    if any(not _may_be_part(*pair, examples) for pair in zip(operands, equation.invars, strict=True)):
        return None
    found = Composed(equation, tuple(operands))
    return found if all(map(adds_up, found.sources)) and found.is_worth_it else None


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
    """The array, of arrays in the place of its leaves, by the `id` of these."""
    known = {key: array[None] for key, array in arrays.items()} if one.is_layer else dict(arrays)
    for node in one.nodes:
        if node.is_layer and node is not one:
            known[id(node)] = _value(node, {id(leaf): known[id(leaf)] for leaf in node.leaves})
        elif id(node) not in known:
            operands = [known.get(id(x), x) for x in node.operands]
            known[id(node)] = bind(_of_one_layer(node.equation) if one.is_layer else node.equation, operands)[0]
    return known[id(one)][0] if one.is_layer else known[id(one)]


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
    return name in _OF_EACH_ENTRY or name == "reshape" or (name in _REDUCTIONS and 0 not in params["axes"])


def _of_one_layer(equation: Any) -> Any:
    """An equation that `_is_of_each_layer`, on a stack of one."""
    shapes = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
    key = shapes.get(equation.primitive.name)
    return (
        equation if key is None else equation.replace(params={**equation.params, key: (1, *equation.params[key][1:])})
    )
