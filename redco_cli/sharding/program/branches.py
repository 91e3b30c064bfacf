"""How often each branch of a program is taken, where data do not decide that, layers whose windows differ, say; or the
program says which one it usually is.

A program is run with what it knows without its arguments, which is little and cheap: constants, counters of loops, what
loops over layers take from such arrays, and small arrays that are computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from redco_cli.sharding.program.marks import usual_branch
from redco_cli.sharding.scans import scan_counts

_SMALL = 4096
"""Elements of an array up to which it is computed."""
_UNKNOWN = None
Shares = Mapping[int, tuple[float, ...]]


def branch_shares(closed_jaxpr: Any) -> dict[int, tuple[float, ...]]:
    """Of the conditionals of a traced program: by the `id` of their equation the share of each branch.

    Those that depend on data, or on anything large, are left out.

    Args:
        closed_jaxpr: as `jax.make_jaxpr` returns it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from redco_cli.sharding.program.branches import branch_shares
        >>> def layers(x):
        ...     def layer(x, kind):
        ...         return jax.lax.switch(kind, (jnp.sin, jnp.cos), x), None
        ...     return jax.lax.scan(layer, x, jnp.array([0, 0, 0, 1]))[0]
        >>> list(branch_shares(jax.make_jaxpr(layers)(1.0)).values())
        [(0.75, 0.25)]
    """
    taken: dict[int, list[int] | None] = {}
    jaxpr = closed_jaxpr.jaxpr
    if _has_branches(jaxpr):
        _run(jaxpr, closed_jaxpr.consts, [_UNKNOWN] * len(jaxpr.invars), taken)
    return {key: tuple(one / sum(found) for one in found) for key, found in taken.items() if found}


def by_number(closed_jaxpr: Any) -> dict[int, tuple[float, ...]]:
    """The same by the number of branches, where all conditionals with so many agree: as a compiler's text names none.

    Args:
        closed_jaxpr: as `jax.make_jaxpr` returns it.
    """
    known, found = branch_shares(closed_jaxpr), dict[int, set[tuple[float, ...]]]()
    for equation in _conditionals(closed_jaxpr.jaxpr):
        found.setdefault(len(equation.params["branches"]), set()).add(known.get(id(equation), ()))
    return {number: next(iter(some)) for number, some in found.items() if len(some) == 1 and () not in some}


def _run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], taken: dict[int, list[int] | None]) -> list[Any]:
    """The results of a program, as far as they are known; which branches it takes is counted on the way."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values.get(atom)

    for equation in jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _results(equation, given, taken), strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _results(equation: Any, given: list[Any], taken: dict[int, list[int] | None]) -> list[Any]:
    unknown = [_UNKNOWN] * len(equation.outvars)
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return _branch(equation, given, taken)
    usual = usual_branch(equation)
    if usual is not None:
        return [usual]
    if name == "scan":
        return _loop(equation, given, taken) if _has_branches(params["jaxpr"].jaxpr) else unknown
    inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    if inner is not None and name not in ("while", "shard_map", "pallas_call"):
        program, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
        is_small = all(one is not _UNKNOWN for one in given) and _is_small(equation)
        if (is_small or _has_branches(program)) and len(program.invars) == len(given):
            return _run(program, consts, given, taken)
        return unknown
    if inner is not None or any(one is _UNKNOWN for one in given) or not _is_small(equation) or equation.effects:
        return unknown
    found = equation.primitive.bind(*given, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _branch(equation: Any, given: list[Any], taken: dict[int, list[int] | None]) -> list[Any]:
    index, branches = given[0], equation.params["branches"]
    if index is _UNKNOWN:
        taken[id(equation)] = None
        return [_UNKNOWN] * len(equation.outvars)
    counted = taken.setdefault(id(equation), [0] * len(branches))
    chosen = int(np.clip(int(index), 0, len(branches) - 1))
    if counted is not None:
        counted[chosen] += 1
    return _run(branches[chosen].jaxpr, branches[chosen].consts, given[1:], taken)


def _loop(equation: Any, given: list[Any], taken: dict[int, list[int] | None]) -> list[Any]:
    params, body = equation.params, equation.params["jaxpr"]
    first, carried = scan_counts(params)
    consts, carry, along = given[:first], given[first : first + carried], given[first + carried :]
    stacked: list[list[Any]] = []
    turns = range(params["length"])
    for turn in reversed(turns) if params["reverse"] else turns:
        slices = [_UNKNOWN if one is _UNKNOWN else one[turn] for one in along]
        results = _run(body.jaxpr, body.consts, [*consts, *carry, *slices], taken)
        carry = results[:carried]
        stacked.append(results[carried:])
    stacked = stacked[::-1] if params["reverse"] else stacked
    return [*carry, *(_stack(column) for column in zip(*stacked, strict=True))]


def _stack(slices: Sequence[Any]) -> Any:
    return _UNKNOWN if any(one is _UNKNOWN for one in slices) else jnp.stack(slices)


def _is_small(equation: Any) -> bool:
    return all(math.prod(getattr(one.aval, "shape", (_SMALL + 1,))) <= _SMALL for one in equation.outvars)


def _has_branches(jaxpr: Any) -> bool:
    return next(_conditionals(jaxpr), None) is not None


def _conditionals(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            continue  # whose conditionals are within one kernel
        if equation.primitive.name == "cond":
            yield equation
        for part in equation.params.values():
            for inner in part if isinstance(part, tuple) else (part,):
                program = getattr(inner, "jaxpr", inner)
                if hasattr(program, "eqns"):
                    yield from _conditionals(program)
