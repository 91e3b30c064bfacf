"""Results of equations that are not computed yet: what a rewriting follows until it knows how it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from redco_cli.sharding.program.rewrite import bind


@dataclass(frozen=True)
class Unevaluated:
    """The result of an equation.

    Attributes:
        equation: of one result.
        operands: its own: others of these, or anything else, which are its leaves.
    """

    equation: Any
    operands: tuple[Any, ...]

    @cached_property
    def nodes(self) -> list[Self]:
        """It, and those on the way to it, each once; what is made of others comes after these."""
        found: dict[int, Self] = {}
        pending = [self]
        while pending:
            missing = [x for x in self.before(pending[-1]) if id(x) not in found]
            if missing:
                pending += missing
            else:
                node = pending.pop()
                found[id(node)] = node
        return list(found.values())

    def before(self, node: Self) -> Sequence[Self]:
        """What one of its `nodes` is made of."""
        return [x for x in node.operands if isinstance(x, type(self))]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return tuple(self.equation.outvars[0].aval.shape)

    def evaluated(self, leaves: Mapping[int, Any]) -> Any:
        """The array.

        Args:
            leaves: by their `id`, arrays in the place of some, or of nodes.
        """
        known = dict(leaves)
        for node in self.nodes:
            if id(node) in known:
                continue
            known[id(node)] = bind(node.equation, [known.get(id(x), x) for x in node.operands])[0]
        return known[id(self)]
