"""How fast a step is, drawn: its time with its range, what that is made of, tokens, MFU and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from redco_cli.console.columns import columns
from redco_cli.console.numbers import compact, readable
from redco_cli.console.screen import say

Document = Mapping[str, Any]

_BASES = {
    "compiled": "a walk over the compiled program",
    "plan": "work and traffic of the plan, coarser than a walk over the compiled program (--compile)",
}
_SMALLEST = 0.002
"""Share of a step below which a part of it has no row of its own."""


def show_speed(speed: Document, console: Console) -> None:
    """What is estimated of the speed of a step.

    Args:
        speed: `speed` of what `as_json` of a report returns.
        console: where to.
    """
    rows = [[one["name"], seconds(one["seconds"]), f"{one['seconds'] / speed['step']:.0%}"] for one in _parts(speed)]
    rows.append(["total", seconds(speed["step"]), f"{seconds(speed['low'])} to {seconds(speed['high'])}"])
    styles = [""] * (len(rows) - 1) + ["bold"]
    columns(["time of a step", "estimate", "share"], rows, [False, True, False], console, styles)
    say(console, ("made by: ", "dim"), _BASES[speed["basis"]])
    for label, text in _figures(speed):
        say(console, (f"{label}: ", "dim"), text)
    for note in speed["notes"]:
        say(console, (note, "dim"))
    say(console)


def seconds(value: float) -> str:
    """A time of a step.

    >>> seconds(12.38), seconds(0.01234)
    ('12.38 s', '12.34 ms')
    """
    return f"{readable(value)} s" if value >= 0.1 else f"{readable(1000 * value)} ms"


def _parts(speed: Document) -> Iterator[Document]:
    """What a step is made of, the smallest parts together."""
    small = [one for one in speed["terms"] if one["seconds"] < _SMALLEST * speed["step"]]
    yield from (one for one in speed["terms"] if one not in small)
    rest = sum(one["seconds"] for one in small)
    if rest >= _SMALLEST * speed["step"]:
        yield {"name": "all else", "seconds": rest}


def _figures(speed: Document) -> Iterator[tuple[str, str]]:
    if speed["tokens"] is not None:
        yield "throughput", f"{compact(speed['tokens'])} tokens/s, {compact(speed['tokens_of_a_chip'])} per chip"
    else:
        yield "throughput", f"{compact(speed['examples'])} examples/s"
    yield "MFU", f"{speed['mfu']:.1%} ({speed['mfu'] * speed['step'] / speed['high']:.1%} to {_at_best(speed):.1%})"
    yield "formula", speed["formula"]
    if speed["hidden"] >= _SMALLEST * speed["step"]:
        yield "beside work", f"{seconds(speed['hidden'])} of transfers, which are no part of the step time"
    if speed["compiler"] is not None:
        yield "compiler's own estimate of its kernels", f"{seconds(speed['compiler'])}, without transfers"
    if speed["price"] is not None:
        yield "cost", "; ".join(_costs(speed))
    unfounded = ", ".join(one["name"] for one in speed["constants"] if one["origin"].startswith(("assumed", "not")))
    yield "constants", f"in --json, with sources; without a source: {unfounded}"


def _at_best(speed: Document) -> float:
    found: float = speed["mfu"] * speed["step"] / speed["low"]
    return found


def _costs(speed: Document) -> Iterator[str]:
    """What the price of a chip-hour comes to."""
    low, high = speed["low"] / speed["step"], speed["high"] / speed["step"]
    for key, what in (
        ("cost_of_a_billion_tokens", "a billion tokens"),
        ("cost_of_a_million_examples", "a million examples"),
        ("cost_of_a_run", f"the {speed['steps']} steps of the run"),
    ):
        cost = speed[key]
        if cost is not None:
            yield f"{readable(cost)} for {what} ({readable(cost * low)} to {readable(cost * high)})"
    yield f"at {readable(speed['price'])} a chip-hour"
