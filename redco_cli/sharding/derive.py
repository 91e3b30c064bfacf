"""From a program and the sizes of a mesh to a `Plan`.

    loss_fn(params, batch)  --read-->  logical axes  --choose-->  axes over `tensor`  --lay_out-->  PartitionSpecs

For each parameter p of a matmul y = x·p, and n devices along `tensor`:

    columns    p = [p_1 ... p_n]     y_i = x·p_i               backward: dx = Σ_i dy_i·p_iᵀ, one all-reduce
    rows       p = [p_1; ...; p_n]   y = Σ_i x_i·p_i           one all-reduce; backward: none

so that a pair, columns then rows over the same axis, needs one all-reduce forward and one backward, and what lies
between them is split. Which axes make such pairs is read off the program; names of parameters are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redco_cli.sharding.decide.choose import choose
from redco_cli.sharding.decide.guards import Where, checked_sizes, guard
from redco_cli.sharding.decide.layout import lay_out
from redco_cli.sharding.decide.override import Override, overridden
from redco_cli.sharding.decide.pieces import computed, in_shards, shards
from redco_cli.sharding.decide.placed import Layout
from redco_cli.sharding.pieces.reading import InPieces, read_in_pieces
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, Collective, Plan, Row, as_spec
from redco_cli.sharding.predict.collectives import predict_collectives
from redco_cli.sharding.program.reading import Reading, read
from redco_cli.sharding.rings import sent_bytes

_CONVOLVES = (
    "XLA's partitioner gets convolutions wrong whose kernels are split over fsdp while their images are; compile the "
    "function that redco_cli.sharding.gathering makes of this one, or place parameters by gathered instead of specs"
)


def derive(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: Mapping[str, int],
    *,
    override: Sequence[Override] = (),
) -> Plan:
    """Derives how the parameters of a function are split over a mesh. Computes nothing and needs no devices.

    Args:
        loss_fn: `loss_fn(params, batch)`, any function that JAX can trace; best the forward loss, not its gradient.
        params: a tree of arrays or `jax.ShapeDtypeStruct`s.
        batch: the same; the leading dim of every array counts examples of the global batch.
        mesh: sizes of the axes `data`, `fsdp` and `tensor`; an axis that is not named has size one.
        override: (regular expression on paths, mesh axes for each dim) pairs that come before the rules.

    Returns:
        Where each parameter lives and is used, why, and what a step moves. `gathering` makes a function of parameters
        that live so, `follow` says where optimizer state lives then. A warning says where a function must not be
        compiled without `gathering`.

    Raises:
        DeviceError: no such mesh axis, more shards than heads, or more than a tenth of the parameter bytes, and a MiB,
            that would be whole on every device of an axis.
        RecipeError: an override that matches nothing or does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((jax.nn.relu(batch["x"] @ params["a"]) @ params["b"]) ** 2)
        >>> params = {"a": jax.ShapeDtypeStruct((8, 64), "float32"), "b": jax.ShapeDtypeStruct((64, 8), "float32")}
        >>> plan = derive(loss_fn, params, {"x": jax.ShapeDtypeStruct((16, 8), "float32")}, {"fsdp": 2, "tensor": 4})
        >>> tuple(plan.specs["a"]), tuple(plan.gathered["a"])
        (('fsdp', 'tensor'), (None, 'tensor'))
        >>> plan.rows[1].reason
        'rows: sums over 64 features, 16 on each device'
    """
    reading = read(loss_fn, params, batch)
    plan = make_plan(reading, mesh, override=override)
    if plan.mesh[FSDP] > 1 and convolves(reading):
        return replace(plan, warnings=(*plan.warnings, _CONVOLVES))
    return plan


def convolves(reading: Reading) -> bool:
    """Whether a program has a convolution with a parameter.

    XLA's partitioner (jax 0.10.2) computes something else than one device does where one mesh axis splits the channels
    of a kernel and the images that it is applied to, as `fsdp` does to parameters that are used as they live: a U-Net's
    loss was off by 2 %, and gradients of depthwise kernels are too large by the size of the axis.
    """
    return any("convolution" in one.what for one in reading.collectives)


def make_plan(
    reading: Reading,
    mesh: Mapping[str, int],
    *,
    override: Sequence[Override] = (),
    where: Where = str,
    frozen: Collection[str] = (),
    gathers: bool = True,
) -> Plan:
    """The plan of a program that was read already; as `derive`.

    Args:
        reading: the program.
        mesh: sizes of the axes.
        override: what comes before the rules.
        where: dotted recipe key to its place.
        frozen: paths of parameters that are not trained: nothing adds up their gradients.
        gathers: whether it is for the function that `gathering` makes, which takes weights apart.
    """
    sizes = checked_sizes(mesh, where)
    given = overridden(reading.parameters, override, sizes, where)
    chosen = choose(reading, sizes[TENSOR], sizes[DATA] * sizes[FSDP])
    layouts = lay_out(reading, chosen, sizes, given)
    collectives = predict_collectives(reading, chosen, layouts, sizes, reading.without_gradient.union(frozen))
    may_cut = gathers and sizes[TENSOR] > 1 and reading.kept is None
    found = _in_pieces(reading, sizes, given, frozen) if may_cut else None
    if found is not None and found[2] < computed(reading, layouts, sizes) + _sent(collectives, sizes):
        layouts, collectives, _ = found
    rows = tuple(
        Row(
            parameter.path,
            parameter.shape,
            str(parameter.dtype),
            as_spec(layout.stored),
            as_spec(layout.gathered),
            layout.reason,
            parameter.bytes,
            parameter.bytes // layout.ways(sizes),
            usage=layout.usage,
        )
        for parameter, layout in zip(reading.parameters, layouts, strict=True)
    )
    plan = Plan(
        mesh=sizes,
        specs=reading.treedef.unflatten([row.spec for row in rows]),
        gathered=reading.treedef.unflatten([row.gathered for row in rows]),
        usage=reading.treedef.unflatten([row.usage for row in rows]),
        rows=rows,
        collectives=collectives,
        warnings=guard(reading, chosen, layouts, sizes, where),
    )
    return plan if reading.kept is None else reading.kept(plan)


def _in_pieces(
    reading: Reading, sizes: Mapping[str, int], given: Mapping[str, Layout], frozen: Collection[str]
) -> tuple[list[Layout], tuple[Collective, ...], int] | None:
    """A program that takes some of its weights apart; None where it takes none apart.

    Returns:
        Layouts, what moves, and the price of what moves and is computed.
    """
    apart = read_in_pieces(reading, lambda one, cut: one.path not in given and shards(one, cut, sizes) is not None)
    if apart is None:
        return None
    own = apart.reading
    chosen = choose(own, sizes[TENSOR], sizes[DATA] * sizes[FSDP])
    pieces, layouts = in_shards(reading, apart, lay_out(own, chosen, sizes, given), sizes)
    still = own.without_gradient.union(frozen, *(_paths(path, apart) for path in frozen))
    collectives = predict_collectives(own, chosen, pieces, sizes, still)
    return layouts, collectives, computed(own, pieces, sizes) + _sent(collectives, sizes)


def _paths(path: str, apart: InPieces) -> list[str]:
    """Those of the pieces of a parameter."""
    return [f"{path}/{i}".lstrip("/") for i in range(len(apart.cuts[path].sizes))] if path in apart.cuts else []


def _sent(collectives: Sequence[Collective], sizes: Mapping[str, int]) -> int:
    return sum(sent_bytes(one, sizes) for one in collectives)
