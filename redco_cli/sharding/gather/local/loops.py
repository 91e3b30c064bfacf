"""Weights that a loop uses in every iteration, as a recurrent network does: their gradients move once for all of it.

The gradient of a weight w that T iterations multiply with their examples is a sum over these. Left to the compiler, or
scattered where each product is, it is added up over the devices in each iteration: T times the bytes. Here a loop adds
up, on every device, what the device's own examples give, and the sum over devices comes after it:

    before the loop    whole = f(gather(w), c)    with f what the loop makes of weights, and of what else is the same in
                                                  all iterations and for all examples: kernels side by side, one masked
    iteration t        parts += x[t]ᵀ·dy[t]       [D·F, ..] over D x F devices of `data` and `fsdp`: nothing moves
    after the loop     scatter(dfᵀ(parts))        once

Parts are added up in float32, and moved in the type of the weight's products, as any other's. What else a loop does
with a weight is done as anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.sharding.gather.fused import is_fused, unmerged
from redco_cli.sharding.gather.repeated import Repeated, Summed, batch_ways
from redco_cli.sharding.gather.rows import moves_rows
from redco_cli.sharding.gather.sharded import Sharded
from redco_cli.sharding.plan import BATCH_AXES
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, INLINED, REMATERIALISED, VIEWS, bind, variables_of
from redco_cli.sharding.scans import scan_counts

ENTERED = INLINED | REMATERIALISED | {"scan"}
"""Primitives whose programs are looked into for what they do with weights."""


def read_by(
    jaxpr: Any, is_weight: Sequence[bool], goes_on: Callable[[Any, Sequence[bool]], bool]
) -> Iterator[tuple[Any, list[bool]]]:
    """The equations of a program, and of those inside it, that read weights, and which of their operands these are.

    Args:
        jaxpr: the program.
        is_weight: for each of its inputs.
        goes_on: whether what an equation makes of them is a weight still.
    """
    weights = {variable for variable, yes in zip(jaxpr.invars, is_weight, strict=True) if yes}
    for equation in jaxpr.eqns:
        given = [not isinstance(atom, core.Literal) and atom in weights for atom in equation.invars]
        if any(given):
            yield equation, given
            weights.update(equation.outvars if goes_on(equation, given) else ())
            for inner in core.jaxprs_in_params(equation.params) if equation.primitive.name in ENTERED else ():
                yield from read_by(inner, given, goes_on)


def repeats(jaxpr: Any, is_weight: Sequence[bool]) -> bool:
    """Whether a program has a loop that uses one of its weights in each iteration.

    Args:
        jaxpr: the program.
        is_weight: for each of its inputs.
    """
    return any(
        one.primitive.name == "scan" and any(given[: scan_counts(one.params)[0]]) and one.params["length"] > 1
        for one, given in read_by(jaxpr, is_weight, lambda equation, _: equation.primitive.name in VIEWS)
    )


def before_loop(params: Any, operands: Sequence[Any], examples: Examples) -> tuple[list[Any], dict[Any, Any]]:
    """Takes out of a loop what it would do with its weights in each iteration.

    Args:
        params: of the loop's equation.
        operands: its own, of which some are a `Sharded`.
        examples: where they are in its program.

    Returns:
        The operands, with a `Repeated` for each weight that all iterations use; and by their variables inside of the
        loop the results of what it makes of weights alone, each a `Repeated` too.
    """
    jaxpr, (count, _) = params["jaxpr"].jaxpr, scan_counts(params)
    given, turns = dict(zip(jaxpr.invars[:count], operands, strict=False)), params["length"]
    tables = {x for x, one in given.items() if _is_looked_up(jaxpr, x, one, turns, examples)}
    weights = {x: one for x, one in given.items() if adds_up(one) and x not in tables}
    if not weights or turns < 2:
        return list(operands), {}
    for equation in jaxpr.eqns:  # cast where they live: it is cheaper to gather in fewer bits
        if equation.primitive.name in VIEWS and variables_of(equation.invars) and equation.invars[0] in weights:
            weights[equation.outvars[0]] = weights[equation.invars[0]].viewed(equation)
    others = dict(zip(jaxpr.constvars, params["jaxpr"].consts, strict=True))
    others |= {x: one for x, one in given.items() if is_array(one)}
    made = _made_of(jaxpr, weights, [x for x in others if x not in examples.dims])
    in_others = {variable for equation in made for variable in variables_of(equation.invars)}
    others = {x: one for x, one in others.items() if x in in_others}
    fused = {x: unmerged(one) for x, one in weights.items() if is_fused(one) and x not in in_others}
    repeated = _repeated(weights | {x: one.value for x, one in fused.items()}, others, made)
    repeated |= {x: replace(one, value=repeated[x]) for x, one in fused.items()}
    return [repeated.get(x, one) for x, one in zip(jaxpr.invars, operands, strict=True)], repeated


def _is_looked_up(jaxpr: Any, x: Any, weight: Any, turns: int, examples: Examples) -> bool:
    """Whether all that a loop does with a weight is to look up rows of examples, fewer in all turns than it has."""
    uses = [one for one in jaxpr.eqns if any(atom is x for atom in one.invars)]
    return bool(uses) and all(moves_rows(one, [weight, *one.invars[1:]], examples, turns) for one in uses)


def adds_up(weight: Any) -> bool:
    """Whether it is a weight whose gradient devices add up, or that they exchange for each use.

    Args:
        weight: any operand.
    """
    if not isinstance(weight, Sharded) or not set(BATCH_AXES) <= set(weight.mesh.shape):
        return False
    is_moved = batch_ways(weight.mesh) > 1 or is_fused(weight)
    return is_moved and weight.divides and bool(jnp.issubdtype(weight.value.dtype, jnp.floating))


def _made_of(jaxpr: Any, weights: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """The equations of a loop that compute something of weights, or what such need of others.

    But for what is larger than these, and no product.
    """
    known, plain, found = set(weights), set(others), []
    shapes = {x.aval.shape for x in known}
    for equation in jaxpr.eqns:
        variables, results = set(variables_of(equation.invars)), equation.outvars
        is_taken = equation.effects or equation.primitive.name in CONTROL_FLOW or not variables <= known | plain
        if is_taken or not results or results[0] in known:
            continue
        if variables <= plain:
            plain.update(results)
            found.append(equation)
        elif all(jnp.issubdtype(one.aval.dtype, jnp.floating) for one in results) and (
            equation.primitive.name == "dot_general"
            or _size(results) <= _size(x for x in variables_of(equation.invars) if x in known)
            or shapes.issuperset(one.aval.shape for one in results)
        ):
            known.update(results)
            found.append(equation)
    return _needed(found, known)


def is_array(x: Any) -> bool:
    """Whether an operand is an array, or is traced as one.

    Args:
        x: any operand.
    """
    return isinstance(x, jax.Array | np.ndarray)


def _needed(equations: Sequence[Any], results: Collection[Any]) -> list[Any]:
    """Those of some equations that compute any of the results, or what these are computed from."""
    wanted, kept = set(results), []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(variables_of(equation.invars))
            kept.append(equation)
    return kept[::-1]


def _size(variables: Iterable[Any]) -> int:
    return sum(one.aval.size for one in variables)


def _repeated(
    weights: Mapping[Any, Sharded], others: Mapping[Any, Any], equations: Sequence[Any]
) -> dict[Any, Repeated]:
    """Weights, and what is made of them, as a loop takes them along; `others` is what else they are made of."""
    made = _of_weights(weights, equations)
    variables, given = [*weights, *made], list(weights.values())

    def from_bases(bases: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
        known = dict(zip(others, beside, strict=True))
        known |= {x: one.seen(base) for (x, one), base in zip(weights.items(), bases, strict=True)}
        for equation in equations:
            operands = [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in equation.invars]
            known.update(zip(equation.outvars, bind(equation, operands), strict=True))
        return [known[x] for x in variables]

    found = repeated_of(given, list(others.values()), from_bases)
    found[: len(given)] = [replace(one, plain=weight) for one, weight in zip(found, given, strict=False)]
    return dict(zip(variables, found, strict=True))


def repeated_of(
    weights: Sequence[Sharded], others: Sequence[Any], from_bases: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
) -> list[Repeated]:
    """What is made of weights, whose products give their gradients to these.

    Args:
        weights: W of them.
        others: arrays that it is made of besides.
        from_bases: from the weights as they are gathered, before their views, and the others, to what is made.
    """
    bases = [replace(one, views=()).array() for one in weights]
    still, beside = jax.lax.stop_gradient((bases, list(others)))
    wholes, parts = from_bases(still, beside), _parts(weights, still, others, from_bases)
    plain = from_bases(bases, others)
    return [
        Repeated(own, Summed((whole, part), weights[0].mesh))
        for own, whole, part in zip(plain, wholes, parts, strict=True)
    ]


def _of_weights(weights: Iterable[Any], equations: Sequence[Any]) -> list[Any]:
    """The results of equations in which weights have a part."""
    known, made = set(weights), []
    for equation in equations:
        if not known.isdisjoint(variables_of(equation.invars)):
            made += equation.outvars
            known.update(equation.outvars)
    return made


def _parts(
    weights: Sequence[Sharded], bases: Sequence[Any], beside: Sequence[Any], from_bases: Callable[..., list[Any]]
) -> Any:
    """Zeros [D * F, ...] for each array made of weights, whose gradients become those of the weights.

    Args:
        weights: W of them.
        bases: each as it is gathered.
        beside: what else they are made of.
        from_bases: of both to the arrays.
    """
    mesh, shapes = weights[0].mesh, jax.eval_shape(from_bases, bases, beside)
    closed = jax.make_jaxpr(lambda bases: from_bases(bases, beside))(bases)

    def zeros(like: Any) -> Any:
        spec = PartitionSpec(BATCH_AXES, *(PartitionSpec.UNCONSTRAINED,) * like.ndim)
        made = jnp.zeros((batch_ways(mesh), *like.shape), jnp.promote_types(like.dtype, jnp.float32))
        return jax.lax.with_sharding_constraint(made, NamedSharding(mesh, spec))

    @jax.custom_vjp
    def run(arrays: list[Any], bases: list[Any], beside: list[Any]) -> list[Any]:
        return [zeros(like) for like in shapes]

    def forward(arrays: Any, bases: Any, beside: Any) -> tuple[list[Any], Any]:
        return [zeros(like) for like in shapes], [[leaf.value for leaf in leaves] for leaves in (bases, beside)]

    def backward(kept: Any, parts: list[Any]) -> tuple[list[Any], None, Any]:
        met = [not isinstance(one, SymbolicZero) for one in parts]
        own = [one if yes else jnp.zeros(one.shape, one.dtype) for one, yes in zip(parts, met, strict=True)]

        def pulled(own: list[Any]) -> Any:
            narrow = [one.astype(like.dtype) for one, like in zip(own, shapes, strict=True)]
            return jax.vjp(from_bases, *kept)[1](narrow)

        of_bases, of_beside = jax.vmap(pulled)(own)
        used = [_reaches(closed.jaxpr, place, met) for place in range(len(weights))]
        found = zip(weights, of_bases, used, strict=True)
        added = [each.sum(0) if jnp.issubdtype(each.dtype, jnp.inexact) else None for each in of_beside]
        return [weight.cotangent(each) if yes else None for weight, each, yes in found], None, added

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run([weight.arrays for weight in weights], list(bases), list(beside))


def _reaches(jaxpr: Any, place: int, met: Sequence[bool]) -> bool:
    """Whether one input of a program has a part in one of those of its results."""
    found = {jaxpr.invars[place]}
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, core.Literal) and atom in found for atom in equation.invars):
            found.update(equation.outvars)
    return any(yes and x in found for x, yes in zip(jaxpr.outvars, met, strict=True))
