"""Which results of a program are written to memory, and what they are computed from.

A compiler fuses: most results are only ever elements on the way to another result. What is written out are products,
convolutions, reductions, loops, and whatever these read; of the elementwise operations those that are expensive and
read more than once. What is fused is computed from the arrays that it is made of.
On chips a sum of arrays that is read more than once, as along a residual stream, is written where it is made, and kept
in place of the last product in it. On a TPU products compute what is elementwise among their operands, and nothing
elementwise is kept for being expensive but error functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from redco_cli.sharding.predict.kernels import kernel_regions
from redco_cli.sharding.predict.kinds import CHEAP, EXPENSIVE, MOVES, REDUCTIONS, RESHAPED, VIEWS
from redco_cli.sharding.predict.operations import LITERAL, NARROW, FlatProgram, Op

STACK = "into_stack"
"""An operation without a result: an iteration of a loop writes its slice of a stacked result."""
_FUSED = CHEAP | EXPENSIVE | MOVES
_MADE_AGAIN = frozenset({"random_bits"})
"""Fused too, but on a CPU: chips draw what drops elements once more in the backward pass."""
_SUMS = frozenset({"add", "add_any"})
_POLYNOMIALS = frozenset({"erf", "erfc", "erf_inv"})
"""Some twenty operations for each element: too many to be computed once more, on a TPU too."""
_MATRIX_UNIT = frozenset({"dot_general", "conv_general_dilated"})


class Fusion:
    """A list of operations, connected, with what a compiler makes of it.

    Attributes:
        ops: the operations; views are gone.
        operands: for each the arrays that it names.
        maker: by id of an array, the index of the operation that it is a result of.
        users: by id of an array, the indices of the operations that name it.
        ends: ids of what is read in the end.
        region: by index, the library kernel that an operation is part of.
        written: for each whether its result is written out.
        reads: for each the arrays in memory that it is computed from.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        outputs: Sequence[int],
        flat: FlatProgram,
        *,
        kernels: bool,
        tpu_backend: bool = False,
    ) -> None:
        """Fuses.

        Args:
            ops: the operations of a program.
            outputs: ids of what is read in the end, or `LITERAL`.
            flat: the program, or one around it.
            kernels: whether library kernels take in what lies around them, and narrow elements are written where they
                are read more than once, as in XLA's CPU backend.
            tpu_backend: whether products compute what is elementwise among their operands, as XLA has it for TPUs.
        """
        self._kernels, self._tpu_backend, self._arrays = kernels, tpu_backend, flat.arrays
        self._fused = _FUSED if kernels else _FUSED | _MADE_AGAIN
        self._base: dict[int, int] = {}
        self.ops: list[Op] = []
        for op in ops:
            if op.name in VIEWS:
                for operand, result in zip(op.operands, op.results, strict=True):
                    self._base[result] = self.base(operand)
            else:
                self.ops.append(op)
        self.operands = [[self.base(x) for x in op.operands if x != LITERAL] for op in self.ops]
        self.maker = {result: index for index, op in enumerate(self.ops) for result in op.results}
        self.users: dict[int, list[int]] = {}
        for index, operands in enumerate(self.operands):
            for array in dict.fromkeys(operands):
                self.users.setdefault(array, []).append(index)
        self.ends = {self.base(x) for x in outputs if x != LITERAL}
        self.region = kernel_regions(self) if kernels else {}
        self.written: list[bool] = []
        self.reads: list[tuple[int, ...]] = []
        for index in range(len(self.ops)):
            self.reads.append(self._read_by(index))
            self.written.append(self._is_written(index))

    def base(self, array: int) -> int:
        """The array that another is a view of."""
        return self._base.get(array, array)

    def _is_written(self, index: int) -> bool:
        op = self.ops[index]
        if not self._is_fused(op) and index not in self.region:
            return True
        array = op.results[0]
        users = self.users.get(array, [])
        narrow = self._kernels and op.name in CHEAP and self._arrays.dtypes[array] in NARROW
        kept = _POLYNOMIALS if self._tpu_backend else EXPENSIVE
        once = op.name in kept or narrow or (not self._kernels and self._is_sum(index))
        return array in self.ends or (once and len(users) > 1) or not all(self._takes(index, user) for user in users)

    def _is_sum(self, index: int) -> bool:
        """Whether several arrays as large as itself are added up, as along a residual stream."""
        if self.ops[index].name not in _SUMS:
            return False
        size = math.prod(self._arrays.shapes[self.ops[index].results[0]])
        return sum(math.prod(self._arrays.shapes[array]) == size for array in self.reads[index]) > 1

    def _takes(self, index: int, user: int) -> bool:
        """Whether an operation computes the elements of an operand itself."""
        region, name = self.region.get(user), self.ops[user].name
        if region is not None or index in self.region:
            return region == self.region.get(index)
        if self.ops[index].name in EXPENSIVE and name in ("broadcast_in_dim", "gather"):
            return False
        if self._tpu_backend and name in _MATRIX_UNIT:
            return True
        return self._is_fused(self.ops[user]) or name == STACK or (name in REDUCTIONS and not self._kernels)

    def _is_fused(self, op: Op) -> bool:
        """Whether nothing but elements comes of an operation: of a product that sums over nothing, too."""
        sums = op.name != "dot_general" or any(op.params["dimension_numbers"][0])
        return op.name in self._fused or (self._tpu_backend and not sums)

    def _read_by(self, index: int) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for array in self.operands[index]:
            maker = self.maker.get(array)
            if maker is None or self.written[maker]:
                found[array] = None
            else:
                found.update(dict.fromkeys(self.reads[maker]))
        return tuple(found)

    def results(self) -> set[int]:
        """Operations whose result is read in the end, if only in another place or precision."""
        found: set[int] = set()
        for index in range(len(self.ops) - 1, -1, -1):
            results = self.ops[index].results
            users = [user for array in results for user in self.users.get(array, ())]
            moved = users and all(user in found and self.ops[user].name in RESHAPED for user in users)
            if moved or not self.ends.isdisjoint(results):
                found.add(index)
        return found

    def before(self, array: int) -> set[int]:
        """The operations that an array depends on."""
        found: set[int] = set()
        stack = [array]
        while stack:
            index = self.maker.get(stack.pop())
            if index is not None and index not in found:
                found.add(index)
                stack += self.operands[index]
        return found
