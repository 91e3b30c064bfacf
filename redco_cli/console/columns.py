"""Tables of a plan: numbers in columns, and a last column that breaks its lines or becomes notes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console

from redco_cli.console.screen import say

TIMES = "\N{MULTIPLICATION SIGN}"
_LEAST_ROOM = 20  # of a column that breaks its lines


def columns(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[bool],
    console: Console,
    styles: Sequence[str] | None = None,
) -> None:
    """Rows below their heads, and an empty line. Where a terminal has no room for the last column, it gets notes."""
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    used = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = max(console.width - used, 0) if console.is_terminal else widths[-1]
    notes: dict[str, str] = {}
    if min(widths[-1], _LEAST_ROOM) > room:
        notes = {text: str(number) for number, text in enumerate(dict.fromkeys(row[-1] for row in rows if row[-1]), 1)}
        rows = [[*row[:-1], notes.get(row[-1], "")] for row in rows]
        widths[-1] = room = max(map(len, (heads[-1], *notes.values())))
    for index, row in enumerate((heads, *rows)):
        first, *more = [row[-1]] if len(row[-1]) <= room else textwrap.wrap(row[-1], room) or [""]
        aligned = (f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip((*row[:-1], first), widths, right, strict=True))
        lines = ["  ".join(aligned).rstrip(), *(" " * used + line for line in more)]
        style = "bold" if index == 0 else styles[index - 1] if styles else ""
        say(console, (cell("\n".join(lines), console), style))
        if index == 0 and console.is_terminal:
            say(console, (("─" if draws_signs(console) else "-") * (used + min(widths[-1], room)), "dim"))
    for text, number in notes.items():
        say(console, (f"{number:>3}  {cell(text, console)}", "dim"))
    say(console)


def cell(text: str, console: Console) -> str:
    """A text with its signs spelled out where they cannot be drawn."""
    return text if draws_signs(console) else text.replace(TIMES, "x")


def draws_signs(console: Console) -> bool:
    """Whether it can draw more than letters."""
    return console.encoding.lower().startswith("utf")
