"""What a step moves and runs, drawn: predicted, and beside it what the compiler made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from redco_cli.console.columns import columns
from redco_cli.console.numbers import duration, format_bytes
from redco_cli.console.screen import say

Document = Mapping[str, Any]


def show_collectives(document: Document, console: Console) -> None:
    """What a step moves, as predicted and as compiled, and what else is known of the compiled step.

    Args:
        document: what `as_json` of a report returns.
        console: where to.
    """
    compiled, predicted = document["compiled"], document["collectives"]
    heads = ["collectives in a step", "mesh axis", "count", "bytes per device", "what"]
    right = [False, False, True, True, False]
    if predicted:
        rows = [[c["kind"], c["axis"], str(c["count"]), format_bytes(c["bytes"]), c["what"]] for c in predicted]
        rows.append(["total", "", "", format_bytes(sum(c["bytes"] for c in predicted)), ""])
        columns(heads, rows, right, console, [""] * len(predicted) + ["bold"])
    elif compiled is None:
        say(console, "collectives in a step: none")
        say(console)
    if compiled is None:
        return
    if document["xla"]:
        say(console, ("compiler options: ", "dim"), options_text(document["xla"]))
    if compiled["changed"]:
        say(console, ("compiled with ", "dim"), compiled["changed"])
    if compiled["too_large"]:
        say(console, ("compiled", "bold"), f" for {compiled['target']}: ", ("does not fit", "bold red"))
        say(console, compiled["too_large"])
        say(console)
        return
    before, after = _by_kind(predicted), _by_kind(compiled["collectives"])
    rows = [
        [kind, axis, format_bytes(before.get((kind, axis), 0)), format_bytes(after.get((kind, axis), 0))]
        for kind, axis in {**before, **after}
    ]
    rows.append(["total", "", format_bytes(sum(before.values())), format_bytes(sum(after.values()))])
    if compiled["memory"] is not None:
        needed = format_bytes(sum(document["memory"].values()))
        rows.append(["memory per device", "", needed, format_bytes(compiled["memory"])])
    where = f" for {compiled['target']}" if compiled["target"] else ""
    title = f"compiled{where} in {duration(compiled['seconds'])}"
    columns([title, "mesh axis", "predicted", "compiled"], rows, [False, False, True, True], console)
    if compiled["target"]:
        _kernels(compiled, console)


def options_text(options: Mapping[str, Any]) -> str:
    """Options of XLA's compiler as they are written among its flags.

    >>> options_text({"xla_gpu_enable_latency_hiding_scheduler": True, "jax_optimization_level": "O2"})
    'xla_gpu_enable_latency_hiding_scheduler=true jax_optimization_level=O2'
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def _kernels(compiled: Document, console: Console) -> None:
    """What is known of a program that was compiled for a GPU or a TPU."""
    if compiled["overlapped"] is not None:
        share = f"{compiled['overlapped']:.0%} of the bytes move while matrix products or attention run"
        say(console, ("overlap: ", "dim"), share)
    if compiled["host"]:
        say(console, ("host memory: ", "dim"), f"{format_bytes(compiled['host'])} for each device")
    attention = ", ".join(compiled["attention"]) or "no kernel of its own"
    say(console, ("kernels: ", "dim"), f"{compiled['launches']:,} launches in a step; attention: {attention}")
    say(console)
    rows = [[one["shape"], format_bytes(one["bytes"]), str(one["times"]), one["source"]] for one in compiled["largest"]]
    columns(["largest arrays written", "bytes", "times", "where"], rows, [False, True, True, False], console)


def _by_kind(collectives: Sequence[Document]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for one in collectives:
        key = one["kind"], one["axis"]
        found[key] = found.get(key, 0) + one["bytes"]
    return found
