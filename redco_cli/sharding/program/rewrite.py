"""Runs a traced program anew, with some of its parameters taken along in another form until they are used.

Where a parameter lives is not always where, or how, it is used: one in shards is gathered first, one with an adapter
is multiplied together with it. Here is what all such rewritings share: a tracked parameter passes through views of it,
into calls, rematerialised parts and loops, one layer at a time where layers are stacked. What happens at its use, the
rewriting says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core

from redco_cli.sharding.scans import scan_counts

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})
CONTROL_FLOW = frozenset({"cond", "while", "scan"})
VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "convert_element_type"})


class Tracked(Protocol):
    """A parameter that was not used yet."""

    @property
    def arrays(self) -> Any:
        """What it consists of, a tree of arrays that control flow takes along."""

    def having(self, arrays: Any) -> Tracked:
        """The same with other arrays in their place."""

    def layer(self, arrays: Any) -> Tracked:
        """One layer of it: `arrays` without their leading dim."""

    def stacked(self) -> Any:
        """Itself, where a loop may run over its leading dim as it is; else the array."""

    def viewed(self, equation: Any) -> Tracked:
        """The same parameter, seen in another way: behind an equation of `VIEWS`."""

    def array(self, use: str) -> Any:
        """The array, for a use that knows nothing else; `use` says which, for errors."""


class Rewriting(Protocol):
    """What is made of a program."""

    @property
    def enters(self) -> frozenset[str]:
        """Control flow that tracked parameters are taken into, of `CONTROL_FLOW`; rematerialised parts always are."""

    @property
    def calls(self) -> frozenset[str]:
        """Names of calls that `use` has results of; others are entered."""

    @property
    def everywhere(self) -> bool:
        """Whether calls and control flow are entered that no tracked parameter goes into, too."""

    def is_tracked(self, operand: Any) -> bool:
        """Whether an operand is a tracked parameter of this rewriting."""

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation, some of whose operands may be tracked."""


def rewritten(closed: Any, arguments: Sequence[Any], rewriting: Rewriting) -> list[Any]:
    """The results of a program on arrays and tracked parameters, as arrays.

    Args:
        closed: what `jax.make_jaxpr` returned.
        arguments: one for each of its inputs.
        rewriting: what happens at each use.
    """
    results = _evaluate(closed.jaxpr, closed.consts, arguments, rewriting)
    return _arrays(results, rewriting, "the result")


def made_once(closed: Any, is_weight: Sequence[bool]) -> Any:
    """The same program, which computes what it makes of weights alone once, however often it says so.

    A model that is applied twice casts its weights twice, or scales or joins them: each would be gathered, and have a
    gradient to scatter. What is read without a gradient stays apart from what has one.

    Args:
        closed: the program, as `jax.make_jaxpr` returns it.
        is_weight: for each of its inputs.
    """
    jaxpr = closed.jaxpr
    made = {x for x, yes in zip(jaxpr.invars, is_weight, strict=True) if yes}
    still = {x for one in jaxpr.eqns if one.primitive.name == "stop_gradient" for x in variables_of(one.invars)}
    same: dict[Any, Any] = {x: x for x in (*made, *jaxpr.constvars)}  # the first variable that has the same value
    seen: dict[Any, Any] = {}
    instead: dict[Any, Any] = {}
    equations = []
    for equation in jaxpr.eqns:
        atoms = [x if isinstance(x, core.Literal) else instead.get(x, x) for x in equation.invars]
        read = variables_of(atoms)
        if same.keys() >= set(read) and _is_known_by_text(equation) and still.isdisjoint(equation.outvars):
            places = tuple(repr(x) if isinstance(x, core.Literal) else id(same[x]) for x in atoms)
            first = seen.setdefault((equation.primitive.name, places, str(equation.params)), equation)
            same.update(zip(equation.outvars, first.outvars, strict=True))
            if not made.isdisjoint(read):
                made.update(equation.outvars)
                if first is not equation:
                    instead.update(zip(equation.outvars, first.outvars, strict=True))
                    continue
        equations.append(equation.replace(invars=atoms))
    outvars = [x if isinstance(x, core.Literal) else instead.get(x, x) for x in jaxpr.outvars]
    return closed.replace(jaxpr=jaxpr.replace(eqns=equations, outvars=outvars)) if instead else closed


def _is_known_by_text(equation: Any) -> bool:
    """Whether one with the same text computes the same: neither it nor what it calls closes over arrays of its own."""
    inside = list(core.jaxprs_in_params(equation.params))
    values = [x.val for x in equation.invars if isinstance(x, core.Literal)] + list(equation.params.values())
    closes_over = any(jaxpr.constvars for jaxpr in inside) or any(getattr(value, "ndim", 0) for value in values)
    called = (one for jaxpr in inside for one in jaxpr.eqns)
    return not equation.effects and not closes_over and all(map(_is_known_by_text, called))


def used_severally(jaxpr: Any) -> frozenset[Any]:
    """The variables of a program that more than one of its equations reads."""
    reads = Counter(x for equation in jaxpr.eqns for x in variables_of(equation.invars))
    return frozenset(x for x, count in reads.items() if count > 1)


def variables_of(atoms: Sequence[Any]) -> list[Any]:
    """What is read, but for numbers that are written in an equation."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def bind(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation on arrays."""
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def _arrays(values: Sequence[Any], rewriting: Rewriting, use: str) -> list[Any]:
    return [x.array(use) if rewriting.is_tracked(x) else x for x in values]


def _taken_along(values: Sequence[Any], rewriting: Rewriting) -> list[Any]:
    """What control flow takes along of values."""
    return [x.arrays if rewriting.is_tracked(x) else x for x in values]


def _inside(values: Sequence[Any], arrays: Sequence[Any], rewriting: Rewriting) -> list[Any]:
    """Within control flow, the values whose arrays were taken along."""
    return [x.having(own) if rewriting.is_tracked(x) else own for x, own in zip(values, arrays, strict=True)]


def _evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    rewriting: Rewriting,
    made: Mapping[Any, Any] = MappingProxyType({}),
) -> list[Any]:
    """Runs a jaxpr; a result that is a parameter only viewed is still tracked; what is `made` already is not again."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(made)
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        if made and equation.outvars and equation.outvars[0] in made:
            continue
        with jax.named_scope(str(equation.source_info.name_stack) or equation.primitive.name):
            results = _apply(equation, [read(atom) for atom in equation.invars], rewriting)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _as_array(constant: Any) -> Any:
    """A constant that may be indexed by what is traced, as a backward rule of its own does it: NumPy's may not."""
    is_numpys = getattr(constant, "ndim", 0) and not isinstance(constant, jax.Array)
    return jnp.asarray(constant) if is_numpys else constant


def _apply(equation: Any, operands: Sequence[Any], rewriting: Rewriting) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    operands = [_as_array(x) for x in operands] if name == "custom_vjp_call" else operands
    tracked = any(map(rewriting.is_tracked, operands))
    if tracked or rewriting.everywhere:
        if name in INLINED and not (tracked and params.get("name") in rewriting.calls):
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            return _evaluate(inner.jaxpr, inner.consts, operands, rewriting)
        if name in REMATERIALISED:
            return _remat(params, operands, rewriting)
        if name in rewriting.enters:
            return {"cond": conditional, "while": _while, "scan": loop}[name](params, operands, rewriting)
        if tracked and name in VIEWS and len(operands) == 1:
            return [operands[0].viewed(equation)]
    return rewriting.use(equation, operands)


def _remat(params: Any, operands: Sequence[Any], rewriting: Rewriting) -> Sequence[Any]:
    """Used inside, so that the backward pass uses them again."""

    def body(arrays: Sequence[Any]) -> list[Any]:
        results = _evaluate(params["jaxpr"], [], _inside(operands, arrays, rewriting), rewriting)
        return _arrays(results, rewriting, "the result of a rematerialised part")

    rematerialised = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
    results: list[Any] = rematerialised(_taken_along(operands, rewriting))
    return results


def loop(
    params: Any, operands: Sequence[Any], rewriting: Rewriting, made: Mapping[Any, Any] = MappingProxyType({})
) -> Sequence[Any]:
    """The results of a `scan`: consts and layers go in as they are, and are used in each iteration.

    Args:
        params: of its equation.
        operands: its own, of which some may be tracked.
        rewriting: what happens at each use.
        made: by their variables within, results that are there before it, tracked or not.
    """
    first, count = scan_counts(params)
    consts, carried = operands[:first], _arrays(operands[first : first + count], rewriting, "the carry of a loop")
    layers = [x.stacked() if rewriting.is_tracked(x) else x for x in operands[first + count :]]
    inner = params["jaxpr"]

    def body(carry: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        own = [x.layer(one) if rewriting.is_tracked(x) else one for x, one in zip(layers, arrays, strict=True)]
        results = _evaluate(inner.jaxpr, inner.consts, [*consts, *carry, *own], rewriting, made)
        plain = _arrays(results, rewriting, "the result of a loop")
        return plain[:count], plain[count:]

    carry, ys = jax.lax.scan(
        body,
        carried,
        _taken_along(layers, rewriting),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(params: Any, operands: Sequence[Any], rewriting: Rewriting) -> Sequence[Any]:
    """A condition uses no parameter but as an array; the body uses them in each iteration."""
    middle = params["cond_nconsts"]
    first = middle + params["body_nconsts"]
    asked = _arrays(operands[:middle], rewriting, "the condition of a loop")
    consts, carried = operands[middle:first], _arrays(operands[first:], rewriting, "the carry of a loop")
    condition, inner = params["cond_jaxpr"], params["body_jaxpr"]

    def goes_on(carry: Any) -> Any:
        return _evaluate(condition.jaxpr, condition.consts, [*asked, *carry], rewriting)[0]

    def body(carry: Any) -> Any:
        results = _evaluate(inner.jaxpr, inner.consts, [*consts, *carry], rewriting)
        return _arrays(results, rewriting, "the result of a loop")

    return list(jax.lax.while_loop(goes_on, body, carried))


def conditional(
    params: Any, operands: Sequence[Any], rewriting: Rewriting, switch: Callable[..., Any] = jax.lax.switch
) -> Sequence[Any]:
    """The results of a conditional, each of whose branches uses tracked parameters by itself.

    Args:
        params: of its equation.
        operands: the number of the branch, and what that is given.
        rewriting: what happens at each use.
        switch: runs one of several functions on arrays.
    """
    which, *given = operands

    def branch(inner: Any) -> Callable[..., list[Any]]:
        def run(*arrays: Any) -> list[Any]:
            results = _evaluate(inner.jaxpr, inner.consts, _inside(given, arrays, rewriting), rewriting)
            return _arrays(results, rewriting, "the result of a branch")

        return run

    branches = [branch(inner) for inner in params["branches"]]
    return list(switch(which, branches, *_taken_along(given, rewriting)))
