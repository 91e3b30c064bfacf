"""Folds the parameters of a model into groups of those that are alike, so that a plan fits on a page.

Parameters whose paths differ only in numbers, and which are split alike for the same reason, are one group: the twelve
`h/0/attn/c_attn/kernel` to `h/11/attn/c_attn/kernel` of a GPT-2 are `h/{0..11}/attn/c_attn/kernel`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from redco_cli.sharding.plan import DATA, TENSOR, Row, as_dims

Split = Literal["replicated", "data", "fsdp", "columns", "rows", "vocabulary", "experts"]
Numbers = tuple[int, ...]

_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d*)(?!\d)")
_LAYER_PARAMETERS = 5  # fewer that share their leading size are rather the experts of one layer than a stack of layers


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are alike.

    Attributes:
        path: of all of them: `h/{0..11}/mlp/kernel`, `{1..23..2}` for every other one, `{0..3,7}` for parts.
        count: how many there are.
        shape: sizes of the dims of each.
        layers: how many layers are stacked in the leading dim; 0 when it is an ordinary one.
        dtype: such as `float32`.
        spec: for each dim the mesh axes that it is split over where it lives.
        gathered: the same where it is used.
        parts: for each dim into how many parts it is cut where it lives.
        split: in use, over `tensor`: by `columns`, `rows`, `vocabulary` or `experts`; else how it is stored: in shards
            that are gathered for use, or whose rows are exchanged (`fsdp`), in shards over `data` only, or
            `replicated`: whole on every device.
        reason: why it is split so, or why it is not.
        bytes: of all of them together.
        bytes_per_device: of one device's shards of all of them.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    layers: int
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    gathered: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...]
    split: Split
    reason: str
    bytes: int
    bytes_per_device: int


def group_parameters(
    rows: Sequence[Row], mesh: Mapping[str, int], stacked: Mapping[str, int] | None = None
) -> tuple[ParameterGroup, ...]:
    """Parameters as groups of those that are alike, in the order of their first ones.

    Args:
        rows: one for each parameter.
        mesh: axis to size.
        stacked: path to the number of leading dims that count layers, 0 or 1, for the parameters where it is known;
            without it every subtree whose parameters share an unsplit leading dim is taken for a stack of layers.
    """
    stacks = _stacks(rows) if stacked is None else stacked
    alike: dict[Any, dict[Numbers, int]] = defaultdict(dict)
    for place, row in enumerate(rows):
        numbers = tuple(int(number) for number in _NUMBER.findall(row.path))
        words = tuple(_NUMBER.split(row.path))
        dims = (as_dims(spec, len(row.shape)) for spec in (row.spec, row.gathered))
        split = (*dims, row.reason, stacks.get(row.path, 0))
        alike[(words, row.shape, row.dtype, *split)][numbers] = place
    found = []
    for places in alike.values():
        for grid in _grids(list(places)):
            first = min(places[numbers] for numbers in itertools.product(*grid))
            found.append((first, _group(rows[first], grid, mesh, stacks.get(rows[first].path, 0))))
    return tuple(group for _, group in sorted(found, key=lambda pair: pair[0]))


def _group(row: Row, grid: Sequence[Numbers], mesh: Mapping[str, int], layers: int) -> ParameterGroup:
    pieces = iter(map(_written, grid))
    count = math.prod(map(len, grid))
    spec, gathered = (as_dims(spec, len(row.shape)) for spec in (row.spec, row.gathered))
    return ParameterGroup(
        path=_NUMBER.sub(lambda _: next(pieces), row.path),
        count=count,
        shape=row.shape,
        layers=row.shape[0] if layers else 0,
        dtype=row.dtype,
        spec=spec,
        gathered=gathered,
        parts=tuple(math.prod(mesh[axis] for axis in axes) for axes in spec),
        split=_split(spec[layers:], gathered[layers:], row.reason),
        reason=row.reason,
        bytes=count * row.bytes,
        bytes_per_device=count * row.bytes_per_device,
    )


def _split(spec: Sequence[Sequence[str]], gathered: Sequence[Sequence[str]], reason: str) -> Split:
    """The kind of a split; of the specs without the dim that stacks layers."""
    if not any(TENSOR in axes for axes in gathered):
        stored = {axis for axes in spec for axis in axes}
        return "replicated" if not stored else "data" if stored == {DATA} else "fsdp"
    if re.search(r"\bvocabulary\b|\btable\b|\d rows\b", reason):
        return "vocabulary"
    if re.search(r"\bexperts\b", reason):
        return "experts"
    by_columns, by_rows = re.search(r"\b(columns|projections)\b", reason), re.search(r"\brows\b", reason)
    if bool(by_columns) != bool(by_rows):
        return "columns" if by_columns else "rows"
    return "rows" if len(spec) > 1 and TENSOR in gathered[0] else "columns"


def _stacks(rows: Sequence[Row]) -> dict[str, int]:
    """Paths of what looks like a stack of layers: all parameters of a subtree share an unsplit leading dim."""
    below: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        pieces = row.path.split("/")
        for end in range(1, len(pieces)):
            below["/".join(pieces[:end])].append(row)
    found: dict[str, int] = {}
    for inside in below.values():
        ranks = {len(row.shape) for row in inside}
        if min(ranks) < 2 or len(ranks) < 2 or len(inside) < _LAYER_PARAMETERS:
            continue
        if len({row.shape[0] for row in inside}) == 1 and not any(as_dims(row.spec, 1)[0] for row in inside):
            found |= {row.path: 1 for row in inside}
    return found


def _grids(tuples: Sequence[Numbers]) -> Iterator[list[Numbers]]:
    """Tuples of numbers as products: for each place its numbers, rising."""
    if not tuples[0]:
        yield []
        return
    rests: dict[int, set[Numbers]] = defaultdict(set)
    for first, *rest in tuples:
        rests[first].add(tuple(rest))
    same: dict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first in sorted(rests):
        same[frozenset(rests[first])].append(first)
    for rest_of_them, firsts in same.items():
        for grid in _grids(sorted(rest_of_them)):
            yield [tuple(firsts), *grid]


def _written(numbers: Numbers) -> str:
    """Rising numbers as a shell would expand them.

    >>> _written((3,)), _written((0, 1, 2, 3, 7)), _written((1, 3, 5, 7))
    ('3', '{0..3,7}', '{1..7..2}')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    if len(numbers) > 2 and step > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1, step)):
        return f"{{{numbers[0]}..{numbers[-1]}..{step}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"
