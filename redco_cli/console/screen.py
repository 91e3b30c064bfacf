r"""Messages, results and tables.

Text that comes from users is shown as it is: brackets in it are no markup, and on a terminal its control characters
and marks of direction are spelled out (`\x1b`) instead of obeyed. Every function takes the console to draw on, so that
a test can hand in its own. While a progress object is open, speak through `note` and `warn`, which draw above its line,
and keep results for when it has closed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redco_cli.console.numbers import readable
from redco_cli.errors import RedcoError

_LONGEST_FIELD = 400
_hushed: list[bool] = []
Piece = str | tuple[str, str]
"""Text, or text with a rich style."""

_CONTROL = (*range(0x20), *range(0x7F, 0xA0))
_FORMAT = (
    *(0x061C, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF),
    *(*range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)),
)
"""Characters that nobody sees: marks of direction, by which text reads otherwise than it is, breaks, tags. Those that
join letters are not among them: some scripts cannot do without."""
_SPELLED_OUT = {code: repr(chr(code))[1:-1] for code in (*_CONTROL, *_FORMAT) if chr(code) not in "\n\t"}


def open_console(file: TextIO, *, terminal: bool) -> Console:
    """A console that writes to `file`; on a `terminal` it draws, in colour unless `NO_COLOR` is set."""
    return Console(file=file, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def stdout() -> Console:
    """The console of results."""
    return _console_on(_behind(sys.stdout))


def stderr() -> Console:
    """The console of everything that is no result."""
    return _console_on(_behind(sys.stderr))


def spoken() -> Console:
    """The console of what one process says for all: how far they have come, and what they do."""
    return open_console(_nowhere(), terminal=False) if _hushed else stderr()


def hush() -> None:
    """From now on only warnings and errors of this process are shown: another one speaks for all."""
    _hushed.append(True)


def say(console: Console, *pieces: Piece) -> None:
    """One text, never wrapped or cropped, and a line end; without a terminal exactly the characters of `pieces`."""
    if console.is_terminal:
        styled = [(piece, "") if isinstance(piece, str) else piece for piece in pieces]
        console.print(Text.assemble(*((_visible(text, console), style) for text, style in styled)), soft_wrap=True)
    else:
        text = "".join(piece if isinstance(piece, str) else piece[0] for piece in pieces)
        console.file.write(_encodable(text, console) + "\n")
        console.file.flush()


def print_error(error: RedcoError, console: Console | None = None) -> None:
    """Each problem with its place, what is wrong and what to do; the text is exactly `str(problem)`."""
    for problem in error.problems:
        text = str(problem)
        place, remedy = len(problem.where), len(text) - len(problem.remedy)
        say(console or stderr(), (text[:place], "bold"), text[place:remedy], (text[remedy:], "green"))


def note(text: str, console: Console | None = None) -> None:
    """One line that informs."""
    say(console or spoken(), _one_line(text))


def warn(text: str, console: Console | None = None) -> None:
    """One line about something that deserves attention and does not end the command."""
    say(console or stderr(), ("warning: ", "bold yellow"), _one_line(text))


def result(document: Mapping[str, Any], as_json: bool, console: Console | None = None) -> None:
    """The result of a command.

    Args:
        document: mappings, sequences, text, numbers and paths.
        as_json: exactly one JSON document, numbers that are not finite as null; else a summary to read.
        console: where to; default: stdout.
    """
    console = console or stdout()
    if as_json:
        say(console, json.dumps(_finite(document), indent=2, allow_nan=False, default=os.fspath))
    else:
        for line in _summary(document):
            say(console, line)


def write_result(text: str, console: Console | None = None) -> None:
    """A result that is text, with a line end."""
    say(console or stdout(), text)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    best: int | None = None,
    console: Console | None = None,
) -> None:
    """A table, numbers to the right.

    Args:
        title: said above it.
        columns: their names.
        rows: one value per column each; `None` is an empty cell.
        best: index of the row to mark as the best.
        console: where to; default: stdout.
    """
    console = console or stdout()
    heads = [*columns, ""]
    cells = [[*map(readable, row), "best" if index == best else ""] for index, row in enumerate(rows)]
    right = [any(isinstance(row[place], int | float) for row in rows) for place in range(len(columns))] + [False]
    if console.is_terminal:
        drawn = Table(title=Text(_visible(title, console), "bold"), title_justify="left", box=SIMPLE_HEAD)
        for head, is_right in zip(heads, right, strict=True):
            drawn.add_column(Text(_visible(head, console)), justify="right" if is_right else "left")
        for index, row in enumerate(cells):
            drawn.add_row(*(Text(_visible(cell, console)) for cell in row), style="green" if index == best else None)
        console.print(drawn)
        return
    widths = [max(len(row[place]) for row in (heads, *cells)) for place in range(len(heads))]
    say(console, title)
    for row in (heads, *cells):
        aligned = (f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(row, widths, right, strict=True))
        say(console, f"  {'  '.join(aligned)}".rstrip())


def prediction(index: int, example: Mapping[str, Any], predicted: Any, console: Console | None = None) -> None:
    """One prediction below the example it belongs to; a text that continues a `prompt` follows it without a break.

    Args:
        index: of the example.
        example: its fields that can be shown.
        predicted: text, or any JSON-able value.
        console: where to; default: stdout.
    """
    console = console or stdout()
    say(console, (f"--- {index} ---", "dim"))
    if isinstance(predicted, str) and isinstance(example.get("prompt"), str):
        say(console, (example["prompt"], "bold"), predicted)
        return
    for name, value in example.items():
        say(console, (f"{name}: ", "dim"), _shortened(value))
    text = predicted if isinstance(predicted, str) else json.dumps(_finite(predicted), ensure_ascii=False)
    say(console, ("=> ", "bold"), text)


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_FIELD else f"{text[:_LONGEST_FIELD]}..."


def masked_tokens(tokens: Sequence[str], weights: Sequence[float], title: str, console: Console | None = None) -> None:
    """Decoded tokens, those that carry loss set apart: by colour where there is colour, else by `[loss]...[/loss]`.

    A weight that is not 1 is written before its tokens.

    Args:
        tokens: the text of each token of one sequence.
        weights: how much each token counts in the loss; 0 for one that carries none.
        title: said above, with how many tokens carry loss.
        console: where to; default: stdout.
    """
    console = console or stdout()
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    pieces: list[Piece] = []
    for weight, run in groupby(zip(tokens, weights, strict=True), key=lambda pair: float(pair[1])):
        text, told = _visible("".join(token for token, _ in run), console), "" if weight == 1 else f" {weight:g}"
        if not weight:
            pieces.append((text, "dim"))
        elif coloured:  # a line break has nothing to colour: show it
            pieces += [(f"{told} ", "bold yellow")] if told else []
            pieces.append((text.replace("\n", "⏎\n"), "black on yellow" if told else "black on green"))
        else:
            pieces.append(f"[loss{told}]{text}[/loss]")
    say(console, (title, "bold"), f" ({sum(map(bool, weights))} of {len(tokens)} tokens carry loss)")
    say(console, *pieces)


def _behind(stream: TextIO) -> TextIO:
    """The stream itself, where rich stands in for it while a live line is open."""
    real: TextIO = getattr(stream, "rich_proxied_file", stream)
    return real


@functools.cache
def _nowhere() -> TextIO:
    return open(os.devnull, "w")


@functools.lru_cache(maxsize=4)
def _console_on(stream: TextIO) -> Console:
    """One console per stream, as only the console of the live line can draw above it."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return open_console(stream, terminal=stream.isatty() and not in_ci and not is_dumb)


def spelled_out(text: str) -> str:
    r"""Text that a terminal shows instead of obeying it: what it would obey is written as Python does (`\x1b`)."""
    return text.translate(_SPELLED_OUT)


def _visible(text: str, console: Console) -> str:
    return _encodable(spelled_out(text), console)


def _encodable(text: str, console: Console) -> str:
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary(value: Any) -> Iterator[str]:
    """The lines of a document for people: `key  value`, deeper levels indented, one `-` per item of a list."""
    if isinstance(value, Mapping):
        width = max((len(str(key)) for key in value), default=0)
        for key, item in value.items():
            lines = list(_summary(item))
            if isinstance(item, Mapping | list | tuple) or len(lines) > 1:
                yield str(key)
                yield from (f"  {line}" for line in lines)
            else:
                yield f"{key!s:<{width}}  {''.join(lines)}".rstrip()
    elif isinstance(value, list | tuple):
        for item in value:
            for index, line in enumerate(_summary(item)):
                yield f"{'- ' if index == 0 else '  '}{line}"
    else:
        yield from readable(value).split("\n")
