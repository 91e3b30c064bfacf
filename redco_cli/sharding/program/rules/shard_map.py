"""A `shard_map` in a program, read through its specs: what is inside sees shards, and names the mesh axes itself.

A dim that a spec splits is a product: the devices along the mesh axis, then a shard of it. The first factor is the same
for everything that is split over that axis, so a sum over devices (`psum`) is one over that factor. Nothing is decided
by it: whether the derived mesh splits that factor is found as for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_cli.sharding.axes import Dim, fresh, split, unify
from redco_cli.sharding.plan import as_dims
from redco_cli.sharding.program import primitives  # noqa: F401  which has a rule for all names, before those here
from redco_cli.sharding.program.events import Value
from redco_cli.sharding.program.walk import Walk, constant, rule, viewed


@rule("shard_map")
def _shard_map(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    params = equation.params
    sizes = {name: size for name, size in params["mesh"].shape.items() if size > 1}
    outside, walk.devices = walk.devices, dict(walk.devices)
    shards = [
        _shard(walk, x, atom.aval, spec, sizes)
        for x, atom, spec in zip(operands, equation.invars, params["in_specs"], strict=True)
    ]
    results = walk.run(params["jaxpr"], [], shards)
    joined = [_joined(walk, x, spec, sizes) for x, spec in zip(results, params["out_specs"], strict=True)]
    walk.devices = outside
    return joined


def _shard(walk: Walk, x: Value, aval: Any, spec: Any, sizes: dict[str, int]) -> Value:
    """An operand as one device has it."""
    dims = list(x.dims)
    for place, names in _split_dims(spec, sizes):
        ways = [sizes[name] for name in names]
        shard = aval.shape[place]
        for size in ways:
            shard //= size
        parts = split(dims[place], [*ways, shard])
        if parts is None:
            walk.needs_whole([dims[place]], x, aval, "operand of a shard_map that is split otherwise")
            dims[place] = fresh(shard)
            continue
        *devices, dims[place] = parts
        for name, dim in zip(names, devices, strict=True):
            unify(walk.devices.setdefault(name, dim), dim)
        if x.requires_grad and not x.from_batch:
            walk.by_hand.extend(devices)
    return viewed(x, dims)


def _joined(walk: Walk, x: Value, spec: Any, sizes: dict[str, int]) -> Value:
    """The shards of all devices as one array."""
    dims = list(x.dims)
    for place, names in _split_dims(spec, sizes):
        devices = [walk.devices.setdefault(name, fresh(sizes[name])) for name in names]
        dims[place] = tuple(axis for dim in (*devices, dims[place]) for axis in dim)
    return viewed(x, dims)


def _split_dims(spec: Any, sizes: dict[str, int]) -> list[tuple[int, list[str]]]:
    """Places of the dims that a spec splits, with the mesh axes of each."""
    named = [(place, [name for name in axes if name in sizes]) for place, axes in enumerate(as_dims(spec))]
    return [(place, names) for place, names in named if names]


def _along(walk: Walk, names: Any) -> list[Dim]:
    """The devices along some mesh axes, those that anything is split over."""
    listed: Sequence[Any] = names if isinstance(names, tuple | list) else (names,)
    return [walk.devices[name] for name in listed if name in walk.devices]


@rule("psum", "psum_invariant", "pmax", "pmin")
def _reduced(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    for x, atom in zip(operands, equation.invars, strict=True):
        devices = _along(walk, equation.params["axes"])
        walk.may_need("all-reduce", devices, x, atom.aval, "partial sums of a shard_map")
    return list(operands)


@rule("ppermute", "pbroadcast")
def _moved(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return list(operands)


@rule("axis_index")
def _index(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    return [constant(variable.aval) for variable in equation.outvars]


@rule("all_gather", "all_gather_invariant")
def _gathered(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    (x,), params = operands, equation.params
    devices, place, aval = _along(walk, params["axis_name"]), params["all_gather_dimension"], equation.invars[0].aval
    walk.needs_whole(devices, x, aval, "shards that a shard_map gathers")
    every = tuple(axis for dim in devices for axis in dim) or fresh(params["axis_size"])
    dims = list(x.dims)
    dims[place : place + bool(params["tiled"])] = [every + dims[place] if params["tiled"] else every]
    return [viewed(x, dims)]
