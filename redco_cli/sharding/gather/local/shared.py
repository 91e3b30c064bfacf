"""Weights that a program uses several times: replicas add up the parts of their gradients once for all uses.

A table that is the head, too, has the gradient of the rows that are looked up, and that of a product. Left to the
compiler each is added up over `data` by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.gather.replicas import summed_once
from redco_cli.sharding.gather.sharded import SMALL, Apart
from redco_cli.sharding.program.rewrite import INLINED, REMATERIALISED, VIEWS

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def summed_for_all(weight: Any, spec: PartitionSpec, mesh: Mesh, used: Sequence[Any]) -> Any:
    """A weight; one that is used in several places so that replicas add up the parts of its gradient once for all.

    Args:
        weight: the array, or an `Apart`.
        spec: the mesh axes of its dims.
        mesh: the devices.
        used: see `uses`.
    """
    if len(used) < 2 or isinstance(weight, Apart):
        return weight
    return summed_once(weight, spec, mesh, _widest(used) or weight.dtype)


def _widest(types: Sequence[Any]) -> Any:
    """The widest of some types that sums are moved in; None where there is none."""
    wide = [one for one in types if one is not None and jnp.issubdtype(one, jnp.floating) and one.itemsize > 1]
    return max(wide, key=lambda one: one.itemsize, default=None)


def are_shared(used: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether one of some weights is used in several places, and is no small one.

    Args:
        used: see `uses`.
    """
    return any(len(types) > 1 and x.aval.size * x.aval.dtype.itemsize >= SMALL for x, types in used.items())


def uses(jaxpr: Any, is_weight: Sequence[bool], casts: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """The types in which products use weights, once for each place that uses these, seen in another way perhaps.

    None for a use that is no product, or a lookup of rows in the weight's own type; a loop is one use.

    Args:
        jaxpr: the program.
        is_weight: for each of its inputs.
        casts: in what other precision rows are used that it looks up.
    """
    found: dict[Any, list[Any]] = defaultdict(list)
    known = {x: x for x, yes in zip(jaxpr.invars, is_weight, strict=True) if yes}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        read = {place: x for place, x in enumerate(equation.invars) if not isinstance(x, core.Literal) and x in known}
        if not read:
            continue
        if name in VIEWS:
            known[equation.outvars[0]] = known[equation.invars[0]]
        elif name in INLINED | REMATERIALISED | {"scan"}:
            (inner,) = core.jaxprs_in_params(equation.params)
            within = uses(inner, [place in read for place in range(len(inner.invars))], casts)
            for place, x in read.items():
                types = within.get(inner.invars[place], [])
                found[known[x]] += [_widest(types)] if name == "scan" else types
        else:
            for x in read.values():
                used = x.aval.dtype if name in _PRODUCTS else None
                found[known[x]].append(casts.get(equation.outvars[0]) if name == "gather" else used)
    return found
