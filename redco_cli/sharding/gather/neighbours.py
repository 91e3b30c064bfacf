"""Examples that take rows of one another, as nodes of a graph do: nodes are gathered, and not what all edges took.

The nodes [N, ..] of a graph are split over `data` and `fsdp`, and so are its edges [E, ..], each of which takes rows of
two nodes. XLA (with JAX 0.10) gathers the nodes where they are fewer numbers, each device looks up for its own edges,
and what edges add to nodes is added up on each device first. But where `tensor` splits neither, it has the devices of
`tensor` share the lookups, and moves the rows of all edges between them. Here it is told to gather the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.sharding.gather.repeated import batch_ways
from redco_cli.sharding.plan import TENSOR
from redco_cli.sharding.program.examples import Examples
from redco_cli.sharding.program.rewrite import bind
from redco_cli.sharding.program.rows.lookups import neighbours


def has_neighbours(jaxpr: Any) -> bool:
    """Whether any equation of a program, or of the programs inside it, may be one of those."""
    inside = (inner for equation in jaxpr.eqns for inner in core.jaxprs_in_params(equation.params))
    return any(map(neighbours, jaxpr.eqns)) or any(map(has_neighbours, inside))


def are_neighbours(equation: Any, examples: Examples, mesh: Mesh) -> bool:
    """Whether examples take rows of one another in an equation, on a mesh that splits them, and has `tensor`.

    Args:
        equation: any.
        examples: where they are in its program.
        mesh: the devices.
    """
    is_split = batch_ways(mesh) > 1 and mesh.shape.get(TENSOR, 1) > 1
    found = neighbours(equation) if is_split else None
    return found is not None and examples.lead(found[0] if equation.primitive.name == "gather" else found[1])


def of_neighbours(equation: Any, operands: Sequence[Any], mesh: Mesh) -> Any:
    """The result of an equation whose operands `are_neighbours`."""
    nodes, *others = operands
    if equation.primitive.name == "gather":
        return bind(equation, [_whole(nodes, mesh), *others])[0]
    return _whole(bind(equation, operands)[0], mesh)


def _whole(nodes: Any, mesh: Mesh) -> Any:
    """Nodes that every device of `data` and `fsdp` has all of, and so their gradient."""
    others = [PartitionSpec.UNCONSTRAINED] * (nodes.ndim - 1)
    return jax.lax.with_sharding_constraint(nodes, NamedSharding(mesh, PartitionSpec(None, *others)))
