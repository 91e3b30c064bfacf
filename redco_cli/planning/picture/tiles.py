"""Parameters as rectangles of their bytes, cut where they are split: the pieces that a picture is made of.

Lengths are in px, with `y` downward.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from redco_cli.console.columns import TIMES
from redco_cli.console.numbers import format_bytes
from redco_cli.console.plan import sizes_text, spec_text
from redco_cli.planning.parameter_groups import ParameterGroup
from redco_cli.planning.picture.blocks import Block
from redco_cli.sharding.plan import FSDP, TENSOR

Element = ElementTree.Element
Drawn = tuple[Element, float]
"""An element whose top left corner is the origin, and its height."""

LINE = 15
_PAD, _GAP, _STEP = 18, 22, 6
_LEAST = 6
_CLOSEST_CUTS = 3
_LONGEST = 80  # characters of a line of text
_UNPRINTABLE = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclasses.dataclass(frozen=True)
class Tile:
    """One parameter on the page.

    Attributes:
        group: it, and those like it.
        width: of the rectangle.
        height: of the rectangle.
        cuts: into how many parts the rectangle is cut, downward and across.
        lines: of text: its path within its block, how it is cut, what a device holds.
    """

    group: ParameterGroup
    width: float
    height: float
    cuts: tuple[int, int]
    lines: tuple[str, ...]


def add(parent: Element, tag: str, text: str | None = None, /, **attributes: object) -> Element:
    """A new last child; `_` in names of attributes is a hyphen, numbers have at most two decimals."""
    named = {name.rstrip("_").replace("_", "-"): _value(value) for name, value in attributes.items()}
    child = ElementTree.SubElement(parent, tag, named)
    child.text = None if text is None else _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return child


def text_width(text: str, size: float = 12) -> float:
    """About how wide a text is, rather too wide than too narrow."""
    return 0.6 * size * len(text)


def bytes_of_one(group: ParameterGroup) -> float:
    """Bytes of one parameter of one layer."""
    return group.bytes / group.count / max(group.layers, 1)


def panel(block: Block, scale: float, width: float) -> Drawn:
    """A block: its title and its parameters.

    Args:
        block: what to draw.
        scale: square px for each byte.
        width: of the panel.
    """
    tiles = [_tile(label, group, block.repeats, scale) for label, group in block.groups]
    matrices = [tile for tile in tiles if len(tile.group.shape) - bool(tile.group.layers) > 1]
    vectors = [tile for tile in tiles if tile not in matrices]
    inside = ElementTree.Element("g")
    y = _matrices(inside, matrices, 36, width)
    y = _vectors(inside, vectors, y, width)
    drawn = ElementTree.Element("g", {"class": "block"})
    sheets = 2 if block.repeats > 1 else 0
    for sheet in range(sheets, -1, -1):
        add(
            drawn,
            "rect",
            class_="panel",
            x=sheet * _STEP,
            y=sheet * _STEP,
            width=width - sheets * _STEP,
            height=y,
            rx=8,
        )
    times = f" {TIMES} {block.repeats}" if block.repeats > 1 else ""
    add(drawn, "text", block.title + times, class_="head", x=_PAD, y=24)
    held = format_bytes(sum(group.bytes_per_device for _, group in block.groups))
    whole = format_bytes(sum(group.bytes for _, group in block.groups))
    note = f"{held} of {whole} on each device"
    add(drawn, "text", note, class_="soft", x=width - sheets * _STEP - _PAD, y=24, text_anchor="end")
    drawn.append(inside)
    return drawn, y + sheets * _STEP


def _tile(label: str, group: ParameterGroup, repeats: int, scale: float) -> Tile:
    one = _without_layers(group)
    rows, columns, cuts = _as_matrix(one)
    ratio = min(max(columns / max(rows, 1), 0.6), 4)
    area = bytes_of_one(group) * scale
    width, height = max(math.sqrt(area * ratio), _LEAST), max(math.sqrt(area / ratio), _LEAST)
    copies = 1 if group.layers else group.count // repeats
    several = f" {TIMES} {copies}" if copies > 1 else ""
    split = f"{sizes_text(dataclasses.asdict(one))}  {spec_text(one.spec)}"
    texts = (label + several, split, f"{format_bytes(group.bytes_per_device)} per device")
    lines = tuple(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\N{HORIZONTAL ELLIPSIS}" for text in texts)
    return Tile(group, width, height, cuts, lines)


def _without_layers(group: ParameterGroup) -> ParameterGroup:
    """What one layer has of a group."""
    if not group.layers:
        return group
    shape, spec, gathered, parts = group.shape[1:], group.spec[1:], group.gathered[1:], group.parts[1:]
    return dataclasses.replace(group, layers=0, shape=shape, spec=spec, gathered=gathered, parts=parts)


def _as_matrix(group: ParameterGroup) -> tuple[int, int, tuple[int, int]]:
    """Rows, columns and the cuts of both, of dims that are joined to what is closest to a square."""
    shape, parts = group.shape, group.parts
    if len(shape) < 2:
        return 1, math.prod(shape), (1, math.prod(parts))
    sizes = {end: (math.prod(shape[:end]), math.prod(shape[end:])) for end in range(1, len(shape))}
    end = min(sizes, key=lambda end: max(sizes[end]) / max(min(sizes[end]), 1))
    return *sizes[end], (math.prod(parts[:end]), math.prod(parts[end:]))


def _matrices(parent: Element, tiles: Sequence[Tile], y: float, width: float) -> float:
    """Rows of rectangles with their texts below; returns where the next row begins."""
    row: list[Tile] = []
    x: float = _PAD
    for tile in (*tiles, None):
        needed = 0 if tile is None else _cell_width(tile)
        if row and (tile is None or x + needed > width - _PAD - 2 * _STEP):
            base = y + max(one.height for one in row)
            x = _PAD
            for one in row:
                _rectangle(parent, one, x, base - one.height)
                for number, line in enumerate(one.lines, 1):
                    add(parent, "text", line, class_="head" if number == 1 else "soft", x=x, y=base + 3 + number * LINE)
                x += _cell_width(one) + _GAP
            y = base + 4 * LINE + 6
            row, x = [], _PAD
        if tile is not None:
            row.append(tile)
            x += needed + _GAP
    return y


def _cell_width(tile: Tile) -> float:
    bold, *others = tile.lines
    return max(tile.width, text_width(bold, 13), *map(text_width, others))


def _vectors(parent: Element, tiles: Sequence[Tile], y: float, width: float) -> float:
    """Small rectangles with their text beside them, in two columns where it fits; returns where the panel ends."""
    longest = max((text_width(" ".join(tile.lines)) for tile in tiles), default=0)
    columns = 2 if longest + 40 < width / 2 - _PAD else 1
    for number, tile in enumerate(tiles):
        x = _PAD + number % columns * (width - 2 * _PAD) / 2
        line = y + 12 + number // columns * (LINE + 3)
        _rectangle(parent, dataclasses.replace(tile, width=min(tile.width, 16), height=_LEAST), x, line - _LEAST - 1)
        words = add(parent, "text", tile.lines[0], x=x + 24, y=line)
        add(words, "tspan", f"{tile.lines[1]}  {tile.lines[2]}", class_="soft", dx=10)
    return y + math.ceil(len(tiles) / columns) * (LINE + 3) + (8 if tiles else 0)


def _rectangle(parent: Element, tile: Tile, x: float, y: float) -> None:
    """The rectangle of a tile: pale what other devices hold, strong what one device holds, lines between the parts."""
    group, (down, across) = tile.group, tile.cuts
    place = add(parent, "g", class_="tile", transform=f"translate({_value(x)},{_value(y)})")
    add(place, "title", f"{group.path}\n{group.reason}")
    size = {"width": tile.width, "height": tile.height}
    part = {"width": tile.width / across, "height": tile.height / down}
    add(place, "rect", class_=group.split, fill_opacity=0.38, **size)
    add(place, "rect", class_=group.split, **part)
    if any(TENSOR in axes for axes in group.gathered) and any(FSDP in axes for axes in group.spec):
        add(place, "rect", fill="url(#also-fsdp)", **size)
    for count, length, is_down in ((down, tile.height, True), (across, tile.width, False)):
        shown = min(count, int(length / _CLOSEST_CUTS))
        for number in range(1, shown):
            at = length * number / shown
            ends = {"x1": 0, "x2": tile.width, "y1": at, "y2": at}
            if not is_down:
                ends = {"x1": at, "x2": at, "y1": 0, "y2": tile.height}
            add(place, "line", class_="cut", **ends)


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
