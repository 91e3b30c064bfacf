"""Reads a traced program and finds the logical axes of everything in it.

Each primitive says how the dims of its results follow from those of its operands: see `primitives` and `rules`. That of
calls is here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core

from redco_cli.sharding.axes import Dim, fresh_dims, unify
from redco_cli.sharding.program.events import (
    COMPARED,
    GRADIENT,
    ActivationProduct,
    Matmul,
    PossibleCollective,
    RowLookup,
    Use,
    Value,
    itemsize,
)
from redco_cli.sharding.program.reference import reference_jaxpr
from redco_cli.sharding.recomputed import computed_again

Rule = Callable[["Walk", Any, list[Value]], list[Value]]
_RULES: dict[str, Rule] = {}
_VIEWS = ("reshape", "transpose", "convert_element_type")
"""Of one array, the same view is one array too, however often a program takes it."""
_RECOMPUTED = ("remat", "remat2", "checkpoint")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers how values pass through the primitives of these names."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(eq=False)
class Walk:
    """What is found on the way through a program; nothing at first, but for what is known of it beforehand.

    Attributes:
        casts: in what other precision rows are used that are looked up, by their variable; see `lookups.casts`.
        shares: how often each branch of a conditional is taken, by the `id` of its equation, where that is known.
        still: variables that no gradient goes back through; see `without_gradient`.
        collectives: those that operations would need if a dim were split.
        arrays: dims of every array of two dims or more.
        activation_products: products of two activations.
        matmuls: products of an activation with a weight.
        fast: dims that weights bring to such in the first turn of a loop, which makes activations of them.
        uses: parameters in them.
        lookups: indexed dims of gathers from weights.
        rows: what is looked up for examples.
        batched: dims that a weight and an activation have both without summing over them, such as experts.
        ranked: dims along which the largest elements are picked.
        devices: inside a `shard_map`, mesh axis to the dim along it.
        by_hand: factors of weights that a `shard_map` splits.
        cuts: dims that are taken apart in pieces whose sizes differ, and where some of these end.
        joined: dims that are joined, and where what they are joined of ends.
        moved_as: dims of arrays whose sums are moved as another array is, and that one; see `marks.summed_as`.
        recomputes: inside what the backward pass computes once more.
        again: variables of that which it needs once more, and how often.
        unknown: primitives that were not understood, and how often they met a gradient.
        partial: by their `id`, what products over split dims make, and the one that each is added up with.
        factors: by their `id`, what products with weights make, and what these multiply.
    """

    casts: Mapping[Any, Any] = field(default_factory=dict)
    shares: Mapping[int, Sequence[float]] = field(default_factory=dict)
    still: frozenset[Any] = frozenset()
    collectives: list[PossibleCollective] = field(default_factory=list)
    arrays: set[tuple[Dim, ...]] = field(default_factory=set)
    activation_products: list[ActivationProduct] = field(default_factory=list)
    matmuls: list[Matmul] = field(default_factory=list)
    fast: list[Dim] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    lookups: list[Dim] = field(default_factory=list)
    rows: list[RowLookup] = field(default_factory=list)
    batched: list[Dim] = field(default_factory=list)
    ranked: list[Dim] = field(default_factory=list)
    devices: dict[str, Dim] = field(default_factory=dict)
    by_hand: list[Dim] = field(default_factory=list)
    cuts: list[tuple[Dim, tuple[int, ...]]] = field(default_factory=list)
    joined: dict[Dim, tuple[int, ...]] = field(default_factory=dict)
    moved_as: list[tuple[tuple[Dim, ...], Value]] = field(default_factory=list)
    recomputes: bool = False
    again: Counter[Any] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    partial: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    factors: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    _times: int = 1
    _passes: int = 1
    _goes_back: bool = True
    _uses: Counter[Any] = field(default_factory=Counter)

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Walks through a jaxpr.

        Args:
            jaxpr: an open jaxpr.
            consts: of its `constvars`.
            args: of its `invars`.

        Returns:
            Values of its `outvars`.
        """
        known: dict[Any, Value] = {}
        views: dict[tuple[str, int, str], list[Value]] = {}

        def read(atom: Any) -> Value:
            return constant(atom.aval) if isinstance(atom, core.Literal) else known[atom]

        known.update(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        outside = self._passes, (goes_back := self._goes_back), self._uses
        self._uses = Counter(atom for one in jaxpr.eqns for atom in one.invars if not isinstance(atom, core.Literal))
        self._uses.update(atom for atom in (*jaxpr.invars, *jaxpr.outvars) if not isinstance(atom, core.Literal))
        for equation in jaxpr.eqns:
            self._goes_back = goes_back and not self.still.issuperset(equation.outvars)
            self._passes = 1 + max((self.again[variable] for variable in equation.outvars), default=0)
            operands = [read(atom) for atom in equation.invars]
            reference = reference_jaxpr(equation)
            name = equation.primitive.name
            view = (name, id(operands[0]), str(equation.params)) if name in _VIEWS else None
            if reference is not None:
                results = self.closed(reference, operands)
            elif view in views:
                results = views[view]
            else:
                results = _RULES.get(name, _RULES["unknown"])(self, equation, operands)
            if view is not None:
                views[view] = results
            for variable, value in zip(equation.outvars, results, strict=True):
                known[variable] = value
                if len(value.dims) > 1:
                    self.arrays.add(value.dims)
        self._passes, self._goes_back, self._uses = outside
        return [read(atom) for atom in jaxpr.outvars]

    def closed(self, closed: Any, args: Sequence[Value]) -> list[Value]:
        """Walks through a closed jaxpr."""
        return self.run(closed.jaxpr, [constant(variable.aval) for variable in closed.jaxpr.constvars], args)

    def may_need(
        self, kind: str, if_split: Sequence[Dim], moved: Value, aval: Any, what: str, of: Value | None = None
    ) -> None:
        """Notes that splitting one of `if_split` would move an array; see `PossibleCollective`."""
        dims = tuple(dim for dim in if_split if dim)
        if dims and (self._goes_back or not what.startswith(GRADIENT)):
            count = self._times * (1 if what.startswith(GRADIENT) else self._passes)
            found = PossibleCollective(kind, dims, moved.dims, itemsize(aval), count, what, of)
            self.collectives.append(found)

    def needs_whole(self, dims: Sequence[Dim], operand: Value, aval: Any, what: str) -> None:
        """Notes that an operation needs some dims of its operand whole."""
        self.may_need("all-gather", dims, operand, aval, what)
        if operand.requires_grad:
            self.may_need("all-reduce", dims, operand, aval, f"{GRADIENT} {what}")

    def compares(self, dims: Sequence[Dim], x: Value, aval: Any) -> None:
        """Notes that an array meets others along some dims, which may turn out to be its own."""
        self.may_need("all-gather", dims, x, aval, COMPARED, of=x)
        if x.requires_grad:
            self.may_need("reduce-scatter", dims, x, aval, f"{GRADIENT} {COMPARED}", of=x)

    def repeats(self, x: Value, aval: Any, along: Sequence[Dim]) -> None:
        """Notes that an array is repeated along some of the dims of a result, where it has no dim of its own."""
        if any(along):
            last = max((place for place, dim in enumerate(along) if not dim), default=0)
            self.compares(along[:last], x, aval)
            if x.requires_grad:
                self.may_need("all-reduce", along, x, aval, f"{GRADIENT} a repeated array")

    def may_need_sums(self, contracted: Sequence[Dim], result: Value, aval: Any, what: str) -> None:
        """Notes that splitting what a product sums over leaves partial sums."""
        self.partial[id(result)] = result, result
        self.may_need("all-reduce", contracted, result, aval, f"partial sums of a {what}", of=result)

    def adds(self, equation: Any, operands: Sequence[Value], result: Value) -> None:
        """Notes that arrays are added up: where all are partial sums, for nothing else, these are moved as one."""
        summands = [(x, atom) for x, atom in zip(operands, equation.invars, strict=True) if not _is_zero(atom)]
        ones = [self.partial[id(x)][1] for x, _ in summands if id(x) in self.partial]
        if len(ones) == len(summands) > 0 and all(self._uses[atom] == 1 for _, atom in summands):
            self.partial.update({id(x): (x, ones[0]) for x in (*(x for x, _ in summands), result)})

    @property
    def times(self) -> int:
        """How often what is met now happens in a forward pass."""
        return self._times

    @contextlib.contextmanager
    def repeated(self, times: float) -> Iterator[None]:
        """While the context is open, everything happens `times` times."""
        outside = self._times
        self._times = round(outside * times)
        yield
        self._times = outside


def _is_zero(atom: Any) -> bool:
    """Whether it is what a sum of several begins with."""
    return isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def constant(aval: Any) -> Value:
    """An array that depends on nothing."""
    return Value(fresh_dims(getattr(aval, "shape", ())), requires_grad=False, from_batch=False)


def combined(operands: Sequence[Value], dims: Sequence[Dim]) -> Value:
    """An array computed from some operands."""
    paths = [x.path for x in operands if x.requires_grad or x.from_batch]
    path = paths[0] if len(paths) == 1 else ""
    origin, flows = operands[0].origin if len(operands) == 1 else path, any(x.requires_grad for x in operands)
    from_batch, origins = any(x.from_batch for x in operands), frozenset().union(*(x.sources for x in operands))
    return Value(tuple(dims), flows, from_batch, path, origin, frozenset() if from_batch else origins)


def viewed(operand: Value, dims: Sequence[Dim]) -> Value:
    """The same array, seen in another way."""
    return operand._replace(dims=tuple(dims))


def unify_values(first: Value, second: Value) -> Value:
    """The two are the same array at different times."""
    for a, b in zip(first.dims, second.dims, strict=True):
        unify(a, b)
    return Value(first.dims, first.requires_grad or second.requires_grad, first.from_batch or second.from_batch)


@rule(
    "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "custom_vmap_call", "composite",
)  # fmt: skip
def call(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """The rule of what only holds a program."""
    inner = next(equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in equation.params)
    outside = walk.recomputes, walk.again
    if equation.primitive.name in _RECOMPUTED:
        walk.recomputes, walk.again = True, walk.again + Counter(computed_again(inner, equation.params["policy"]))
    results = walk.closed(inner, operands) if hasattr(inner, "jaxpr") else walk.run(inner, [], operands)
    walk.recomputes, walk.again = outside
    return results
