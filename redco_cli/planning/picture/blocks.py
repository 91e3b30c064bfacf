"""A model as blocks from its input to its output: the repeated layer is one of them, with how often it is there.

Only for pictures: what stands before and behind the layers is told by the usual names of modules, and where those say
nothing, by the order of the tree.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from redco_cli.planning.parameter_groups import ParameterGroup

_INPUT = re.compile(r"embed|wte|wpe|shared|patch|conv|position|cls_token")
_OUTPUT = re.compile(r"lm_head|embed_out|classifier|score|qa_outputs|proj_out|head|cls|pooler")
_RUN = r"\d+(?:\.\.\d+){0,2}"
_PATTERN = re.compile(rf"\{{({_RUN}(?:,{_RUN})*)\}}")
_TITLES = ("input", "layers", "after the layers", "output")


@dataclass(frozen=True)
class Block:
    """Parameters that are used together.

    Attributes:
        title: the path that they share, or what they are for.
        repeats: how many such blocks there are.
        groups: with their paths below the title's.
    """

    title: str
    repeats: int
    groups: tuple[tuple[str, ParameterGroup], ...]


def blocks(groups: Sequence[ParameterGroup]) -> list[Block]:
    """The blocks of a model, input first."""
    if not groups:
        return []
    root = _shared([group.path for group in groups])
    stacks = _stacks(groups)
    found: dict[tuple[int, int, str], list[ParameterGroup]] = defaultdict(list)
    for group in groups:
        prefix = _layer(group, stacks)
        found[(*_place(group.path, prefix is not None), prefix or "")].append(group)
    first = {key: index for index, key in enumerate(found)}
    return [_block(key[1], key[2], root, found[key]) for key in sorted(found, key=lambda key: (*key[:2], first[key]))]


def _block(rank: int, prefix: str, root: str, inside: Sequence[ParameterGroup]) -> Block:
    if not prefix:
        side = [one for one in ("encoder", "decoder") if f"/{one}/" in f"/{inside[0].path}"]
        return Block(": ".join([*side, _TITLES[rank]]), 1, tuple((group.path[len(root) :], group) for group in inside))
    repeats = inside[0].layers or _copies(prefix)
    return Block(prefix[len(root) :], repeats, tuple((group.path[len(prefix) + 1 :], group) for group in inside))


def _place(path: str, is_layer: bool) -> tuple[int, int]:
    """Where a block stands: nothing before the encoder but inputs, the heads behind everything; then its rank."""
    modules = path.lower().split("/")[:-1]
    side = 1 if "encoder" in modules else 2
    if is_layer:
        return side, 1
    if any(_OUTPUT.fullmatch(module) for module in modules):
        return 3, 3
    if any(_INPUT.search(module) for module in modules or [path.lower()]):
        return (side if {"encoder", "decoder"} & set(modules) else 0), 0
    return side, 2


def _layer(group: ParameterGroup, stacks: Sequence[str]) -> str | None:
    """The path of the layer that a group belongs to."""
    if group.layers:
        return next((prefix for prefix in stacks if group.path.startswith(f"{prefix}/")), posixpath.dirname(group.path))
    pieces = group.path.split("/")
    end = next((end for end in range(1, len(pieces)) if _is_layer(pieces[end - 1], len(pieces) - end)), None)
    return None if end is None else "/".join(pieces[:end])


def _is_layer(piece: str, levels_below: int) -> bool:
    """Whether a level of a path counts layers, rather than the two norms of one: those have no modules below."""
    return piece.isdigit() or piece.startswith("{") or ("{" in piece and levels_below > 1)


def _stacks(groups: Sequence[ParameterGroup]) -> list[str]:
    """Paths below which every group is stacked in as many layers, the shortest first."""
    below: dict[str, set[int]] = defaultdict(set)
    for group in groups:
        pieces = group.path.split("/")
        for end in range(1, len(pieces)):
            below["/".join(pieces[:end])].add(group.layers)
    return [prefix for prefix, layers in below.items() if len(layers) == 1 and layers != {0}]


def _copies(prefix: str) -> int:
    """How many paths a pattern stands for.

    >>> _copies("h/{0..11}"), _copies("h/{1..23..2}"), _copies("h/{0,2..4}"), _copies("h/7")
    (12, 12, 4, 1)
    """
    copies = 1
    for inside in _PATTERN.findall(prefix):
        numbers = 0
        for run in inside.split(","):
            given = [int(number) for number in run.split("..")]
            first, last, step = (*given, *(given[0], 1)[len(given) - 1 :])
            numbers += len(range(first, last + 1, step))
        copies *= numbers
    return copies


def _shared(paths: Sequence[str]) -> str:
    """What all paths begin with, to the end of a level."""
    common = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    return f"{common}/" if common else ""
