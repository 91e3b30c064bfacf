"""What is known of how each array of a program is split, while it is followed from its inputs to its outputs.

And what one device has of them then, in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any

from redco_cli.sharding.plan import DATA, DimShardings
from redco_cli.sharding.predict.kinds import ELEMENTWISE, VIEWS
from redco_cli.sharding.predict.operations import LITERAL, FlatProgram, Op

Rule = Callable[["Splits", Op], Sequence[DimShardings | None]]
"""From an operation to how each of its results is split; None for an array that depends on no input."""
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers how splits pass through the primitives of these names."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Splits:
    """How the arrays of a program are split.

    Attributes:
        known: by id of the array; None while it depends on no input.
        shapes: by id.
    """

    def __init__(self, flat: FlatProgram) -> None:
        """Nothing is known."""
        self.shapes = flat.arrays.shapes
        self.known: list[DimShardings | None] = [None] * len(self.shapes)
        self._maker: dict[int, Op] = {}
        self._free: set[int] = set()

    def run(self, flat: FlatProgram, inputs: Sequence[DimShardings | None]) -> list[DimShardings | None]:
        """Follows one program.

        Args:
            flat: the program.
            inputs: how its inputs are split.

        Returns:
            How its outputs are split.
        """
        known, maker = self.known, self._maker
        for array, dims in zip(flat.inputs, inputs, strict=True):
            known[array] = dims
            (self._free.add if dims is None else self._free.discard)(array)
        for op in flat.ops:
            for array, dims in zip(op.results, _RULES.get(op.name, same_place)(self, op), strict=True):
                known[array] = dims
                maker[array] = op
                (self._free.add if self._has_no_preference(op, array) else self._free.discard)(array)
        return [self.of(array) for array in flat.outputs]

    def of(self, array: int) -> DimShardings | None:
        """How an array is split; a literal has no preference."""
        return None if array == LITERAL else self.known[array]

    def settle(self, array: int, dims: DimShardings) -> None:
        """An array is split as what it meets where it has no preference: where it is repeated, or depends on no input.

        So are the arrays that it is made of, element by element.
        """
        if array not in self._free or len(self.shapes[array]) != len(dims) or self.known[array] == dims:
            return
        maker, shape, mine = self._maker.get(array), self.shapes[array], self.known[array]
        if maker is not None and maker.name in ELEMENTWISE | VIEWS:
            alike = self._alike(maker, shape)
            for operand in alike:
                self.settle(operand, dims)
            merged = join([mine, *map(self.of, alike)])
        elif maker is not None and maker.name == "broadcast_in_dim" and mine is not None:
            source = self.shapes[maker.operands[0]] if maker.operands[0] != LITERAL else ()
            size = dict(zip(maker.params["broadcast_dimensions"], source, strict=True))
            repeated = tuple(theirs if size.get(dim) != shape[dim] else () for dim, theirs in enumerate(dims))
            merged = join([mine, repeated])
        elif maker is not None and maker.name.startswith("scatter"):
            self.settle(maker.operands[0], dims)
            merged = join([mine, dims])
        else:
            merged = mine
        merged = dims if merged is None else merged
        self.known[array] = tuple(() if size == 1 else axes for size, axes in zip(shape, merged, strict=True))

    def _has_no_preference(self, maker: Op, array: int) -> bool:
        if self.known[array] is None:
            return True
        if maker.name in ELEMENTWISE | VIEWS:
            alike = self._alike(maker, self.shapes[array])
            return bool(alike) and self._free.issuperset(alike)
        return maker.name == "broadcast_in_dim" or (
            maker.name.startswith("scatter") and self._is_filled(maker.operands[0])
        )

    def _alike(self, maker: Op, shape: Any) -> list[int]:
        """What an array is made of element by element."""
        return [operand for operand in maker.operands if operand != LITERAL and self.shapes[operand] == shape]

    def _is_filled(self, array: int) -> bool:
        """Whether an array is one number, repeated."""
        return array in self._maker and self._maker[array].operands == (LITERAL,)


def join(candidates: Iterable[DimShardings | None]) -> DimShardings | None:
    """One split out of several of the same array: for each dim the first that splits it decides."""
    given = [dims for dims in candidates if dims is not None]
    if not given:
        return None
    result = given[0]
    for other in given[1:]:
        if other != result:
            used = {axis for axes in result for axis in axes}
            merged = []
            for mine, theirs in zip(result, other, strict=True):
                chosen = mine or (() if used.intersection(theirs) else theirs)
                used.update(chosen)
                merged.append(chosen)
            result = tuple(merged)
    return result


def distinct(dims: Iterable[tuple[str, ...]]) -> DimShardings:
    """The same with each mesh axis only where it comes first: no axis splits two dims of an array."""
    used: set[str] = set()
    result = []
    for axes in dims:
        result.append(() if used.intersection(axes) else axes)
        used.update(result[-1])
    return tuple(result)


def whole(shape: Sequence[Any]) -> DimShardings:
    """Not split at all."""
    return ((),) * len(shape)


def same_place(splits: Splits, op: Op) -> list[DimShardings | None]:
    """The rule of what has none: dims of the same size at the same place are the same dim."""
    results: list[DimShardings | None] = []
    given = [(splits.shapes[x], dims) for x in op.operands if (dims := splits.of(x)) is not None]
    for array in op.results:
        shape = splits.shapes[array]
        found = [
            tuple(axes if a == b else () for axes, a, b in zip(dims, sizes, shape, strict=True))
            for sizes, dims in given
            if len(sizes) == len(shape)
        ]
        results.append(join([*found, whole(shape)]) if given else None)
    return results


def shard_bytes(
    flat: FlatProgram, splits: Sequence[DimShardings], mesh: Mapping[str, int], *, tiled: bool = False
) -> list[int]:
    """Bytes on one device of each array of a program; of uneven shards the largest counts.

    Args:
        flat: a program.
        splits: as `propagate` returns them.
        mesh: axis to size.
        tiled: whether memory is in tiles, see `tiled_elements`.

    Returns:
        By id of the array.
    """
    arrays, in_rows = flat.arrays, in_rows_of(flat) if tiled else frozenset()
    shapes = [shard_shape(shape, dims, mesh) for shape, dims in zip(arrays.shapes, splits, strict=True)]
    elements = [
        tiled_elements(shape, in_rows=array in in_rows) if tiled else math.prod(shape)
        for array, shape in enumerate(shapes)
    ]
    return [itemsize * count for itemsize, count in zip(arrays.itemsizes, elements, strict=True)]


def host_bytes(flat: FlatProgram, splits: Sequence[DimShardings], mesh: Mapping[str, int]) -> int:
    """Bytes that the operations of a program, loops as a whole, leave in the host's memory for one device.

    Args:
        flat: a program.
        splits: as `propagate` returns them.
        mesh: axis to size.
    """
    itemsizes, shapes = flat.arrays.on_host, flat.arrays.shapes
    left = {array for op in flat.ops for array in op.results} & itemsizes.keys()
    return sum(itemsizes[array] * math.prod(shard_shape(shapes[array], splits[array], mesh)) for array in left)


def of_examples(flat: FlatProgram, splits: Sequence[DimShardings]) -> list[int]:
    """The arrays that have an entry for each example, or several: those that the batch's axes split.

    But for what groups of examples sum apart, as the gradient of a weight is, whose shape it has besides.

    Args:
        flat: a program.
        splits: as `propagate` returns them.
    """
    shapes, found = flat.arrays.shapes, list[int]()
    weights = {shapes[array] for array in flat.inputs}
    counts = {shapes[array][0] for array in flat.inputs if shapes[array] and DATA in splits[array][0]}
    for array, (shape, dims) in enumerate(zip(shapes, splits, strict=True)):
        place = next((place for place, axes in enumerate(dims) if DATA in axes), None)
        if place is not None:
            is_of_all = any(shape[place] % count == 0 for count in counts if count)
            if is_of_all or (*shape[:place], *shape[place + 1 :]) not in weights:
                found.append(array)
    return found


def in_rows_of(flat: FlatProgram) -> frozenset[int]:
    """Arrays that Pallas kernels read or write, and stacks of them: their last dim is the one along rows of the memory.

    Args:
        flat: a program.
    """
    found: set[int] = set()
    for op in flat.ops:
        if op.name == "pallas_call":
            found.update(op.operands, op.results)
        for body in op.bodies:
            found |= in_rows_of(body)
        if op.name == "scan":
            body, carried = op.bodies[0], op.params["num_carry"]
            first = op.params["num_consts"] + carried
            pairs = [*zip(body.outputs[carried:], op.results[carried:], strict=True)]
            pairs += zip(body.inputs[first:], op.operands[first:], strict=True)
            found.update(stack for part, stack in pairs if part in found)
    return frozenset(found)


def shard_shape(shape: Sequence[int], dims: DimShardings, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """What one device has of an array of this shape."""
    sizes = []
    for size, axes in zip(shape, dims, strict=True):
        for axis in axes:
            size = -(-size // mesh[axis])
        sizes.append(size)
    return tuple(sizes)


@cache
def tiled_elements(shape: tuple[int, ...], *, in_rows: bool = False) -> int:
    """Elements that an array takes in the memory of a TPU, where two of its dims are in whole tiles of 8 x 128.

    XLA is free to choose them; here it takes those that waste least.

    Args:
        shape: of the array.
        in_rows: whether they are its last two, as a Pallas kernel has it.

    >>> tiled_elements((32, 512, 1024)) == 32 * 512 * 1024
    True
    >>> tiled_elements((32, 16, 197, 197)) == 32 * 16 * 197 * 256
    True
    >>> tiled_elements((25, 1024, 64), in_rows=True) == 25 * 1024 * 128
    True
    """
    if len(shape) < 2 or 0 in shape:
        return math.prod(shape)
    places = [(len(shape) - 2, len(shape) - 1)] if in_rows else permutations(range(len(shape)), 2)
    tiled = (
        math.prod(shape) // (shape[rows] * shape[columns]) * _in_tiles(shape[rows], 8) * _in_tiles(shape[columns], 128)
        for rows, columns in places
    )
    return min(tiled)


def _in_tiles(size: int, tile: int) -> int:
    return -(-size // tile) * tile
