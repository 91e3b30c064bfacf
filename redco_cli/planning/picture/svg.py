"""A plan as one picture (SVG): the model from input to output, how each parameter is cut, and the memory it takes.

Every parameter is a rectangle of its bytes, with lines where it is cut; the strong part is what one device holds.
Colours follow the viewer's light or dark theme, on a page of their own, so that the picture can be put anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from redco_cli.console.numbers import format_bytes
from redco_cli.console.plan import KINDS, memory_kinds, mesh_text
from redco_cli.errors import StorageError
from redco_cli.planning.picture.blocks import blocks
from redco_cli.planning.picture.tiles import LINE, Drawn, Element, add, bytes_of_one, panel, text_width
from redco_cli.planning.report import Report

_WIDTH, _MARGIN, _GAP = 1120, 28, 26
_INSIDE = _WIDTH - 2 * _MARGIN
_LARGEST = 40_000  # square px of the largest parameter
_SPLITS = {
    "replicated": "replicated",
    "data": "data: stored in shards",
    "fsdp": "fsdp: gathered for use",
    "columns": "tensor: columns",
    "rows": "tensor: rows",
    "vocabulary": "tensor: vocabulary",
    "experts": "tensor: experts",
}
_STYLE = """
text{font-family:system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px;fill:#20262c}
.page{fill:#ffffff}.panel{fill:#f4f6f8;stroke:#d3dae0}.soft{fill:#586672}.title{font-size:20px;font-weight:600}
.head{font-size:12px;font-weight:600}.cut{stroke:#f4f6f8;stroke-width:1.4}.arrow{stroke:#8a96a1;fill:#8a96a1}
.hatch{stroke:#ffffff;stroke-opacity:.5;stroke-width:1.5}.limit{stroke:#c1121f;stroke-width:2}
.bad{fill:#c1121f;font-weight:600}.good{fill:#1f7a4d;font-weight:600}.rest{fill:#e4e9ed}
.replicated{fill:#87929d}.data{fill:#b8901f}.fsdp{fill:#2c9a62}.columns{fill:#2b78c8}.rows{fill:#dd7128}
.vocabulary{fill:#9450c2}.experts{fill:#c2417c}
.parameters{fill:#2f5d8a}.gradients{fill:#5b8db8}.optimizer{fill:#9bbbd4}.activations{fill:#e0a030}.logits{fill:#c9603f}
.batch{fill:#7a8791}.gathered{fill:#7d5ba6}.plugin_state{fill:#4f8f8b}
@media (prefers-color-scheme:dark){text{fill:#e7ebee}.page{fill:#12161a}.panel{fill:#1c2228;stroke:#38424b}
.soft{fill:#a2aeb8}.cut{stroke:#1c2228}.hatch{stroke:#12161a}.limit{stroke:#ff6b6b}.bad{fill:#ff7b7b}
.good{fill:#5fce95}.rest{fill:#2b333b}}
"""


def render_svg(report: Report) -> str:
    """The picture of a report: a whole SVG document that refers to nothing outside itself."""
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    add(root, "title", f"{report.model} on {report.devices} devices")
    add(root, "style", _STYLE)
    _hatch(root)
    page = add(root, "rect", class_="page", width=_WIDTH)
    largest = max((bytes_of_one(group) for group in report.groups), default=0)
    y = _MARGIN + _stack(root, [_heading(report), _legend()], _MARGIN, arrows=False)
    y += _stack(
        root, [panel(block, _LARGEST / max(largest, 1), _INSIDE) for block in blocks(report.groups)], y, arrows=True
    )
    y += _stack(root, [_memory(report)], y, arrows=False)
    for name, value in {"viewBox": f"0 0 {_WIDTH} {y:.0f}", "width": str(_WIDTH), "height": f"{y:.0f}"}.items():
        root.set(name, value)
    page.set("height", f"{y:.0f}")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _stack(root: Element, drawn: Iterable[Drawn], top: float, *, arrows: bool) -> float:
    """Elements below each other; returns the height of them all."""
    y = top
    for number, (element, height) in enumerate(drawn):
        if arrows and number:
            middle = _WIDTH / 2
            add(root, "path", class_="arrow", d=f"M{middle} {y - _GAP + 4:.1f}v{_GAP - 12}m-4 0h8l-4 6z")
        element.set("transform", f"translate({_MARGIN},{y:.1f})")
        root.append(element)
        y += height + _GAP
    return y - top


def _hatch(root: Element) -> None:
    pattern = add(
        add(root, "defs"),
        "pattern",
        id="also-fsdp",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    add(pattern, "path", class_="hatch", d="M0 0v6")


def _heading(report: Report) -> Drawn:
    drawn = ElementTree.Element("g")
    add(drawn, "text", report.model, class_="title", y=18)
    devices = "one device" if report.devices == 1 else f"{report.devices} devices"
    length = "" if report.seq_length is None else f" of {report.seq_length} tokens"
    what = [
        f"{report.parameters:,} parameters",
        f"{devices}: {mesh_text(report.chosen.mesh)}",
        f"{report.global_batch_size} examples{length} in a step",
    ]
    add(drawn, "text", "  \u00b7  ".join(what), class_="soft", y=40)
    return drawn, 44


def _legend() -> Drawn:
    drawn = ElementTree.Element("g")
    entries = [(name, f"{words}") for name, words in _SPLITS.items()]
    x: float = 0
    for name, words in entries:
        add(drawn, "rect", class_=name, x=x, width=14, height=14)
        add(drawn, "text", words, x=x + 20, y=11)
        x += 34 + text_width(words, 11)
    add(drawn, "rect", class_="columns", y=22, width=14, height=14)
    add(drawn, "rect", fill="url(#also-fsdp)", y=22, width=14, height=14)
    add(drawn, "text", "hatched: over fsdp as well", x=20, y=33)
    note = "Area: the bytes of one parameter. Lines: where it is split. Solid: the shard of one device."
    add(drawn, "text", note, class_="soft", x=210, y=33)
    return drawn, 38


def write_picture(report: Report, file: Path) -> None:
    """Writes `render_svg(report)` to a file.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        file.write_text(render_svg(report), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            str(file), f"cannot be written: {error.strerror or error}", "give another --svg FILE"
        ) from None


def _memory(report: Report) -> Drawn:
    """A bar of the kinds of memory, the limit, and what each kind takes."""
    drawn = ElementTree.Element("g", {"class": "memory"})
    kinds, limit, total = memory_kinds(dataclasses.asdict(report.memory)), report.device_memory, report.memory.total
    px_per_byte = _INSIDE / max(total, limit or 0, 1)
    add(drawn, "text", "memory on one device", class_="head", y=12)
    add(drawn, "rect", class_="rest", y=24, width=_INSIDE, height=30)
    x: float = 0
    for kind, size in kinds.items():
        add(drawn, "rect", class_=kind, x=x, y=24, width=size * px_per_byte, height=30)
        x += size * px_per_byte
    if limit is not None:
        at = min(limit * px_per_byte, _INSIDE - 1)
        add(drawn, "line", class_="limit", x1=at, x2=at, y1=18, y2=60)
    words = f"{format_bytes(total)} of {format_bytes(limit)}" if limit is not None else format_bytes(total)
    verdict = {True: "fits: ", False: "does not fit: ", None: "needs "}[report.fits]
    style = {True: "good", False: "bad", None: "soft"}[report.fits]
    add(drawn, "text", f"{verdict}{words}", class_=style, x=_INSIDE, y=12, text_anchor="end")
    x, y = 0.0, 64.0 + LINE
    for kind, size in kinds.items():
        words = f"{KINDS[kind]} {format_bytes(size)}"
        if x + 20 + text_width(words) > _INSIDE:
            x, y = 0.0, y + LINE + 5
        add(drawn, "rect", class_=kind, x=x, y=y - 10, width=12, height=12)
        add(drawn, "text", words, x=x + 18, y=y)
        x += 34 + text_width(words, 11)
    return drawn, y
