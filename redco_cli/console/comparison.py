"""Two plans side by side, drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from redco_cli.console.columns import columns
from redco_cli.console.numbers import format_bytes
from redco_cli.console.screen import say
from redco_cli.console.speed import seconds

Document = Mapping[str, Any]

_TITLES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "seconds": ("time of a step, estimated", seconds),
    "memory": ("memory on one device", format_bytes),
    "traffic": ("moved in a step, predicted", format_bytes),
}


def show_comparison(comparison: Document, console: Console) -> None:
    """What the second of two plans costs more than the first, or less.

    Args:
        comparison: `comparison` of what `as_json` of a report returns.
        console: where to.
    """
    say(console, ("compared: ", "bold"), f"{comparison['second']}, beside {comparison['first']}")
    for label in ("second", "first"):
        if comparison[f"{label}_fits"] is False:
            say(console, f"{comparison[label]} does not fit, and has no step time")
    say(console)
    for key, (title, written) in _TITLES.items():
        shown = [one for one in comparison[key] if one["first"] or one["second"]]
        if not shown:
            continue
        rows = [
            [one["name"], written(one["first"]), written(one["second"]), _more(one["second"] - one["first"], written)]
            for one in shown
        ]
        styles = [""] * (len(rows) - 1) + ["bold"]
        columns([title, "this plan", "the other", "difference"], rows, [False, True, True, True], console, styles)


def _more(difference: float, written: Callable[[float], str]) -> str:
    """A difference with its sign."""
    return f"{'-' if difference < 0 else '+'}{written(abs(difference))}" if difference else "0"
