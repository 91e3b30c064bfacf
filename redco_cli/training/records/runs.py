"""The runs below a directory, read from what each leaves behind: which there are, how far they came, what they reached.

Reads text files only: neither JAX nor a plugin nor data is needed, and nothing of a run is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redco_cli.errors import RedcoError, UsageError
from redco_cli.recipe.load import LENGTH_IN_STEPS, RESOLVED_NAME, shown
from redco_cli.recipe.redaction import without_secrets
from redco_cli.recipe.yaml12 import parse_yaml
from redco_cli.runtime.disk import is_held
from redco_cli.runtime.lease import holder_of
from redco_cli.training.records.metrics import METRICS_NAME, measured, read_records
from redco_cli.training.saving.ranking import Best, count_unimproved, improves

State = Literal["running", "held", "finished", "stopped", "never saved", "unreadable"]
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class RunSummary:
    """A run as a row of a table.

    Attributes:
        directory: its output directory.
        state: `running` while a process holds its lease or its records; `held` while its lease is that of a process of
            another machine, of which nothing more is known from here; else, by its newest checkpoint, `finished` at the
            last step, where `eval.patience` ended it or `run_fn` returned, `stopped` before, and `never saved` without
            one; `unreadable` where its files are damaged.
        step: optimizer steps recorded or saved.
        saved: the step of its newest checkpoint, where it continues; None without one.
        steps: the length of the run; None where nothing says it.
        metric: `eval.best_metric`.
        best: step and value of its best evaluation; None without any.
        written: seconds since 1970 of its last record; None without any.
        problem: why it is unreadable.
        holder: host and process that hold it; None for nobody.
        recipe: its resolved recipe, as plain data.
        records: those of its `metrics.jsonl`.
    """

    directory: Path
    state: State
    step: int = 0
    saved: int | None = None
    steps: int | None = None
    metric: str = "loss"
    best: Best = None
    written: float | None = None
    problem: str = ""
    holder: str | None = None
    recipe: Mapping[str, Any] | None = None
    records: Sequence[Mapping[str, Any]] = ()

    def as_plain(self) -> dict[str, Any]:
        """The row as plain data, without recipe and records."""
        return {
            "run": shown(self.directory),
            "state": self.state,
            "step": self.step,
            "saved": self.saved,
            "steps": self.steps,
            "metric": self.metric,
            "best": None if self.best is None else self.best[1],
            "best_step": None if self.best is None else self.best[0],
            "written": self.written,
            **({"problem": self.problem} if self.problem else {}),
            **({"holder": self.holder} if self.holder else {}),
        }

    def evaluation(self, which: Literal["last", "best"]) -> dict[str, Any]:
        """The values of the last or the best evaluation; none where there was none."""
        found = [record for record in self.records if record.get("kind") == "eval"]
        if which == "best":
            found = [record for record in found if self.best is not None and record["step"] == self.best[0]]
        return measured(found[-1]) if found else {}


def find_runs(directory: Path) -> list[RunSummary]:
    """Every run in a directory or below it, in the order of their names; a directory that is a run is one of them.

    Raises:
        UsageError: there is no such directory.
    """
    if not directory.is_dir():
        raise UsageError(str(directory), "is no directory", "name the directory that your runs are in: redco runs DIR")
    found = []
    for path, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "checkpoint-")))
        if RESOLVED_NAME in files:
            found.append(summarize(Path(path)))
    return found


def find_one(name: str) -> RunSummary:
    """The run in a directory.

    Raises:
        UsageError: there is none.
        RedcoError: its files are damaged.
    """
    directory = Path(name)
    if not (directory / RESOLVED_NAME).is_file():
        raise UsageError(name, f"is no run: it has no {RESOLVED_NAME}", "name the output directories of two runs")
    return _read(directory)


def summarize(directory: Path) -> RunSummary:
    """A run, `unreadable` where its files are damaged: one such run must not hide the others."""
    try:
        return _read(directory)
    except RedcoError as error:
        return RunSummary(directory, "unreadable", problem=str(error.problems[0]).partition("\n")[0])


def _read(directory: Path) -> RunSummary:
    recipe, steps = _recipe(directory / RESOLVED_NAME)
    file = directory / METRICS_NAME
    records = read_records(file) if file.exists() else []
    section = _section(recipe, "eval")
    metric, mode = section.get("best_metric", "loss"), section.get("best_mode", "min")
    best: Best = None
    for record in records:
        if record.get("kind") == "eval" and improves(record.get(metric), best, mode):
            best = (record["step"], record[metric])
    saved, is_done, loop = _newest_checkpoint(directory)
    step = max([record["step"] for record in records] + [saved or 0])
    state: State = "never saved" if saved is None else "stopped"
    holder, runs = holder_of(directory) or (None, False)
    named = None if holder is None else f"{holder.identity.host}, pid {holder.identity.pid}"
    if runs or is_held(file):
        state = "running"
    elif runs is None:
        state = "held"
    elif saved is not None and is_done:
        until = [record for record in records if record["step"] <= saved]
        patience, at_its_end = section.get("patience"), steps is not None and saved >= steps
        ran_out = isinstance(patience, int) and count_unimproved(until, metric, mode) >= patience
        ended = at_its_end or ran_out if loop is None else loop["is_over"]
        state = "finished" if ended else "stopped"
    written = max((record["time"] for record in records if "time" in record), default=None)
    holds = named if state in ("running", "held") else None
    return RunSummary(directory, state, step, saved, steps, metric, best, written, "", holds, recipe, records)


def _recipe(path: Path) -> tuple[dict[str, Any], int | None]:
    """A resolved recipe, and the length of its run: as it is written there, or else as the remark at its top says."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RedcoError(str(path), f"cannot be read: {error}", "restore it, or move the run away") from None
    recipe = parse_yaml(text, str(path)).data
    if not isinstance(recipe, dict):
        raise RedcoError(str(path), "is no recipe", "restore it, or move the run away")
    given = _section(recipe, "train").get("steps")
    length = LENGTH_IN_STEPS.search(text)
    return without_secrets(recipe), given if isinstance(given, int) else int(length[1]) if length else None


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}


def _newest_checkpoint(directory: Path) -> tuple[int | None, bool, Mapping[str, Any] | None]:
    """The step of the newest checkpoint, whether all that was due then was done, and what an outer loop says of it."""
    names = [_CHECKPOINT.fullmatch(name) for name in next(os.walk(directory), ("", [], []))[1]]
    steps = [int(match[1]) for match in names if match]
    if not steps:
        return None, False, None
    meta: Any = {}
    with contextlib.suppress(OSError, ValueError):  # orbax may write it otherwise one day: then nothing was put off
        meta = json.loads((directory / f"checkpoint-{max(steps)}" / "meta" / "metadata").read_bytes())
    meta = meta if isinstance(meta, dict) else {}
    return max(steps), not meta.get("put_off"), meta.get("outer")


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys at which two resolved recipes differ, `output_dir` apart, with both values."""
    first, second = dict(_flat(one)), dict(_flat(other))
    keys = [key for key in {**first, **second} if key != "output_dir"]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in recipe.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [(f"{prefix}{name}", value)]
    return found


def metrics_of(run: RunSummary) -> dict[str, tuple[Any, Any]]:
    """`eval/loss` and the like to the value at the end and at the best evaluation; `train/loss` has an end only."""
    last, best = run.evaluation("last"), run.evaluation("best")
    found = {f"eval/{name}": (last.get(name), best.get(name)) for name in {**last, **best}}
    trained = [record for record in run.records if record.get("kind") == "train"]
    if trained and "loss" in trained[-1]:
        found["train/loss"] = (trained[-1]["loss"], None)
    return found
