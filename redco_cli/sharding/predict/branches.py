"""What the branches of a conditional give back of weights that are gathered within them: gradients in shards.

A weight that a conditional uses goes into it in shards, is gathered in the branches that use it, and its gradient is
scattered there (`decide.gather`). The traced program, which knows no devices, has all of it on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from redco_cli.sharding.predict.operations import LITERAL, FlatProgram, Op
from redco_cli.sharding.predict.peak import Bytes

Shape = tuple[int, ...]


def scattered_in_branches(flat: FlatProgram, sizes: Sequence[int], local: Sequence[int]) -> Bytes:
    """Bytes of every array of a program, those of gradients that conditionals give back as they are in shards.

    Args:
        flat: the program, whose first inputs are the parameters.
        sizes: bytes of every array on a device, by id.
        local: of each parameter where it lives.
    """
    shares: dict[Shape, float] = {}
    for array, size in zip(flat.inputs, local, strict=False):
        if sizes[array] > size:  # of a whole one, or of a layer
            shape = flat.arrays.shapes[array]
            shares |= dict.fromkeys((shape, shape[1:]), size / sizes[array])
    found = np.array(sizes, np.float64)
    if shares:
        _correct(flat.ops, flat.arrays.shapes, found, shares)
    return found


def _correct(ops: Sequence[Op], shapes: Sequence[Shape], sizes: Bytes, shares: Mapping[Shape, float]) -> None:
    for op in ops:
        for body in op.bodies:
            _correct(body.ops, shapes, sizes, shares)
        if op.name != "cond":
            continue
        zeros = [{LITERAL, *(x for one in body.ops if _is_filled(one) for x in one.results)} for body in op.bodies]
        for place, result in enumerate(op.results):
            given = [body.outputs[place] for body in op.bodies]
            is_of_few = any(x in made for x, made in zip(given, zeros, strict=True))  # nothing where it is not used
            for array in {result, *given} - {LITERAL} if is_of_few else ():
                sizes[array] *= shares.get(shapes[array], 1.0)


def _is_filled(op: Op) -> bool:
    return op.name == "broadcast_in_dim" and op.operands == (LITERAL,)
