"""Gathers parameters right where a program uses them, and scatters their gradients.

A parameter p lives in shards over `fsdp`. Used as it is, a matmul x·p would move activations. With

    forward     y = x · gather(p)          gather: from `spec` to `gathered`, an all-gather over fsdp
    backward    dp = scatter(xᵀ · dy)      scatter: back to `spec`, a reduce-scatter over fsdp

it moves the parameter once each way, and no device ever holds more gathered parameters than the compiler needs at a
time. Layers that are stacked and scanned are gathered one by one, inside the loop. This is fully sharded data
parallelism (ZeRO stage 3, arXiv 1910.02054) said in constraints on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from redco_cli.sharding.gather import unpartitioned
from redco_cli.sharding.gather.conditionals import is_rematerialised, rematerialised_switch
from redco_cli.sharding.gather.copies import Copies
from redco_cli.sharding.gather.fused import Unmerged, is_fused, on_unmerged, unmerged
from redco_cli.sharding.gather.in_place import InPlace, computed_in_place, done_in_place, taken_apart
from redco_cli.sharding.gather.local.composed import Composed, composed, composes, outside_of_loop
from redco_cli.sharding.gather.local.loops import before_loop, repeats
from redco_cli.sharding.gather.local.shared import are_shared, summed_for_all, uses
from redco_cli.sharding.gather.neighbours import are_neighbours, has_neighbours, of_neighbours
from redco_cli.sharding.gather.repeated import Repeated, is_of_each_example, is_view, of_each_example
from redco_cli.sharding.gather.replicas import added_up_first, is_product, is_spread, product, spread
from redco_cli.sharding.gather.rows import looked_up, looked_up_by_all, moves_rows
from redco_cli.sharding.gather.sharded import Apart, Sharded
from redco_cli.sharding.pieces.rules import in_pieces
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, Usage, as_dims, as_spec
from redco_cli.sharding.program.channels import cut_channels
from redco_cli.sharding.program.examples import Examples, find_examples
from redco_cli.sharding.program.marks import GRADIENT_FIRST
from redco_cli.sharding.program.rewrite import (
    CONTROL_FLOW,
    VIEWS,
    bind,
    conditional,
    loop,
    made_once,
    rewritten,
    used_severally,
)
from redco_cli.sharding.program.rows.first import rows_first
from redco_cli.sharding.program.rows.lookups import casts


@dataclass(frozen=True)
class _Gathering:
    """How parameters are gathered.

    Attributes:
        mesh: the devices.
        reshard_after_forward: once for the forward pass, and once more for the backward pass.
        examples: where they are in the program.
        casts: in what other precision rows are used that it looks up.
        in_place: what is computed of weights where they live.
        features: what is split over `tensor`.
        copies: of arrays that parameters multiply.
        channels: results of convolutions that are taken apart, and used for nothing else.
    """

    mesh: Mesh
    reshard_after_forward: bool
    examples: Examples
    casts: Mapping[Any, Any]
    in_place: InPlace
    features: unpartitioned.Features
    copies: Copies
    channels: frozenset[Any]
    enters: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset({GRADIENT_FIRST})
    everywhere: bool = False

    def is_tracked(self, operand: Any) -> bool:
        """Whether it is a parameter in shards."""
        return _is_weight(operand)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation on whole parameters; a name is none."""
        if equation.params.get("name") in self.calls:
            return added_up_first(*operands)
        if equation.primitive.name == "scan" and any(map(self.is_tracked, operands)):
            operands, made = before_loop(equation.params, outside_of_loop(equation.params, operands), self.examples)
            return loop(equation.params, operands, self, made)
        own = composed(equation, operands, self.examples)
        if own is not None:
            return [own]
        if any(isinstance(x, Composed) for x in operands):
            return self._on_composed(equation, operands)
        if any(isinstance(x, Unmerged) for x in operands):
            return self._on_unmerged(equation, operands)
        if any(isinstance(x, Repeated) for x in operands):
            return self._in_a_loop(equation, operands)
        if equation.primitive.name == "name" and isinstance(operands[0], Sharded):
            return [operands[0].viewed(equation)]
        part = operands[0].part(equation) if operands and isinstance(operands[0], Sharded) else None
        if part is not None:
            return [part]
        pieces = taken_apart(equation, operands[0]) if operands else None
        if pieces is not None:
            return pieces
        if equation.primitive.name == "cond" and any(map(self.is_tracked, operands)):
            switch = rematerialised_switch if is_rematerialised(equation) else jax.lax.switch
            return conditional(equation.params, operands, self, switch)
        if moves_rows(equation, operands, self.examples):
            rows = equation.outvars[0]
            return [looked_up(equation, operands[0], operands[1], self.casts.get(rows, rows.aval.dtype))]
        done = done_in_place(equation, operands, self.in_place)
        done = done or looked_up_by_all(equation, operands, self.examples)
        if done is not None:
            return done
        own = composed(equation, operands, self.examples, whole=True)
        if own is not None:
            return [own]
        if equation.primitive.name in VIEWS and self.copies.are_shared(operands[0]):
            return [self.copies.viewed(equation, operands[0])]
        operands = unpartitioned.whole_where_cut(equation, operands, self.mesh, self.features)
        operands = self.copies.as_products_see(equation, operands)
        moves = self.reshard_after_forward and any(isinstance(x, Sharded) and x.spec != x.gathered for x in operands)
        return _again(partial(self._on_whole, equation), operands) if moves else self._on_whole(equation, operands)

    def _on_composed(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation on weights that are made of others: each device makes them for it."""

        def run(operands: Sequence[Any]) -> Sequence[Any]:
            return self.use(equation, [x.repeated if isinstance(x, Composed) else x for x in operands])

        def arrays(operands: Sequence[Any]) -> Sequence[Any]:
            return [x.array() if self.is_tracked(x) else x for x in run(operands)]

        gathers_again = self.reshard_after_forward and equation.primitive.name not in CONTROL_FLOW
        return _again(arrays, operands) if gathers_again else run(operands)

    def _in_a_loop(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        summed = [x.summed if isinstance(x, Repeated) else x for x in operands]
        if is_product(equation, summed, self.examples):
            operands = self.copies.as_products_see(equation, operands)
            summed = [x.summed if isinstance(x, Repeated) else x for x in operands]
            return self.copies.summed(equation, operands, [product(equation, summed, self.copies.cut)])
        if is_of_each_example(equation, summed):
            return [of_each_example(equation, summed)]
        if is_view(equation):
            return [operands[0].viewed(equation)]
        return self.use(equation, [x.plain if isinstance(x, Repeated) else x for x in operands])

    def _on_unmerged(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation on an array whose projections are apart: as such where it can be, else on the array as it was."""

        def apply(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
            in_a_loop = any(isinstance(x, Repeated) for x in values)
            return self._in_a_loop(equation, values) if in_a_loop else self._on_whole(equation, values)

        results = on_unmerged(equation, self.copies.as_products_see(equation, operands), apply)
        return results or self.use(equation, [x.array() if isinstance(x, Unmerged) else x for x in operands])

    def _on_whole(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if any(map(is_fused, operands)) and (
            equation.primitive.name == "dot_general" or equation.outvars[0] in self.channels
        ):
            return self._on_unmerged(equation, [unmerged(x) if is_fused(x) else x for x in operands])
        if is_product(equation, operands, self.examples):
            return self.copies.summed(equation, operands, [product(equation, operands)])
        if is_spread(equation, operands, self.examples):
            return [spread(equation, operands)]
        if are_neighbours(equation, self.examples, self.mesh):
            return [of_neighbours(equation, [_whole(x) for x in operands], self.mesh)]
        if unpartitioned.is_grouped(equation, self.mesh):
            return [unpartitioned.grouped(equation, operands[0], operands[1], self.mesh)]
        if equation.primitive.name == "fft":
            return [unpartitioned.transformed(equation, _whole(operands[0]), self.mesh, self.examples, self.features)]
        return self.copies.summed(equation, operands, list(bind(equation, [_whole(x) for x in operands])))


def gathering(
    function: Callable[..., Any],
    specs: Any,
    gathered: Any,
    mesh: Mesh,
    *,
    usage: Any = None,
    reshard_after_forward: bool = False,
) -> Callable[..., Any]:
    """The same function of parameters that live in shards.

    Args:
        function: `function(params, *others)`, any that JAX can trace; the first of the others is a batch of examples.
            It may have derivatives of any order in it. What is returned here has those of first order alone, in
            reverse: of a second one, what loops and products of weights add to it is missing.
        specs: like the parameters, where each lives.
        gathered: the same, where each is used; one that is told to be in shards over `fsdp` still is gathered where
            more is done with it than looking up a few of its rows.
        mesh: the devices.
        usage: the same, a `Usage` each; None where there is nothing to say of any.
        reshard_after_forward: forget gathered parameters after the forward pass, and gather them once more in the
            backward pass (the name is that of PyTorch's FSDP2): half as much again is moved, and they take no memory
            in between.

    Returns:
        A function of the same arguments, to be called under `jax.jit`; parameters may be an `Apart` each.
        `redco_cli.sharding.compiled` shows it in a whole step.
    """
    lives, told = (jax.tree.leaves(tree, is_leaf=_is_spec) for tree in (specs, gathered))
    lives, used = [as_spec(as_dims(spec)) for spec in lives], [_without_fsdp(spec) for spec in told]
    how = [Usage()] * len(lives) if usage is None else jax.tree.leaves(usage)
    moves = lives != used or mesh.shape.get(TENSOR, 1) > 1

    def gathers(params: Any, *others: Any) -> Any:
        given = jax.tree.leaves(params, is_leaf=_is_apart)
        as_it_is = not moves and not any(map(_is_apart, given))
        if as_it_is and mesh.size == 1:
            return function(params, *others)
        traced, shape = jax.make_jaxpr(function, return_shape=True)(values(params), *others)
        cuts = {number: one.cut for number, one in enumerate(how) if one.cut is not None}
        is_weight = [number < len(given) for number in range(len(traced.jaxpr.invars))]
        first = rows_first(traced, len(given))
        closed = made_once(in_pieces(first, cuts) if cuts else first, is_weight)
        transforms, features = unpartitioned.has_transforms(closed.jaxpr), unpartitioned.features_of(closed, used)
        jaxpr, has_replicas = closed.jaxpr, mesh.shape.get(DATA, 1) > 1
        narrow = casts(closed)
        used_as = uses(jaxpr, is_weight, narrow) if has_replicas else {}
        adds_up = are_shared(used_as) or (has_replicas and any(look(jaxpr, is_weight) for look in (repeats, composes)))
        if as_it_is and not transforms and first is traced and not adds_up:
            return function(params, *others)
        is_of_batch = [number == 0 for number, other in enumerate(others) for _ in jax.tree.leaves(other)]
        examples = find_examples(closed, [False] * len(given) + is_of_batch)
        in_place = computed_in_place(jaxpr, is_weight, examples)
        kept = [
            leaf if x in in_place.sources else summed_for_all(leaf, where, mesh, used_as.get(x, ()))
            for leaf, where, x in zip(given, lives, jaxpr.invars, strict=False)
        ]
        places = zip(kept, lives, used, how, strict=True)
        several = used_severally(jaxpr)
        stored = [Sharded(leaf, where, there, mesh, own, several=several) for leaf, where, there, own in places]
        shared = Copies(mesh), frozenset(cut_channels(jaxpr))
        told = mesh, reshard_after_forward, examples, narrow, in_place, features, *shared
        rewriting = _Gathering(*told, everywhere=transforms or has_neighbours(jaxpr))
        results = rewritten(closed, [*stored, *jax.tree.leaves(others)], rewriting)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return gathers


def values(params: Any) -> Any:
    """A tree of parameters without the `Apart` around some."""
    return jax.tree.map(lambda leaf: leaf.value if _is_apart(leaf) else leaf, params, is_leaf=_is_apart)


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Apart)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    return as_spec(tuple(tuple(axis for axis in axes if axis != FSDP) for axes in as_dims(spec)))


def _whole(x: Any) -> Any:
    return x.array() if isinstance(x, Sharded) else x


def _again(run: Callable[[Sequence[Any]], Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
    """What comes of operands, for which weights among them are gathered once more in the backward pass."""

    def on_arrays(arrays: Sequence[Any]) -> Sequence[Any]:
        return run([x.having(own) if _is_weight(x) else own for x, own in zip(operands, arrays, strict=True)])

    results: Sequence[Any] = jax.checkpoint(on_arrays)([x.arrays if _is_weight(x) else x for x in operands])
    return results


def _is_weight(x: Any) -> bool:
    return isinstance(x, Sharded | Repeated | Unmerged | Composed)
