"""How a model is split over devices, drawn: parameters, memory, traffic, and whether it fits.

On a terminal the parameters are a tree and sizes have bars; elsewhere each group of parameters is one line with its
whole path, and numbers stand in columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from redco_cli.console.collectives import show_collectives
from redco_cli.console.columns import TIMES, columns, draws_signs
from redco_cli.console.comparison import show_comparison
from redco_cli.console.numbers import format_bytes
from redco_cli.console.screen import Piece, say, stdout, warn
from redco_cli.console.speed import show_speed

Document = Mapping[str, Any]

_SPLIT_STYLES = {
    "replicated": "dim",
    "data": "",
    "fsdp": "green",
    "columns": "cyan",
    "rows": "yellow",
    "vocabulary": "magenta",
    "experts": "red",
}
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "plugin_state": "state of the plugin",
    "activations": "activations",
    "logits": "logits",
    "batch": "batch",
    "gathered": "gathered parameters",
}
_BAR = 30  # cells
_EIGHTHS = " ▏▎▍▌▋▊▉"


class _Line(NamedTuple):
    """A row of the tree: a level of the paths, and the group that ends there."""

    label: str
    group: Document | None


def show_plan(document: Document, console: Console | None = None) -> None:
    """A whole report.

    Args:
        document: what `as_json` of a report returns.
        console: where to; default: stdout.
    """
    console = console or stdout()
    for line in _heading(document):
        say(console, *line)
    say(console)
    _parameters("parameters", document["groups"], console)
    if document["state"]:
        _parameters("state of the plugin", document["state"], console)
    _memory(document, console)
    show_collectives(document, console)
    if document["speed"] is not None:
        show_speed(document["speed"], console)
    _runners_up(document, console)
    if document["comparison"] is not None:
        show_comparison(document["comparison"], console)
    for warning in document["warnings"]:
        warn(warning, console)
    say(console, *_verdict(document))


def memory_kinds(memory: Mapping[str, int]) -> dict[str, int]:
    """The kinds of memory to show: state of the plugin only where it keeps some."""
    return {kind: size for kind, size in memory.items() if size or kind != "plugin_state"}


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh as it is written on the command line.

    >>> mesh_text({"data": 1, "fsdp": 4, "tensor": 2})
    'data=1,fsdp=4,tensor=2'
    """
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def sizes_text(group: Document) -> str:
    """The sizes of the dims of a group, each with the parts it is cut into, as `9216/8` by `36864`."""
    cut = [
        f"{size}/{parts}" if parts > 1 else str(size)
        for size, parts in zip(group["shape"], group["parts"], strict=True)
    ]
    if group["layers"]:
        cut[0] = f"{cut[0]} layers"
    return f" {TIMES} ".join(cut) or "one number"


def spec_text(spec: Sequence[Sequence[str]]) -> str:
    """For each dim the mesh axes that it is split over.

    >>> spec_text([[], ["tensor"]]), spec_text([["fsdp", "tensor"], []])
    ('[-, tensor]', '[fsdp+tensor, -]')
    """
    return f"[{', '.join('+'.join(axes) or '-' for axes in spec)}]"


def _heading(document: Document) -> Iterator[list[Piece]]:
    chosen, devices = document["chosen"], document["devices"]
    where = document["target"] or f"{devices} device{'' if devices == 1 else 's'}"
    parameters = f": {document['parameters']:,} parameters, {format_bytes(document['bytes'])}"
    yield [(document["model"], "bold"), f"{parameters}, on {where}"]
    yield [("mesh: ", "dim"), (mesh_text(chosen["mesh"]), "bold"), f" ({chosen['reason']})" if chosen["reason"] else ""]
    length = "" if document["seq_length"] is None else f" of {document['seq_length']} tokens"
    examples = f"{document['global_batch_size']} examples{length}, micro-batch {chosen['micro_batch_size']}"
    yield [("step: ", "dim"), f"{examples}, remat {chosen['remat']}, computed in {document['dtype']}"]


def _parameters(title: str, groups: Sequence[Document], console: Console) -> None:
    heads = [title, "count", "shape/parts", "split over", "per device", "why"]
    right = [False, True, False, False, True, False]
    rows, styles = [], []
    is_tree = console.is_terminal and draws_signs(console)
    for line in _tree(groups) if is_tree else _paths(groups):
        group = line.group
        if group is None:
            rows.append([line.label, "", "", "", "", ""])
            styles.append("bold")
            continue
        share = format_bytes(group["bytes_per_device"])
        rows.append(
            [line.label, str(group["count"]), sizes_text(group), spec_text(group["spec"]), share, group["reason"]]
        )
        styles.append(_SPLIT_STYLES[group["split"]])
    columns(heads, rows, right, console, styles)


def _paths(groups: Sequence[Document]) -> Iterator[_Line]:
    for group in groups:
        yield _Line(group["path"], group)


def _tree(groups: Sequence[Document]) -> Iterator[_Line]:
    """The levels of the paths, a level with a single one below it joined to it."""
    tree: dict[str, Any] = {}
    for group in groups:
        level = tree
        *above, last = group["path"].split("/")
        for piece in above:
            level = level.setdefault(f"{piece}/", {})
        level[last] = group
    yield from _branches(tree, "")


def _branches(tree: Mapping[str, Any], guides: str) -> Iterator[_Line]:
    for index, (name, below) in enumerate(tree.items()):
        is_last = index == len(tree) - 1
        while name.endswith("/") and len(below) == 1:
            ((inner, below),) = below.items()
            name += inner
        branch, beyond = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        if name.endswith("/"):
            yield _Line(guides + branch + name, None)
            yield from _branches(below, guides + beyond)
        else:
            yield _Line(guides + branch + name, below)


def _memory(document: Document, console: Console) -> None:
    memory, limit = memory_kinds(document["memory"]), document["device_memory"]
    total = sum(memory.values())
    full = max(total, limit or 0)
    rows = [[KINDS[kind], format_bytes(size), _bar(size, full, console)] for kind, size in memory.items()]
    rows.append(["total", format_bytes(total), _bar(total, full, console)])
    if limit is not None:
        rows.append(["device memory", format_bytes(limit), _bar(limit, full, console)])
    styles = [""] * len(memory) + ["bold", "dim"]
    columns(["memory on one device", "bytes", ""], rows, [False, True, False], console, styles)


def _bar(size: float, full: float, console: Console) -> str:
    """A bar of `size`, as long as `_BAR` cells for `full`."""
    cells = _BAR * size / full if full else 0.0
    if not console.is_terminal or not draws_signs(console):
        return "#" * round(cells)
    eighths = max(round(8 * cells), 1 if size else 0)  # the smallest amount is still seen
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _runners_up(document: Document, console: Console) -> None:
    if not document["runners_up"]:
        return
    heads = ["mesh", "remat", "micro-batch", "memory", "traffic", "why"]
    rows = [
        [
            mesh_text(choice["mesh"]),
            choice["remat"],
            str(choice["micro_batch_size"]),
            format_bytes(choice["memory"]),
            format_bytes(choice["traffic"]),
            choice["reason"],
        ]
        for choice in (document["chosen"], *document["runners_up"])
    ]
    rows[0][0] += " (chosen)"
    styles = ["green"] + [""] * len(document["runners_up"])
    columns(heads, rows, [False, False, True, True, True, False], console, styles)


def _verdict(document: Document) -> list[Piece]:
    needed, limit = format_bytes(sum(document["memory"].values())), document["device_memory"]
    if limit is None:
        hint = "with --device-memory, such as 80GiB, what is left open is chosen to fit"
        return [("needs: ", "bold"), f"{needed} per device; {hint}"]
    amounts, compiled = f"{needed} of {format_bytes(limit)} per device", document["compiled"]
    if compiled is not None and compiled["target"] and compiled["memory"]:
        amounts = (
            f"{format_bytes(compiled['memory'])} of {format_bytes(limit)} per device as compiled, {needed} by plan"
        )
    if document["fits"]:
        return [("fits: ", "bold green"), amounts]
    remedies = "".join(f"\n  -> {remedy}" for remedy in document["remedies"])
    return [("does not fit: ", "bold red"), f"{amounts}{remedies}"]
