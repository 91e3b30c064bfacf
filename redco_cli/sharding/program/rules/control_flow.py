"""The rules of loops and conditionals.

Loops run once over their body: what a carry is before and after is unified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redco_cli.sharding.axes import fresh_dims, mark_layer
from redco_cli.sharding.program.events import Value, bytes_moved
from redco_cli.sharding.program.walk import Walk, rule, unify_values, viewed
from redco_cli.sharding.scans import scan_counts


@rule("scan")
def _scan(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    params = equation.params
    consts, carried = scan_counts(params)
    slices = []
    for x in operands[consts + carried :]:
        mark_layer(x.dims[0])
        slices.append(viewed(x, x.dims[1:]))
    before = _settled(walk, params["jaxpr"], operands[consts : consts + carried], operands[:consts], slices)
    with walk.repeated(params["length"]):
        results = walk.closed(params["jaxpr"], [*operands[:consts], *before, *slices])
    after = [unify_values(a, b) for a, b in zip(before, results, strict=False)]
    stacked = []
    for y in results[carried:]:
        layer = fresh_dims((params["length"],))
        mark_layer(layer[0])
        stacked.append(Value(layer + y.dims, y.requires_grad, y.from_batch))
    return after + stacked


@rule("while")
def _while(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    skipped = equation.params["cond_nconsts"]
    first = skipped + equation.params["body_nconsts"]
    body = equation.params["body_jaxpr"]
    before = _settled(walk, body, operands[first:], operands[skipped:first], [])
    results = walk.closed(body, [*operands[skipped:first], *before])
    return [unify_values(a, b) for a, b in zip(before, results, strict=True)]


def _settled(
    walk: Walk, body: Any, carried: list[Value], consts: Sequence[Value], slices: Sequence[Value]
) -> list[Value]:
    """The carry of a loop as it is after some rounds: zeros or weights at first, activations later."""
    for _ in carried:
        once = Walk()
        results = once.closed(body, [*consts, *carried, *slices])
        walk.fast += [dim for one in once.matmuls for dim in one.produced] + once.fast
        after = [
            x._replace(requires_grad=x.requires_grad or y.requires_grad, from_batch=x.from_batch or y.from_batch)
            for x, y in zip(carried, results, strict=False)
        ]
        if after == carried:
            break
        carried = after
    return carried


@rule("cond")
def _cond(walk: Walk, equation: Any, operands: list[Value]) -> list[Value]:
    """Each branch as often as it is taken; where that is not known, the one that may move most stands for all."""
    branches, before = equation.params["branches"], walk.collectives
    shares, found = walk.shares.get(id(equation)), []
    results: list[Value] = []
    for number, branch in enumerate(branches):
        walk.collectives = []
        with walk.repeated(1 if shares is None else shares[number]):
            other = walk.closed(branch, operands[1:])
        results = [unify_values(a, b) for a, b in zip(results, other, strict=True)] if number else other
        found.append(walk.collectives)
    most = max(found, key=lambda events: sum(one.count * bytes_moved(one, {}) for one in events))
    walk.collectives = before + (most if shares is None else [one for events in found for one in events if one.count])
    return results
