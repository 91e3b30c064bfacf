"""Goes through a traced loss and says of each array what the rows of the batch come to in it.

Each primitive has a rule (`elementwise`, `products`, `shapes`, `indexing`); here are the ones that hold programs. A
loop runs until its carry says the same before and after a round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from redco_cli.sharding.axes import fresh
from redco_cli.sharding.program.reference import reference_jaxpr
from redco_cli.sharding.scans import scan_counts
from redco_cli.training.cuts.values import CONSTANT, UNKNOWN, Batch, Cause, Kind, Value, either, rows, same, tagged

Rule = Callable[["Walk", Any, list[Value]], list[Value]]
_RULES: dict[str, Rule] = {}
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform"})


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers how values pass through the primitives of these names. Some operand is not CONSTANT."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Draw:
    """Random numbers drawn with the key of the step, or with one that nothing given to the loss enters.

    Attributes:
        shape: how many are drawn in all, the turns of loops around it included.
        equation: where: the innermost equation that was traced for this very loss.
        is_fixed: the key is the same in every step.
    """

    shape: tuple[int, ...]
    equation: Any
    is_fixed: bool


class Walk:
    """What is found on the way.

    Attributes:
        batch: its axis.
        draws: by number.
    """

    def __init__(self, batch: Batch) -> None:
        """Nothing is known yet."""
        self.batch = batch
        self.draws: list[Draw] = []
        self._known_draws: dict[tuple[int, int], int] = {}
        self._place: Any = None
        self._is_traced_here = True
        self._turns: tuple[int, ...] = ()

    def run(self, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        """Walks through an open jaxpr, whose constants are CONSTANT."""
        known: dict[Any, Value] = dict.fromkeys(jaxpr.constvars, CONSTANT)
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return CONSTANT if isinstance(atom, core.Literal) else known[atom]

        around = self._place
        for equation in jaxpr.eqns:
            if self._is_traced_here:
                self._place = equation
            known.update(zip(equation.outvars, self._results(equation, list(map(read, equation.invars))), strict=True))
        self._place = around
        return [read(atom) for atom in jaxpr.outvars]

    def closed(self, inner: Any, args: Sequence[Value]) -> list[Value]:
        """Walks through a jaxpr, closed or open."""
        return self.run(getattr(inner, "jaxpr", inner), args)

    def met(self, kind: Kind, what: str) -> Value:
        """Rows that meet here."""
        return Value(kind, cause=Cause(what, self._place))

    def called(self, inner: Any, args: Sequence[Value]) -> list[Value]:
        """Walks through a called function. One of JAX's own may have been traced earlier, for another caller."""
        before = self._is_traced_here
        self._is_traced_here = before and not _is_of_jax(inner)
        try:
            return self.closed(inner, args)
        finally:
            self._is_traced_here = before

    def turning(self, times: int, body: Any, args: Sequence[Value]) -> list[Value]:
        """Walks through what happens `times` times."""
        before, self._turns = self._turns, (*self._turns, times)
        try:
            return self.closed(body, args)
        finally:
            self._turns = before

    def _results(self, equation: Any, operands: list[Value]) -> list[Value]:
        name = equation.primitive.name
        reference = reference_jaxpr(equation)
        if reference is not None:
            return self.closed(reference, operands)
        if name in _PROGRAMS:
            return _PROGRAMS[name](self, equation, operands)
        if all(x.kind is Kind.CONSTANT for x in operands):
            found = [CONSTANT] * len(equation.outvars)
        else:
            found = _RULES.get(name, _unknown)(self, equation, operands)
        if name == "iota" and equation.params["shape"][equation.params["dimension"]] == self.batch.axis.size:
            found = [replace(CONSTANT, counts=True)]
        found = [tagged(value, operands) for value in found]
        if name in _DRAWS and (found[0].from_key or not found[0].is_given):
            number = self._number(equation, is_fixed=not found[0].is_given)
            found = [tagged(value, [Value(Kind.CONSTANT, draws=frozenset({number}))]) for value in found]
        return found

    def _number(self, equation: Any, *, is_fixed: bool) -> int:
        place = id(self._place), id(equation)
        if place not in self._known_draws:
            self._known_draws[place] = len(self.draws)
            self.draws.append(Draw((*self._turns, *equation.outvars[0].aval.shape), self._place, is_fixed))
        return self._known_draws[place]


def _unknown(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return [UNKNOWN] * len(equation.outvars)


def _is_of_jax(inner: Any) -> bool:
    about = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    file = getattr(about, "func_filename", None)
    return file is None or file.startswith(os.path.dirname(jax.__file__) + os.sep)


def _call(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    inner = next(equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in equation.params)
    return walk.called(inner, operands)


def _scan(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    params = equation.params
    (consts, carried), body, times = scan_counts(params), params["jaxpr"], params["length"]
    fixed, carry, scanned = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
    slices = []
    for x in scanned:
        if x.kind is not Kind.ROWS:
            slices.append(x)
        elif walk.batch.of(x.dims[0]):  # row after row
            slices.append(tagged(UNKNOWN, [x]))
        else:
            slices.append(tagged(rows(x.dims[1:]), [x]))
    carry, results = _settled(walk, carry, lambda now: walk.turning(times, body, [*fixed, *now, *slices]))
    stacked = [tagged(rows((fresh(times), *y.dims)), [y]) if y.kind is Kind.ROWS else y for y in results[carried:]]
    return [*carry, *stacked]


def _while(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    skipped = equation.params["cond_nconsts"]
    first = skipped + equation.params["body_nconsts"]
    fixed, body = operands[skipped:first], equation.params["body_jaxpr"]
    return _settled(walk, operands[first:], lambda now: walk.closed(body, [*fixed, *now]))[0]


def _settled(
    walk: Walk, carry: list[Value], turn: Callable[[list[Value]], list[Value]]
) -> tuple[list[Value], list[Value]]:
    """The carry of a loop as it is after any number of rounds, and the results of a round then."""
    while True:  # each round that changes a value moves it up a ladder of a few rungs
        results = turn(carry)
        after = [either(walk.batch, a, b) for a, b in zip(carry, results, strict=False)]
        if all(same(walk.batch, a, b) for a, b in zip(carry, after, strict=True)):
            return after, results
        carry = after


def _cond(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    results, *others = (walk.closed(branch, operands[1:]) for branch in equation.params["branches"])
    for other in others:
        results = [either(walk.batch, a, b) for a, b in zip(results, other, strict=True)]
    return results


_PROGRAMS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint", "custom_jvp_call",
            "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "custom_vmap_call", "composite",
        ),
        _call,
    ),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}  # fmt: skip
