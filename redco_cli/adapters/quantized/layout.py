"""Where the codes and scales of quantised weights live: as the weight itself would, cut between tiles only.

    weight [in, heads, head_dim]    (fsdp, tensor, -)    ->    codes [in / 64, 64, out]    (fsdp, -, tensor)

The plan is made for the program as it sees its weights, then carried over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from redco_cli.adapters.quantized.leaf import TILE, Form, Quantized, is_quantized
from redco_cli.plugin.contract import Params
from redco_cli.sharding.plan import FSDP, DimShardings, Plan, Row, as_dims, as_spec
from redco_cli.sharding.program.reading import Reading

Axes = tuple[str, ...]


def read_as_seen(reading: Reading, params: Params) -> Reading:
    """A reading of `seen_params`, from which plans for the quantised parameters are made.

    Args:
        reading: of parameters as the program sees them.
        params: as they are kept.
    """
    if not any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        return reading
    return replace(reading, kept=partial(kept_plan, params))


def kept_plan(params: Params, plan: Plan) -> Plan:
    """A plan for quantised parameters, from that for the same ones as a program sees them."""
    rows: list[Row] = []
    for leaf, row in zip(jax.tree.leaves(params, is_leaf=is_quantized), plan.rows, strict=True):
        rows += _kept_rows(leaf, row, plan.mesh) if is_quantized(leaf) else [row]
    full = jax.tree.structure(params)
    return replace(
        plan,
        rows=tuple(rows),
        specs=jax.tree.unflatten(full, [row.spec for row in rows]),
        gathered=jax.tree.unflatten(full, [row.gathered for row in rows]),
        usage=jax.tree.unflatten(full, [row.usage for row in rows]),
    )


def _kept_rows(leaf: Quantized, row: Row, sizes: Mapping[str, int]) -> list[Row]:
    """The rows of codes and of scales."""
    form, found, reason = leaf.form, [], f"{row.reason}; {leaf.form.kind}, {TILE} inputs to a scale"
    stored, gathered = (_in_tiles(form, as_dims(spec, len(form.shape)), sizes) for spec in (row.spec, row.gathered))
    if {axis for dim in stored for axis in dim} != {axis for dim in as_dims(row.spec, len(form.shape)) for axis in dim}:
        reason = f"{reason}, between which it cannot be cut as the weight would be"
    for name, array in (("codes", leaf.codes), ("scales", leaf.scales)):
        lives, used = ((dims if name == "scales" else (*dims[:-1], (), dims[-1])) for dims in (stored, gathered))
        ways, size = math.prod(sizes[axis] for dim in lives for axis in dim), array.size * array.dtype.itemsize
        place = f"{row.path}/{name}"
        specs = as_spec(lives), as_spec(used)
        holds = math.prod(form.shape) if name == "codes" else 0
        found.append(Row(place, tuple(array.shape), str(array.dtype), *specs, reason, size, size // ways, holds))
    return found


def _in_tiles(form: Form, dims: DimShardings, sizes: Mapping[str, int]) -> DimShardings:
    """The mesh axes of [*stack, inputs / 64, outputs], from those of the weight's own dims."""
    use, layers = form.use, form.use.layers
    axes, shape = _as_used(form, list(dims[layers:]))
    ordered = [(axes[dim], shape[dim]) for dim in use.order]
    experts = len(use.stack) - layers
    rest, count = ordered[experts:], 0
    while math.prod(size for _, size in rest[:count]) < use.inputs:
        count += 1
    tiles, outputs = use.inputs // TILE, use.outputs
    first = _dividing(_merged(rest[:count]), tiles, sizes)
    last = _dividing(_merged(rest[count:]), outputs, sizes)
    wanted = {axis for own in dims[layers:] for axis in own}
    if FSDP in wanted - {axis for own, _ in ordered[:experts] for axis in own} - {*first, *last}:
        more = _dividing((*last, FSDP), outputs, sizes), _dividing((*first, FSDP), tiles, sizes)
        if FSDP in more[0]:
            last = more[0]
        elif FSDP in more[1]:
            first = more[1]
    return (*dims[:layers], *(own for own, _ in ordered[:experts]), first, last)


def _as_used(form: Form, axes: list[Axes]) -> tuple[list[Axes], list[int]]:
    """The mesh axes and sizes of a weight's dims behind its views; of one that is reshaped, no axes are known."""
    shape = list(form.shape[form.use.layers :])
    for view in form.use.views:
        name, after = view.primitive.name, list(view.outvars[0].aval.shape)
        if name == "transpose":
            axes = [axes[dim] for dim in view.params["permutation"]]
        elif name != "convert_element_type":
            axes = [()] * len(after)
        shape = after
    return axes, shape


def _merged(dims: Sequence[tuple[Axes, int]]) -> Axes:
    """The mesh axes of several dims as one: those of the first, whose parts are contiguous."""
    return next((own for own, size in dims if size > 1), ())


def _dividing(axes: Axes, count: int, sizes: Mapping[str, int]) -> Axes:
    """As many of the axes, major first, as cut a dim into equal parts."""
    while axes and count % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def dense_places(places: Any) -> Any:
    """Where parameters live while they are read, before they are quantised: in shards that are turned into codes.

    Args:
        places: `NamedSharding`s of parameters as they are kept.
    """
    return jax.tree.map(lambda leaf: _dense_place(leaf) if is_quantized(leaf) else leaf, places, is_leaf=is_quantized)


def _dense_place(kept: Quantized) -> NamedSharding:
    form, mesh = kept.form, kept.scales.mesh
    use, layers = form.use, form.use.layers
    dims: list[Axes] = [()] * len(form.shape)
    own = as_dims(kept.scales.spec, len(use.stack) + 2)
    if all(view.primitive.name == "convert_element_type" for view in use.views):
        shape = form.shape[layers:]
        experts, count = len(use.stack) - layers, 0
        while math.prod(shape[dim] for dim in use.order[experts : experts + count]) < use.inputs:
            count += 1
        first, last = use.order[experts : experts + count], use.order[experts + count :]
        targets = [*range(layers), *(layers + dim for dim in use.order[:experts])]
        targets += [layers + next((dim for dim in group if shape[dim] > 1), group[0]) for group in (first, last)]
        for target, axes in zip(targets, own, strict=True):
            dims[target] = _dividing(axes, form.shape[target], mesh.shape)
    return NamedSharding(mesh, as_spec(tuple(dims)))
