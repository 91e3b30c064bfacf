"""Which collectives a compiled program runs, over which mesh axes, and how many bytes they move.

Read from the text of the optimised HLO of one device, where every collective is one instruction: what the partitioner
really put in, after all fusing and combining. A collective in the body of a loop counts once for each iteration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redco_cli.sharding.compiled.hlo import HloModule, Instruction, parse, result_type, size_in_bytes, trip_count
from redco_cli.sharding.compiled.schedule import SCATTERED, is_overlapped, is_step
from redco_cli.sharding.rings import ring_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Opcodes of collectives, whether they wait or are started with `-start`."""


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or `collective-permute`.
        axes: mesh axes it runs over, in the order of the mesh; empty when no mesh was given.
        shape: types of its results on one device, as HLO writes them: `f32[8,16]`.
        bytes: of these results, each time it runs.
        count: how often it runs when the program runs once.
        trip_count_known: False when it stands in a loop whose trip count is not in the text: such a loop counts once.
        source: where in the program it comes from, the `op_name` that JAX recorded.
        overlapped: a matrix product or attention runs while it moves its bytes.
        devices: how many take part in one; 0 where it is not known.
    """

    kind: str
    axes: tuple[str, ...]
    shape: str
    bytes: int
    count: int
    trip_count_known: bool
    source: str
    overlapped: bool = False
    devices: int = 0

    @property
    def sent(self) -> int:
        """Bytes that each device sends for all of them, in a ring."""
        return self.count * ring_bytes(self.kind, self.bytes, self.devices)


def compiled_collectives(
    compiled: Any, mesh: Mapping[str, int] | None = None, shares: Mapping[int, Sequence[float]] | None = None
) -> tuple[CompiledCollective, ...]:
    """The collectives of a program, in the order of its text, those of called computations where they are called.

    Of the branches of a conditional that are ever taken, the one that moves most stands for all. Collectives among a
    single device move nothing and are left out.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns, or the text of an optimised HLO module.
        mesh: axis to size, in the order of the mesh that the program was compiled for; names the axes of the result.
        shares: how often each branch is taken, by the number of branches; see `program.branches`.

    Raises:
        ValueError: the program has device numbers that the mesh does not.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled_collectives(jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile())
        ()
    """
    module = parse(compiled if isinstance(compiled, str) else compiled.as_text())
    found = _of_computation(module, module.entry, _Repeats(1, True, dict(shares or {})), dict(mesh or {}))
    return tuple(found)


def total_bytes(moved: Iterable[CompiledCollective], *, loops: bool = True) -> int:
    """Bytes that a program moves to one device.

    Args:
        moved: its collectives.
        loops: whether what stands in a loop counts for each iteration; otherwise every instruction counts once.
    """
    return sum(one.bytes * (one.count if loops else 1) for one in moved)


@dataclass(frozen=True)
class _Repeats:
    """How often a computation runs, whether all loops around it have a known trip count, and how often branches do."""

    times: int
    trip_count_known: bool
    shares: Mapping[int, Sequence[float]]

    def inside(self, trips: int | None) -> _Repeats:
        if trips is None:
            return replace(self, trip_count_known=False)
        return replace(self, times=self.times * trips)


def _of_computation(
    module: HloModule, name: str, repeats: _Repeats, mesh: dict[str, int]
) -> Iterator[CompiledCollective]:
    computation = module.computations[name]
    for instruction in computation.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            overlapped = is_overlapped(module, computation, instruction)
            yield from _one(module, instruction, kind, repeats, mesh, overlapped=overlapped)
        elif instruction.opcode == "fusion" and instruction.called()[0].startswith(SCATTERED):
            shape = _without_layout(instruction.type)
            for moved in _of_computation(module, instruction.called()[0], repeats, mesh):
                yield replace(moved, kind="reduce-scatter", shape=shape, bytes=size_in_bytes(shape))
        elif instruction.name.startswith("async-collective-start") or instruction.opcode == "async-start":
            overlapped = is_overlapped(module, computation, instruction)
            for called in instruction.called():
                for moved in _of_computation(module, called, repeats, mesh):
                    yield replace(moved, overlapped=overlapped)
        elif instruction.name.startswith("async-collective-done") or is_step(instruction):
            continue  # what was begun before
        elif instruction.opcode == "while":
            number = trip_count(module, instruction, name)
            condition = None if number is None else number + 1
            yield from _of_computation(module, instruction.called("condition")[0], repeats.inside(condition), mesh)
            yield from _of_computation(module, instruction.called("body")[0], repeats.inside(number), mesh)
        elif instruction.opcode == "conditional":
            names = instruction.branches()
            shares = repeats.shares.get(len(names), [1.0] * len(names))
            taken = [name for name, share in zip(names, shares, strict=True) if share]
            yield from max((list(_of_computation(module, one, repeats, mesh)) for one in taken), key=total_bytes)
        elif not instruction.opcode.endswith(("-done", "-update")):
            for one in instruction.called():
                yield from _of_computation(module, one, repeats, mesh)


def _one(
    module: HloModule,
    instruction: Instruction,
    kind: str,
    repeats: _Repeats,
    mesh: dict[str, int],
    *,
    overlapped: bool,
) -> Iterator[CompiledCollective]:
    groups = device_groups(instruction.attributes, module.devices)
    if all(len(group) == 1 for group in groups):
        return
    shape = result_type(instruction)
    yield CompiledCollective(
        kind=kind,
        axes=spanned_axes(groups, mesh),
        shape=_without_layout(shape),
        bytes=size_in_bytes(shape),
        count=repeats.times,
        trip_count_known=repeats.trip_count_known,
        source=instruction.source,
        overlapped=overlapped,
        devices=max(map(len, groups)),
    )


def _without_layout(shape: str) -> str:
    return re.sub(r"\{[^}]*\}", "", shape)


def spanned_axes(groups: list[list[int]], mesh: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which devices of one group differ."""
    if not mesh:
        return ()
    if max(map(max, groups)) >= math.prod(mesh.values()):
        raise ValueError(f"the program runs on more devices than the mesh {mesh} has")
    stride, found = 1, []
    for axis in reversed(mesh):
        places = [[number // stride % mesh[axis] for number in group] for group in groups]
        if any(len(set(group)) > 1 for group in places):
            found.append(axis)
        stride *= mesh[axis]
    return tuple(reversed(found))


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of device numbers among which a collective runs; pairs, for a permutation."""
    pairs = re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes)
    listed = pairs or re.search(r"replica_groups=(\{\{.*?\}\})", attributes)
    if listed:
        return [_integers(group) for group in re.findall(r"\{([\d, ]+)\}", listed[1])]
    arranged = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[^\]]*\](?:T\([^)]*\))?)", attributes)
    if arranged:
        return _cut(_arrangement(arranged[3]), int(arranged[2]))
    named = re.search(r"replica_groups=mesh\[(.*?)\](?:, *device_ids=\((.*?)\))? \{(.*?)\}", attributes)
    if named:
        return _groups_of_axes(named[1], named[2], named[3])
    return [list(range(devices))]


def _arrangement(text: str) -> list[int]:
    """Device numbers in the order of `[4,2]T(1,0)`: counted up in a grid, which is then transposed."""
    sizes, _, order = text.partition("T")
    grid = _integers(sizes)
    permutation = _integers(order) or list(range(len(grid)))
    strides = [math.prod(grid[dim + 1 :]) for dim in range(len(grid))]
    numbers = [0]
    for dim in permutation:
        numbers = [number + step * strides[dim] for number in numbers for step in range(grid[dim])]
    return numbers


def _groups_of_axes(mesh: str, order: str | None, axes: str) -> list[list[int]]:
    """Groups of `mesh['a'=2,'b'=4] {'a','b':(2)2}`: all devices that differ along these axes, or parts of an axis.

    The part `'b':(2)2` of an axis is the factor of two of it below a major factor of two.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)}
    chosen = [
        (name, int(above or 1), int(size or sizes[name]))
        for name, above, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", axes)
    ]
    devices = math.prod(sizes.values())
    order = order or f"[{devices}]"
    numbers = _arrangement(order) if order.startswith("[") else _integers(order)
    names = list(sizes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, number in enumerate(numbers):
        rest = position
        for name, above, size in chosen:
            stride = math.prod(sizes[one] for one in names[names.index(name) + 1 :])
            stride *= sizes[name] // above // size
            rest -= position // stride % size * stride
        groups.setdefault((rest,), []).append(number)
    return list(groups.values())


def _cut(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
