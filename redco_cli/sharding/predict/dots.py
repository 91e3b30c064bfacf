"""Which operands a matrix product copies before it starts.

A compiler multiplies [batch..., free, contracted] by [batch..., contracted, free], or with the last two dims of either
swapped. Operands of a product that is not of this form are brought into it: dims that lie together are merged for
nothing, others cost a transposed copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""((left contracted, right contracted), (left batch, right batch)) as in `jax.lax.dot_general`."""


class Transposer(Protocol):
    """Where the operands are."""

    arrays: Any
    maker: dict[int, Any]

    def transpose(self, array: int, permutation: Sequence[int]) -> int:
        """The array with its dims in another order."""
        ...


def canonical_operands(
    where: Transposer, operands: tuple[int, ...], numbers: Numbers
) -> tuple[tuple[int, ...], Numbers]:
    """The arrays that are multiplied in the end, and the numbers of their dims."""
    if any(operand < 0 for operand in operands):
        return operands, numbers
    sums, batches = numbers
    found = []
    for side, operand in enumerate(operands):
        batch, summed = list(batches[side]), list(sums[side])
        free = [dim for dim in range(len(where.arrays.shapes[operand])) if dim not in (*batch, *summed)]
        found.append(_operand(where, operand, batch, summed, [*free, *summed] if side == 0 else [*summed, *free]))
    (left, left_batch, left_sum), (right, right_batch, right_sum) = found
    return (left, right), ((left_sum, right_sum), (left_batch, right_batch))


def _operand(
    where: Transposer, operand: int, batch: list[int], summed: list[int], inner: list[int]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """One operand, its batch dims and its contracted dims.

    Args:
        where: the arrays.
        operand: one of them.
        batch: its batch dims.
        summed: its contracted dims.
        inner: its other dims in the order that the product wants them.
    """
    maker = where.maker.get(operand)
    if len(summed) == 1 and len(inner) <= 2:
        if maker is not None and maker.name == "transpose":  # a product reads a transposed matrix as it is
            order = maker.params["permutation"]
            if [order[dim] for dim in batch] == list(range(len(batch))):
                return maker.operands[0], tuple(order[dim] for dim in batch), tuple(order[dim] for dim in summed)
        if batch == list(range(len(batch))):
            return operand, tuple(batch), tuple(summed)
    order = [*batch, *inner]
    moved = where.transpose(operand, order)
    return moved, tuple(range(len(batch))), tuple(order.index(dim) for dim in summed)
