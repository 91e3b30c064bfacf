"""The commands that look at runs, and what the others print of one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redco_cli.console import hush, note, print_error, result, table, warn, write_result
from redco_cli.data.jsonl import read_lines
from redco_cli.errors import UsageError
from redco_cli.recipe.load import RESOLVED_NAME, find_run, load_recipe, shown
from redco_cli.runtime.peers.multihost import current_connection
from redco_cli.runtime.rendezvous.join import joined
from redco_cli.shell import Checkpoint, Json, Overrides
from redco_cli.training.records.runs import RunSummary, differing_keys, find_one, find_runs, metrics_of

if TYPE_CHECKING:  # the command line must not pay for JAX before it needs it
    from redco_cli.training.outcome import TrainResult


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|RECIPE", help="The output directory of a run, or its recipe.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = "last",
    as_json: Json = False,
) -> None:
    """Evaluate a run on its eval data or on others, each example once. Nothing of the run changes."""
    with joined(load_recipe(find_run(target)[0], overrides or ()), note, print_error, hush):
        from redco_cli.run import evaluate as run_evaluate

        found = run_evaluate(target, overrides or (), checkpoint=checkpoint)
        if as_json:
            result({"parameters": found.parameters, "examples": found.examples, "metrics": dict(found.values)}, as_json)
        else:
            columns = ["examples", *found.values]
            table(f"evaluation of {found.parameters}", columns, [[found.examples, *found.values.values()]])


def runs(
    directories: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR | RUN RUN]", help="Where your runs are (default: runs), or two to compare."),
    ] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the losses of both, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """List runs with state and best metric, or compare two: what differs in their recipes, what they reached."""
    names = directories or ["runs"]
    if len(names) == 1 and plot is None:
        show_runs(find_runs(Path(names[0])), as_json)
        return
    if len(names) != 2:
        given = f"{len(names)} given" if directories else "none given"
        raise UsageError("redco runs", f"{given}, but two runs are compared", "name their output directories")
    if Path(names[0]).resolve() == Path(names[1]).resolve():
        raise UsageError(names[1], "is the same run twice", "name two runs")
    one, other = find_one(names[0]), find_one(names[1])
    if plot is not None:
        from redco_cli.training.records.plot import plot_two

        plot_two({name: run.records for name, run in zip(names, (one, other), strict=True)}, Path(plot))
    show_comparison((one, other), plot, as_json)


def check_prompt(
    prompt: str | None, chats: bool, input_file: str | None, output_file: str | None, show: int, as_json: bool
) -> None:
    """Refuses options of `redco predict` that a prompt, a chat, or an input that is no file leaves nothing to do.

    Raises:
        UsageError: naming the option.
    """
    asked = "--chat" if chats else "--prompt"
    others = {"--input": input_file, "--output": output_file, "--show": show or None}
    others |= {"--prompt": prompt, "--json": as_json or None} if chats else {}
    for option, value in others.items() if chats or prompt is not None else ():
        if value is not None:
            raise UsageError(asked, f"{option} is given too, and the two exclude each other", "keep one of them")
    if input_file == "-" and output_file is None and show:
        raise UsageError("--show", "--input - prints every prediction, unless there is an --output", "leave it out")


def read_stdin() -> list[dict[str, Any]]:
    """The examples on standard input, JSON lines.

    Raises:
        UsageError: several processes would share it.
        DataError: they cannot be read.
    """
    if current_connection() is not None:
        problem = "only one process could read the standard input, but several predict"
        raise UsageError("--input -", problem, "write the examples to a file that all share, and name it")
    return read_lines(sys.stdin.buffer, "standard input")


def converse(target: str, overrides: Sequence[str], checkpoint: str) -> None:
    """Answers the lines of standard input one by one; on a terminal it asks for them.

    Raises:
        UsageError: several processes would share it, or the plugin knows no conversations.
    """
    from redco_cli.run import chat

    if current_connection() is not None:
        raise UsageError("--chat", "only one process could be talked to, but several predict", "run one process")
    for answer in chat(target, _typed(), overrides, checkpoint=checkpoint):
        write_result(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))


def _typed() -> Iterator[str]:
    """Lines as they are typed, until the end of the input; empty ones are not asked."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201 - rich would end the line
        line = sys.stdin.buffer.readline().decode(errors="replace")
        if not line:
            return
        if line.strip():
            yield line.strip()


def show_predictions(lines: Sequence[Mapping[str, Any]], prompt: str | None, as_json: bool) -> None:
    """Prints predictions: that of a prompt as it is, others as the lines of a predictions file.

    With `as_json`, all as one JSON document.
    """
    if as_json:
        result({"examples": len(lines), "predictions": list(lines)}, as_json)
        return
    for line in lines:
        if prompt is not None and isinstance(line["prediction"], str):
            write_result(line["prediction"])
        else:
            write_result(json.dumps(line["prediction"] if prompt is not None else line, ensure_ascii=False))


def show_training(outcome: TrainResult, as_json: bool) -> None:
    """Prints what a run has come to: its evaluations, where its checkpoints are; once it is finished, what is next."""
    if outcome.evaluations and not as_json:
        columns = list(outcome.evaluations[-1][1])
        rows = [[step, *(values.get(name) for name in columns)] for step, values in outcome.evaluations]
        best = next((row for row, (step, _) in enumerate(outcome.evaluations) if step == outcome.best), None)
        table("evaluations", ["step", *columns], rows, best)
    document = {
        "output_dir": str(outcome.output_dir),
        "step": outcome.step,
        **_means(outcome, as_json),
        "best_checkpoint": None if outcome.best is None else f"checkpoint-{outcome.best}",
        "checkpoint": outcome.checkpoint.name,
    }
    if as_json:
        document["evaluations"] = [{"step": step, **values} for step, values in outcome.evaluations]
        document["was_finished"] = outcome.was_finished
    if outcome.was_finished:
        document["next"] = _what_is_next(outcome)
    result(document, as_json)


def _means(outcome: TrainResult, as_json: bool) -> dict[str, Any]:
    """What a person could take for the last step's values says what it is."""
    if as_json:
        return {"train": dict(outcome.train)}
    return {f"mean of steps {outcome.began + 1} to {outcome.step}": dict(outcome.train)} if outcome.train else {}


def _what_is_next(outcome: TrainResult) -> dict[str, str]:
    """Commands for what can be done with a finished run."""
    run, recipe = shown(outcome.output_dir), shown(outcome.output_dir / RESOLVED_NAME)
    return {
        "train longer": f"redco train {run} train.steps=N",
        "predict": f"redco predict {run}",
        "export": f"redco export {run} --output DIR",
        "train on from its parameters": f"redco train {recipe} model.params={run} output_dir=NEW train.steps=N",
    }


def show_runs(runs: Sequence[RunSummary], as_json: bool) -> None:
    """Prints a table of runs."""
    rows = [run.as_plain() for run in runs]
    if as_json:
        result({"runs": rows}, as_json)
        return
    for row in rows:
        row["step"] = row["step"] if row["steps"] is None else f"{row['step']}/{row['steps']}"
        if row["state"] == "stopped":
            row["state"] = f"stopped at {row['saved']}"
        elif "holder" in row:
            row["state"] += f" {'on' if row['state'] == 'running' else 'by'} {row['holder']}"
        row["written"] = None if row["written"] is None else f"{datetime.fromtimestamp(row['written']):%Y-%m-%d %H:%M}"
    columns = {
        "run": "run",
        "state": "state",
        "step": "step",
        "metric": "metric",
        "best": "best",
        "best_step": "at step",
    }
    columns["written"] = "last written"
    table("runs", list(columns.values()), [[row[name] for name in columns] for row in rows])
    for run in runs:
        if run.problem:
            warn(run.problem)


def show_comparison(runs: tuple[RunSummary, RunSummary], picture: str | None, as_json: bool) -> None:
    """Prints what differs between two runs: keys of their recipes, and what they reached."""
    names = [shown(run.directory) for run in runs]
    keys = differing_keys(*(run.recipe or {} for run in runs))
    first, second = map(metrics_of, runs)
    metrics = {
        name: {"end": [one[0], two[0]], "best": [one[1], two[1]]}
        for name in {**first, **second}
        for one, two in [(first.get(name, _NEITHER), second.get(name, _NEITHER))]
    }
    if as_json:
        document = {"runs": [run.as_plain() for run in runs], "recipe": {key: list(pair) for key, pair in keys.items()}}
        result({**document, "metrics": metrics, "plot": picture}, as_json)
        return
    show_runs(runs, as_json)
    table("recipe", ["key", *names], [[key, *map(_written, pair)] for key, pair in keys.items()])
    ends = [f"{name}, {which}" for name in names for which in ("end", "best")]
    table(
        "metrics",
        ["metric", *ends],
        [[name, *first.get(name, _NEITHER), *second.get(name, _NEITHER)] for name in metrics],
    )
    note("curves of both: add --plot FILE.png" if picture is None else f"wrote {picture}")


_NEITHER = (None, None)


def _written(value: object) -> str:
    """A value of a recipe, as a recipe has it; of a text of several lines, such as a chat template, the first."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    first, _, rest = value.strip().partition("\n")
    return f"{first} ..." if rest else value
