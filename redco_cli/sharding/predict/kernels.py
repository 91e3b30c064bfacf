"""What the library kernels of XLA's CPU backend take in.

On a CPU batched products and reductions run in a library that also computes the elementwise operations around them: a
softmax is one kernel from the product to the exponential. Such a kernel has one result; everything else that it reads
from outside is written out for it, be it only a number repeated to the shape of an array.
"""

from __future__ import annotations

from typing import Any

from redco_cli.sharding.predict.kinds import REDUCTIONS
from redco_cli.sharding.predict.operations import LITERAL, Op

_TAKEN = REDUCTIONS | {
    "add", "add_any", "sub", "mul", "div", "max", "min", "neg", "exp", "square", "integer_pow", "broadcast_in_dim"
}  # fmt: skip
_FARTHEST = 64
"""Operations that are looked at for one kernel: enough for any softmax."""


def kernel_regions(fusion: Any) -> dict[int, int]:
    """For each operation that runs in a library kernel, the number of that kernel.

    Args:
        fusion: a `Fusion` whose operations are connected.
    """
    region: dict[int, int] = {}
    for seed, op in enumerate(fusion.ops):
        if seed not in region and (op.name in REDUCTIONS or _is_batched(op)):
            members = _downward(fusion, seed, region)
            members |= _upward(fusion, members, region)
            region.update(dict.fromkeys(members, seed))
    return region


def _is_batched(op: Op) -> bool:
    return op.name == "dot_general" and len(op.params["dimension_numbers"][1][0]) > 0


def _taken(op: Op) -> bool:
    return op.name in _TAKEN and LITERAL not in op.operands


def _passes(op: Op) -> bool:
    """Whether a kernel goes on after it: a division ends it."""
    return _taken(op) and op.name != "div"


def _downward(fusion: Any, seed: int, region: dict[int, int]) -> set[int]:
    """The seed and what follows it, up to the last operation through which everything passes."""
    members, pending, kept = {seed}, set(_users(fusion, seed)), {seed}
    while pending and len(members) < _FARTHEST:
        index = min(pending)
        pending.discard(index)
        if index in region or not _passes(fusion.ops[index]):
            break
        members.add(index)
        if not pending:
            kept = set(members)
        if fusion.ops[index].results[0] in fusion.ends:
            break
        pending.update(_users(fusion, index))
    return kept


def _upward(fusion: Any, members: set[int], region: dict[int, int]) -> set[int]:
    """What only the members read."""
    found: set[int] = set()
    frontier = sorted(members, reverse=True)
    while frontier:
        index = frontier.pop(0)
        for array in fusion.operands[index]:
            maker = fusion.maker.get(array)
            if maker is None or maker in members or maker in found or maker in region or array in fusion.ends:
                continue
            inside = all(user in members or user in found for user in fusion.users[array])
            if inside and _taken(fusion.ops[maker]) and fusion.ops[maker].name not in REDUCTIONS:
                found.add(maker)
                frontier.append(maker)
    return found


def _users(fusion: Any, index: int) -> list[int]:
    return [user for result in fusion.ops[index].results for user in fusion.users.get(result, [])]
