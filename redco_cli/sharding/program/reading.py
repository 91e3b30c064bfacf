"""From a function to its logical axes: the part of a derivation that does not depend on the mesh."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from redco_cli.sharding.axes import Axis, Dim, factors, fresh_dims
from redco_cli.sharding.gradients import without_gradient
from redco_cli.sharding.ownership import owners
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.program import marks, matrices, primitives  # noqa: F401  rules register themselves
from redco_cli.sharding.program.branches import branch_shares
from redco_cli.sharding.program.events import Matmul, PossibleCollective, RowLookup, Use, Value, as_moved
from redco_cli.sharding.program.rows.first import rows_first
from redco_cli.sharding.program.rows.lookups import casts
from redco_cli.sharding.program.rules import control_flow, indexing, shard_map  # noqa: F401  as those above
from redco_cli.sharding.program.walk import Walk

_Event = TypeVar("_Event", Matmul, RowLookup, Use)

FEWER = 4
"""So many times fewer experts than features does a router make at least."""


class Traced(NamedTuple):
    """What was read.

    Attributes:
        closed: the program, as `jax.make_jaxpr` returns it.
        params: see `read`.
        batch: see `read`.
        others: see `read`.
    """

    closed: Any
    params: Any
    batch: Any
    others: Any = ()


@dataclass(frozen=True)
class Reading:
    """A program whose logical axes are known.

    Attributes:
        treedef: of the parameters.
        parameters: its leaves.
        batch_dims: the factors of the examples: of the leading dim of every array in the batch.
        input_axes: all axes that arrays of the batch have.
        within_heads: axes that must not be split: within a head.
        collectives: what would have to move if an axis were split.
        arrays: axes of each array of two dims or more, factors in order.
        heads: axes that attention keeps apart.
        matmuls: for the path of a weight, what it is multiplied with.
        uses: for the path of a parameter, the products that it is in.
        weight_axes: axes of everything that is multiplied with an activation.
        produced: axes of activations that a weight brings: by a matmul, or by looking up its rows.
        by_hand: those of them that a `shard_map` splits weights by.
        output_axes: axes that are produced and that no weight sums over again, such as the vocabulary of logits.
        lookup_axes: axes that rows of weights are looked up by: vocabularies, positions.
        rows: for the path of a table, what is looked up in it for examples.
        experts: axes that weights and activations share without a sum over them.
        routes: axes of scores of a few experts, of which the best are picked.
        unknown: what the walk did not understand.
        without_gradient: paths of parameters that the results do not depend on but through a `stop_gradient`, say.
        cuts: dims that are taken apart in pieces of sizes that differ, and where some of them end.
        joined: dims that are joined, and where what they are joined of ends.
        traced: what was read.
        kept: for parameters that are not kept as the program sees them, a plan for what it sees to one for what is
            kept.
        memo: what was made of it so far, for those who make it.
    """

    treedef: Any
    parameters: tuple[Parameter, ...]
    batch_dims: tuple[Dim, ...]
    input_axes: frozenset[Axis]
    within_heads: frozenset[Axis]
    collectives: tuple[PossibleCollective, ...]
    arrays: frozenset[frozenset[Axis]]
    heads: frozenset[Axis]
    matmuls: Mapping[str, tuple[Matmul, ...]]
    uses: Mapping[str, tuple[Use, ...]]
    weight_axes: frozenset[Axis]
    produced: frozenset[Axis]
    by_hand: frozenset[Axis]
    output_axes: frozenset[Axis]
    lookup_axes: frozenset[Axis]
    rows: Mapping[str, tuple[RowLookup, ...]]
    experts: frozenset[Axis]
    routes: frozenset[Axis]
    unknown: tuple[tuple[str, int], ...]
    without_gradient: frozenset[str]
    cuts: Mapping[Dim, frozenset[int]]
    joined: Mapping[Dim, frozenset[int]]
    traced: Traced
    kept: Callable[[Any], Any] | None = None
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def batch_axes(self) -> frozenset[Axis]:
        """Axes of the examples."""
        return frozenset(axis for dim in self.batch_dims for axis in dim)

    def bytes_where_used(self, parameter: Parameter) -> int:
        """Of a whole parameter as products take it: it is cast before it is gathered, and so is its gradient."""
        own = int(parameter.dtype.itemsize)
        used = max((one.itemsize for one in self.uses.get(parameter.path, ())), default=own)
        return parameter.bytes // own * min(own, used)

    def is_recomputed(self, parameter: Parameter) -> bool:
        """Whether the backward pass gathers it once more, as it computes once more what it is used in."""
        return any(one.recomputed for one in self.uses.get(parameter.path, ()))

    def split_batch(self, ways: int) -> dict[Axis, int]:
        """Into how many parts each axis of the examples is split where the batch is split into `ways`, major first."""
        found: dict[Axis, int] = {}
        for dim in filter(None, self.batch_dims):
            left = ways
            for axis in dim:
                found[axis] = math.gcd(axis.size, left)
                left //= found[axis]
            found[dim[0]] *= left  # what does not divide is padded
        return found


def read(loss_fn: Callable[..., Any], params: Any, batch: Any, *others: Any) -> Reading:
    """Traces a function and finds the logical axes of its parameters.

    Args:
        loss_fn: `loss_fn(params, batch, *others)`; any function that JAX can trace.
        params: a tree of arrays or `jax.ShapeDtypeStruct`s.
        batch: the same; the leading dim of every array counts examples.
        others: further arrays, neither trained nor examples. Those that belong to a parameter, as `follow` tells it,
            have its axes: they are to be split as it is.
    """
    closed = rows_first(jax.make_jaxpr(loss_fn)(params, batch, *others), len(jax.tree.leaves(params)))
    return read_traced(Traced(closed, params, batch, others))


def parameters_only(params: Any) -> Reading:
    """The parameters without a program, each dim an axis of its own: enough where nothing is split but the batch."""
    return read_traced(Traced(jax.make_jaxpr(lambda _: ())(params), params, ()))


def read_traced(traced: Traced) -> Reading:
    """The logical axes of a program that was traced already."""
    closed, params, batch, others = traced
    leaves, treedef = jax.tree.flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    still = without_gradient(closed.jaxpr)
    walk = Walk(casts(closed), branch_shares(closed), still)
    arguments = [
        Value(fresh_dims(leaf.shape), requires_grad=True, from_batch=False, path=path, origin=path)
        for path, (_, leaf) in zip(paths, leaves, strict=True)
    ]
    arguments += [
        Value(fresh_dims(leaf.shape), requires_grad=False, from_batch=True) for leaf in jax.tree.leaves(batch)
    ]
    given = arguments[len(leaves) :]
    arguments += _followers(others, params, arguments)
    walk.closed(closed, arguments)
    parameters = tuple(
        Parameter(path, tuple(leaf.shape), leaf.dtype, tuple(factors(dim) for dim in value.dims))
        for path, (_, leaf), value in zip(paths, leaves, arguments, strict=False)
    )
    owned = frozenset(axis for parameter in parameters for dim in parameter.dims for axis in dim)
    made = _axes(dim for matmul in walk.matmuls for dim in matmul.produced)
    batch_dims = tuple(dict.fromkeys(factors(x.dims[0]) for x in given if x.dims))
    input_axes = _axes(dim for x in given for dim in x.dims)
    heads, compared = _attention(walk, owned, _tokens(given, jax.tree.leaves(batch)), input_axes)
    return Reading(
        treedef,
        parameters,
        batch_dims,
        input_axes,
        _within_heads(parameters, heads, compared),
        tuple(as_moved(walk.collectives, walk.moved_as, walk.partial, walk.factors, _axes(batch_dims))),
        frozenset(_axes(dims) for dims in (*walk.arrays, *(parameter.dims for parameter in parameters))),
        frozenset(heads),
        _by_path(walk.matmuls),
        _by_path(walk.uses),
        _axes(dim for matmul in walk.matmuls for dim in matmul.weight),
        made | _axes((*walk.by_hand, *walk.fast)),
        _axes(walk.by_hand),
        (made - _axes(dim for matmul in walk.matmuls for dim in matmul.contracted)) & owned - compared - heads,
        _axes(walk.lookups) & owned,
        _by_path(walk.rows),
        _axes(walk.batched) & owned,
        _routes(walk) & owned,
        tuple(sorted(walk.unknown.items())),
        frozenset(path for path, variable in zip(paths, closed.jaxpr.invars, strict=False) if variable in still),
        _by_dim(walk.cuts),
        _by_dim(walk.joined.items()),
        traced,
    )


def _followers(others: Any, params: Any, known: Sequence[Value]) -> list[Value]:
    """Arrays that are neither trained nor examples: what belongs to a parameter has its axes."""
    found = []
    for leaf, owner in zip(jax.tree.leaves(others), owners(others, params), strict=True):
        dims = fresh_dims(leaf.shape)
        if owner is not None:
            own = known[owner.parameter].dims
            dims = tuple(new if dim is None else own[dim] for new, dim in zip(dims, owner.dims, strict=True))
        found.append(Value(dims, requires_grad=False, from_batch=False))
    return found


def _routes(walk: Walk) -> frozenset[Axis]:
    """What routers make: of classes, which are picked from too, there are not so few beside what they are made from."""
    ranked = _axes(walk.ranked)
    made = [
        (axes, math.prod(axis.size for dim in matmul.contracted for axis in factors(dim)))
        for matmul in walk.matmuls
        if len(matmul.produced) == 1 and ranked.issuperset(axes := factors(matmul.produced[0]))
    ]
    return _axes(axes for axes, features in made if FEWER * math.prod(axis.size for axis in axes) <= features)


def _by_path(events: Sequence[_Event]) -> dict[str, tuple[_Event, ...]]:
    found: dict[str, list[_Event]] = defaultdict(list)
    for event in events:
        found[event.path].append(event)
    return {name: tuple(same) for name, same in found.items()}


def _by_dim(cuts: Iterable[tuple[Dim, tuple[int, ...]]]) -> dict[Dim, frozenset[int]]:
    found: dict[Dim, frozenset[int]] = {}
    for dim, ends in cuts:
        found[factors(dim)] = found.get(factors(dim), frozenset()).union(ends)
    return found


def _axes(dims: Any) -> frozenset[Axis]:
    return frozenset(axis for dim in dims for axis in factors(dim))


def _tokens(given: Sequence[Value], batch: Sequence[Any]) -> frozenset[Axis]:
    """Axes along which a batch has examples, tokens or places: all but the features of numbers that are no ids."""
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) and len(leaf.shape) > 1 for leaf in batch]
    return _axes(dim for x, features in zip(given, floats, strict=True) for dim in x.dims[: -1 if features else None])


def _attention(
    walk: Walk, owned: frozenset[Axis], tokens: frozenset[Axis], given: frozenset[Axis]
) -> tuple[set[Axis], set[Axis]]:
    """Axes of heads, and axes that queries and keys are compared by.

    Both are told by the products of two activations: tokens with tokens (scores), or a sum within what both keep apart
    (linear attention).
    """
    heads: set[Axis] = set()
    compared: set[Axis] = set()
    for product in walk.activation_products:
        contracted, batch = _axes(product.contracted) & owned, _axes(product.batch) & owned
        first, second = (_axes(free) for free in product.free)
        same = first & second
        scores = bool(same) or all(free - owned - given or free & tokens for free in (first, second))
        if scores or (contracted and batch - contracted):
            compared |= contracted - batch
            heads |= (batch | ((first | second) & owned if scores else frozenset())) - contracted - same
    return heads - given, compared - heads - given


def _within_heads(parameters: Sequence[Parameter], heads: set[Axis], compared: set[Axis]) -> frozenset[Axis]:
    """Axes within a head: what heads are compared by, and what follows the heads in a weight."""
    found = set(compared)
    for parameter in parameters:
        dims = [dim for dim, layer in zip(parameter.dims, parameter.layers(), strict=True) if not layer]
        for first, second in itertools.pairwise(dims):
            if len(first) == 1 and first[0] in heads:  # [heads, head_dim]
                found.update(second[:1])
        for dim in dims:
            places = [i for i, axis in enumerate(dim) if axis in heads]
            if places:  # [kv · group · head_dim]
                found.update(dim[places[-1] + 1 :])
    return frozenset(found - heads)
