"""Gradients that are in shards before a program ends: what the traced program, which knows no devices, has all of.

A weight that a conditional uses goes into it in shards, is gathered in the branches that use it, and its gradient is
scattered there; one that is said to come first is scattered where that is said (`sharding.gather`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from redco_cli.sharding.predict.kinds import SCATTERED
from redco_cli.sharding.predict.operations import LITERAL, FlatProgram, Op
from redco_cli.sharding.predict.peak import Bytes

Shape = tuple[int, ...]
_AS_IT_IS = frozenset({"convert_element_type", "transpose", "reshape"})


def as_scattered(flat: FlatProgram, sizes: Sequence[int], local: Sequence[int]) -> Bytes:
    """Bytes of every array of a program, those of gradients in shards as they are.

    Args:
        flat: the program, whose first inputs are the parameters.
        sizes: bytes of every array on a device, by id.
        local: of each parameter where it lives.
    """
    shares: dict[Shape, float] = {}
    for array, size in zip(flat.inputs, local, strict=False):
        if sizes[array] > size:  # of a whole one, of a layer, or of one whose rows are columns elsewhere
            shape = flat.arrays.shapes[array]
            shares |= dict.fromkeys((shape, shape[1:], shape[::-1]), size / sizes[array])
    found = np.array(sizes, np.float64)
    if shares:
        _correct(flat.ops, flat.arrays.shapes, found, shares)
    return found


def _correct(ops: Sequence[Op], shapes: Sequence[Shape], sizes: Bytes, shares: Mapping[Shape, float]) -> None:
    scattered: set[int] = set()
    for op in ops:
        for body in op.bodies:
            _correct(body.ops, shapes, sizes, shares)
        if op.name == SCATTERED or (op.name in _AS_IT_IS and not scattered.isdisjoint(op.operands)):
            scattered.update(op.results)
        elif op.name == "cond":
            scattered.update(_of_few(op))
    for array in scattered:
        sizes[array] *= shares.get(shapes[array], 1.0)


def _of_few(switch: Op) -> set[int]:
    """What a conditional gives back, and its branches, where there are zeros unless one of few is taken."""
    zeros = [{LITERAL, *(x for one in body.ops if _is_filled(one) for x in one.results)} for body in switch.bodies]
    found: set[int] = set()
    for place, result in enumerate(switch.results):
        given = [body.outputs[place] for body in switch.bodies]
        if any(x in made for x, made in zip(given, zeros, strict=True)):  # nothing where it is not used
            found |= {result, *given} - {LITERAL}
    return found


def _is_filled(op: Op) -> bool:
    return op.name == "broadcast_in_dim" and op.operands == (LITERAL,)
