"""What is done with a weight where it lives, and gathers nothing of it.

A weight that is taken apart is gathered in pieces, each where it is used. Sums of what is computed from each of its
entries, as weight decay in a loss is, are those of the devices' parts. What is made of weights entry by entry, by
setting some, or by putting them together, is a weight that lives as they do, and is gathered in their place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding

from redco_cli.sharding.gather.replicas import summed_once
from redco_cli.sharding.gather.sharded import Sharded, part_spec
from redco_cli.sharding.plan import DATA, Usage, as_dims, as_spec
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.primitives import OF_EACH_ENTRY
from redco_cli.sharding.program.rewrite import INLINED, REMATERIALISED, VIEWS, bind, variables_of
from redco_cli.sharding.scans import scan_counts

_SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_OF_EACH = OF_EACH_ENTRY | {"stop_gradient", "scatter", "scatter-add"}


def taken_apart(equation: Any, weight: Any) -> list[Sharded] | None:
    """The pieces of a weight; None where an equation does something else.

    Args:
        equation: any.
        weight: its first operand.
    """
    if equation.primitive.name != "split" or not isinstance(weight, Sharded) or weight.views:
        return None
    cut, params, ndim = weight.usage.cut, equation.params, weight.value.ndim
    if cut is None or (params["axis"], tuple(params["sizes"])) != (cut.dim, cut.sizes):
        return None

    def where_it_lives(x: Any) -> Any:
        """Told of each piece; else XLA moves the whole to where pieces are used, and the pieces once more."""
        spec = weight.spec if x.ndim == ndim else part_spec(weight.spec, ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(weight.mesh, spec))

    leaves, tree = jax.tree.flatten(weight.arrays)
    pieces = zip(*(map(where_it_lives, jax.lax.split(leaf, cut.sizes, cut.dim)) for leaf in leaves), strict=True)
    return [
        Sharded(jax.tree.unflatten(tree, own), weight.spec, gathered, weight.mesh, usage, is_cast=weight.is_cast)
        for own, (gathered, usage) in zip(pieces, weight.usage.pieces, strict=True)
    ]


@dataclass(frozen=True)
class InPlace:
    """What a program computes of weights that can be computed where they live. Variables, also of programs inside it.

    Attributes:
        examples: where they are in the program.
        summed: of which nothing but sums is used.
        made: that are used as weights are, and gathered in their place.
        sources: weights of which one other is made, and that are used in no other way.
    """

    examples: Examples
    summed: set[Any] = field(default_factory=set)
    made: set[Any] = field(default_factory=set)
    sources: set[Any] = field(default_factory=set)


def computed_in_place(jaxpr: Any, is_weight: Sequence[bool], examples: Examples) -> InPlace:
    """Looks for it.

    Args:
        jaxpr: the program.
        is_weight: for each of its inputs.
        examples: where they are in it: what is computed of them is no weight.
    """
    found = InPlace(examples)
    _look(jaxpr, is_weight, found)
    return found


def _look(jaxpr: Any, is_weight: Sequence[bool], found: InPlace) -> Collection[Any]:
    """Adds what is found; the variables of which more than sums is used."""
    sources = {x: frozenset({x}) for x, yes in zip(jaxpr.invars, is_weight, strict=True) if yes}
    computed: list[Any] = []
    casts = set(sources)
    used = Counter(variables_of(jaxpr.outvars))
    for equation in jaxpr.eqns:
        name, variables = equation.primitive.name, variables_of(equation.invars)
        if sources.keys().isdisjoint(variables) or not equation.outvars:
            continue
        if _is_of_weights(equation, sources, found.examples):
            sources[equation.outvars[0]] = frozenset().union(*(sources[x] for x in variables if x in sources))
            computed.append(equation)
            casts.update(equation.outvars if name in VIEWS and casts.issuperset(variables) else ())
        elif name in INLINED | REMATERIALISED | {"scan"}:
            used.update(_used_inside(equation, sources, found))
        elif name not in _SUMS:
            used.update(variables)
    leads = set(used)
    for equation in reversed(computed):
        if equation.outvars[0] in leads:
            leads.update(variables_of(equation.invars))
        else:
            found.summed.add(equation.outvars[0])
    connected = _connected([sources[one.outvars[0]] for one in computed if one.outvars[0] in leads])
    members: defaultdict[frozenset[Any], list[Any]] = defaultdict(list)
    for x, its in sources.items():
        members[connected.get(next(iter(its)), its)].append(x)
    for group in dict.fromkeys(connected.values()):
        mine = [x for x in members[group] if sources[x] <= group]
        before = sum(_bytes(x) for x in group if x in leads)
        if sum(_bytes(x) for x in mine if x in used) <= before:
            found.made.update(x for x in mine if x in leads and x not in group)
            are_made = [x not in casts for x in mine if x in used]
            found.sources.update(group if are_made == [True] else ())
    return leads


def _used_inside(equation: Any, weights: Collection[Any], found: InPlace) -> list[Any]:
    """What an equation is given of which a program inside it uses more than sums."""
    given = [not isinstance(x, core.Literal) and x in weights for x in equation.invars]
    if equation.primitive.name == "scan":
        first, carried = scan_counts(equation.params)
        given[first : first + carried] = [False] * carried
    (inner,) = core.jaxprs_in_params(equation.params)
    used = _look(inner, given, found)
    pairs = zip(equation.invars, inner.invars, strict=True)
    return [x for x, its in pairs if not isinstance(x, core.Literal) and (its in used or x not in weights)]


def _is_of_weights(equation: Any, weights: Collection[Any], examples: Examples) -> bool:
    """Whether its one result has an entry for each entry of weights, and is of no examples."""
    name, variables, result = equation.primitive.name, variables_of(equation.invars), equation.outvars[0].aval
    if name in ("concatenate", "stack"):
        return all(x in weights for x in equation.invars)
    if name not in _OF_EACH or not jnp.issubdtype(result.dtype, jnp.inexact):
        return False
    return all(x.aval.shape == result.shape if x in weights else x not in examples.dims for x in variables)


def _connected(sets: Sequence[frozenset[Any]]) -> dict[Any, frozenset[Any]]:
    """For each of their members the union of all sets that have something in common, directly or by others."""
    found: dict[Any, frozenset[Any]] = {}
    for one in sets:
        union = one.union(*(found[x] for x in one if x in found))
        if any(found.get(x) != union for x in one):
            found.update(dict.fromkeys(union, union))
    return found


def _bytes(x: Any) -> int:
    return int(x.aval.size * x.aval.dtype.itemsize)


def done_in_place(equation: Any, operands: Sequence[Any], where: InPlace) -> list[Any] | None:
    """The results of an equation that needs no whole weight; None where it does, or has none.

    Args:
        equation: any.
        operands: its own, of which some may be a `Sharded`.
        where: see `computed_in_place`.
    """
    if _is_inner_product(equation, operands):
        one, other = (in_place(x).astype(equation.outvars[0].aval.dtype) for x in operands)
        return [(one * other).sum()]
    sums = equation.primitive.name in _SUMS and isinstance(operands[0], Sharded) and not operands[0].views
    result = equation.outvars[0] if equation.outvars else None
    reduced = _reduced(equation, operands[0]) if sums else None
    if reduced is not None:
        return [reduced]
    if sums or (result in where.summed and not _is_joined_along_shards(equation, operands)):
        return list(bind(equation, [x.seen(in_place(x)) if isinstance(x, Sharded) else x for x in operands]))
    made = _made(equation, operands) if result in where.made else None
    if made is not None and result in made.several:
        made = made.told()
        made = replace(made, arrays=summed_once(made.value, made.spec, made.mesh, made.value.dtype))
    return None if made is None else [made]


def _made(equation: Any, operands: Sequence[Any]) -> Sharded | None:
    """What an equation makes of weights that live and are used alike, as another weight; None where they are not."""
    weights = [x for x in operands if isinstance(x, Sharded)]
    places = {(x.spec, x.gathered, x.usage) for x in weights}
    if len(places) != 1 or any(x.is_apart or x.views or not x.divides for x in weights):
        return None
    first, ndim = weights[0], weights[0].value.ndim
    if first.spec == first.gathered and first.mesh.shape.get(DATA, 1) == 1:
        return None
    lives, used = (list(as_dims(spec, ndim)) for spec in (first.spec, first.gathered))
    if equation.primitive.name in ("concatenate", "stack"):
        if first.usage != Usage():
            return None
        if equation.primitive.name == "stack":
            lives.insert(equation.params["axis"], ())
            used.insert(equation.params["axis"], ())
        elif _is_joined_along_shards(equation, operands):
            return None
    spec, gathered = as_spec(tuple(lives)), as_spec(tuple(used))
    (array,) = bind(equation, [x.value if isinstance(x, Sharded) else x for x in operands])
    array = jax.lax.with_sharding_constraint(array, NamedSharding(first.mesh, spec))
    return Sharded(array, spec, gathered, first.mesh, first.usage, is_cast=True, several=first.several)


def _reduced(equation: Any, weight: Sharded) -> Sharded | None:
    """A matrix that is left of a weight, as another one, where each device reduces the part that it has."""
    axes, ndim = equation.params["axes"], weight.value.ndim
    lives, used = (as_dims(spec, ndim) for spec in (weight.spec, weight.gathered))
    is_alone = weight.usage == Usage() and weight.divides and not weight.is_apart and weight.spec != weight.gathered
    if not is_alone or ndim - len(axes) < 2 or any(lives[dim] or used[dim] for dim in axes):
        return None
    spec, gathered = (as_spec(tuple(one for dim, one in enumerate(dims) if dim not in axes)) for dims in (lives, used))
    (array,) = bind(equation, [weight.value])
    array = jax.lax.with_sharding_constraint(array, NamedSharding(weight.mesh, spec))
    return Sharded(array, spec, gathered, weight.mesh, is_cast=True, several=weight.several)


def _is_joined_along_shards(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether it puts weights together along a dim of which devices have parts."""
    if equation.primitive.name != "concatenate":
        return False
    dim, weights = equation.params["dimension"], [x for x in operands if isinstance(x, Sharded)]
    return any(x.views or as_dims(spec, x.value.ndim)[dim] for x in weights for spec in (x.spec, x.gathered))


def in_place(weight: Sharded) -> Any:
    """The array of a weight where it lives, before its views; its gradient is added up there, too."""
    if not jnp.issubdtype(weight.value.dtype, jnp.floating):
        return weight.value

    def value(arrays: Any) -> Any:
        return weight.having(arrays).value

    def backward(_: None, gradient: Any) -> tuple[Any]:
        gradient = jax.lax.with_sharding_constraint(gradient, NamedSharding(weight.mesh, weight.spec))
        return (weight.with_sum(gradient),)

    take = jax.custom_vjp(value)
    take.defvjp(lambda arrays: (value(arrays), None), backward)
    return take(weight.arrays)


def _is_inner_product(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether it sums over the products of all entries of two weights of one form."""
    if equation.primitive.name != "dot_general" or not all(isinstance(x, Sharded) for x in operands):
        return False
    contracted, (batched, _) = equation.params["dimension_numbers"]
    in_order = tuple(range(equation.invars[0].aval.ndim))
    views = {tuple(view.primitive.name for view in x.views) for x in operands}
    is_flat = views in ({()}, {("reshape",)})
    same = operands[0].value.shape == operands[1].value.shape
    return same and is_flat and not batched and all(tuple(dims) == in_order for dims in contracted)
