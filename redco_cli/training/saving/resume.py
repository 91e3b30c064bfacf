"""Where a run starts: at a checkpoint of its own, at the parameters of another run, or afresh."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_cli.errors import Problem, RecipeError, StorageError
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import moved, pin_paths
from redco_cli.recipe.redaction import without_secrets
from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.disk import check_directory
from redco_cli.runtime.peers.multihost import current_connection, is_main_process, process_allgather, process_index
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.constant import pinned_models
from redco_cli.training.saving.extension import LENGTHS, extended
from redco_cli.training.saving.identity import Continued, Identity, begun, compared
from redco_cli.training.saving.initial import InitialCheckpoint, find_initial_checkpoints
from redco_cli.training.saving.ranking import Best
from redco_cli.training.saving.selection import (
    first_undamaged,
    named_checkpoint,
    own_checkpoints,
    refuse_damaged,
    skip_without_meta,
    steps_of,
)
from redco_cli.training.timeline import Timeline

_OF_EVAL = ("every", "at_start", "predict", "batch_size", "patience")
_OF_TRAIN = ("micro_batch_size", "remat", "xla", "profile", "max_nonfinite_steps", "max_compilations", "max_time")
FREE_TO_CHANGE = (
    *("output_dir", "mesh", "planning", "sharding", "logging", "checkpoint", "predict", "data.workers"),
    *(f"eval.{key}" for key in _OF_EVAL),
    *(f"train.{key}" for key in _OF_TRAIN),
)
"""Keys that do not change what a step computes, so that a run may continue with other values."""
FREE_WHILE_UNRANKED = ("eval.best_metric", "eval.best_mode", "data.eval")
"""Keys that decide which checkpoint is best: free as well while none of the run's has been evaluated."""
_OTHER_OUTPUT = "choose another output_dir, or correct its permissions"
_SHARED_OUTPUT = "put output_dir on a disk that all processes share"
_PATIENCE = 10.0
"""Seconds in which what one process wrote must be seen by all: file systems of a network remember what was missing."""


def output_directory(name: str, where: str) -> Path:
    """The output directory, which is not made yet.

    Raises:
        StorageError: it could not be made or written.
    """
    directory = Path(name).resolve()
    check_directory(directory, where, _OTHER_OUTPUT)
    return directory


def open_output(directory: Path, where: str) -> None:
    """Makes the output directory, if need be, and proves that it can be written and that all share it.

    Raises:
        StorageError: it cannot; or, on all processes, one does not see what the first writes there.
    """
    probe, mark = directory / f".writable-{process_index()}", directory / f".shared-{secrets.token_hex(8)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"redco")
        probe.unlink()
        if is_main_process() and current_connection() is not None:
            mark.touch()
    except OSError as error:
        problem = f"{shown(directory)} cannot be written: {error.strerror or error}"
        raise StorageError(where, problem, _OTHER_OUTPUT) from error
    if current_connection() is not None:
        _prove_shared(directory, mark, where)


def _prove_shared(directory: Path, mark: Path, where: str) -> None:
    """All look for the mark of the first: its name is new, so that none remembers from before that it is missing."""
    try:
        written = Path(process_allgather("shared output", str(mark))[0])
        refuse_unshared(directory, written.name, where, f"what process 0 writes to {written.parent}")
    finally:
        if is_main_process():
            mark.unlink(missing_ok=True)


def refuse_unshared(directory: Path, name: str, where: str, what: str) -> None:
    """Refuses, on all processes, a directory in which one of them does not find what the first has there.

    Args:
        directory: as this process knows it.
        name: what must be in it.
        where: the place for the error.
        what: the thing, for the error.

    Raises:
        StorageError: naming the first process that does not see it.
    """
    seen, deadline = False, time.monotonic() + _PATIENCE
    while not (seen := _lists(directory, name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [other for other, sees in enumerate(process_allgather("sees shared output", seen)) if not sees]
    if blind:
        others = f" and {len(blind) - 1} more do" if blind[1:] else " does"
        raise StorageError(where, f"process {blind[0]}{others} not see {what}", _SHARED_OUTPUT)


def _lists(directory: Path, name: str) -> bool:
    """Reads the directory itself, since opening it makes the file systems of a network ask what is new."""
    try:
        return name in os.listdir(directory)
    except OSError:
        return False


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        directory: its output directory.
        checkpoints: where it saves.
        pinned: the recipe, in which models that are never updated have `params` pinned to one checkpoint each.
        identity: with which code and data it trains.
        source: where the checkpoint to continue is; None to start afresh.
        step: optimizer steps done.
        metric: the value that ranks the checkpoint to continue; None where it was not evaluated.
        best: step and value of the run's best evaluation until then; None without any.
        put_off: whether the evaluation of this step is still to be done.
        data: where the run was in data of unknown length; None for data whose order follows from the step alone.
        initial: by name of a model, the checkpoint of another run whose parameters a fresh run begins with.
        said: what to tell of a run whose length has changed; empty for others.
        left: steps of the checkpoints that it leaves behind, because it goes on from one before them.
        folder: where these go, in `directory`.
        continued: what it goes on with that the checkpoint was not trained with.
    """

    directory: Path
    checkpoints: Checkpoints
    pinned: Recipe
    identity: Identity
    source: Checkpoints | None = None
    step: int = 0
    metric: float | None = None
    best: Best = None
    put_off: bool = False
    data: Mapping[str, Any] | None = None
    initial: Mapping[str, InitialCheckpoint] = field(default_factory=dict)
    said: str = ""
    left: tuple[int, ...] = ()
    folder: str = ""
    continued: Continued = field(default_factory=Continued)


def find_start(loaded: LoadedRecipe, timeline: Timeline, identity: Identity) -> tuple[Start, Timeline]:
    """Where to start, by `checkpoint.resume` and what is in the output directory. Reads the whole checkpoint.

    A run that continues needs `model.params` no more, nor the path it began from: its own checkpoint has what they had.

    Args:
        loaded: the recipe.
        timeline: of a fresh run with it.
        identity: of the job, to be compared with that of the checkpoint.

    Returns:
        Where it starts, and its timeline, which for a run whose length has changed knows of the lengths before.

    Raises:
        StorageError: `never`, but there is a run; or a path that is no checkpoint, or a damaged one; or a run of which
            every checkpoint is damaged; or `model.params` names none that is whole; or a process does not see what the
            first has in the output directory.
        RecipeError: the recipe differs from the checkpoint's in a way that changes what a step computes.
        PluginError, DataError: so do the code or the data, and nothing permits that.
    """
    directory = output_directory(loaded.recipe.output_dir, loaded.where("output_dir"))
    choice, where = loaded.recipe.checkpoint.resume, loaded.where("checkpoint.resume")
    source = own = own_checkpoints(directory, loaded.recipe)
    steps = steps_of(own)
    if steps and current_connection() is not None:  # the same on all: those that the first sees
        newest, place = own.path(steps[-1]).name, loaded.where("output_dir")
        refuse_unshared(directory, newest, place, f"{newest} in {shown(directory)}, which process 0 has")
    if choice == "never":
        if steps:
            remedy = "set checkpoint.resume: auto to continue it, or choose another output_dir"
            raise StorageError(where, f"never, but {shown(own.path(steps[-1]))} exists", remedy)
    elif continued := steps if choice == "auto" else _begun_from(choice, own, steps):
        step = first_undamaged(own, continued[::-1])
    elif choice != "auto":
        source, step = named_checkpoint(choice, loaded.recipe, where, "auto, never")
        refuse_damaged(source, step)
    if choice == "never" or (choice == "auto" and not steps):
        fresh = pinned_models(loaded, None)
        initial = find_initial_checkpoints(fresh)
        return Start(directory, own, fresh.recipe, identity, initial=initial, continued=begun(loaded)), timeline
    newer = [other for other in own.steps() if other > step]
    if newer:
        remedy = "choose another output_dir, or move the newer ones away"
        raise StorageError(where, f"{choice} is older than {shown(own.path(newer[-1]))}", remedy)
    skip_without_meta(own)
    ranked = own.best() is not None
    free = FREE_TO_CHANGE if ranked else FREE_TO_CHANGE + FREE_WHILE_UNRANKED
    before = moved(source.meta(step).recipe, source.directory, pin_paths(loaded).recipe.model_dump(mode="json"))
    loaded = pinned_models(loaded, before)
    now = pin_paths(loaded, before).recipe.model_dump(mode="json")
    refuse_changes(before, now, (*free, *LENGTHS), loaded.where, source.path(step).name)
    earlier = [other for other in steps_of(own) if other < step] if source is own else []
    found = extended(loaded, timeline, source, step, earlier)
    if not found.is_exact:
        refuse_changes(before, now, (*free, "train.steps"), loaded.where, source.path(step).name)
    for other in found.left:
        own.skip(other)
    meta = source.meta(found.step)
    changed = compared(loaded, identity, source.path(found.step), meta, ranked=ranked)
    same = not changed.eval_changed and all(_at(before, key) == _at(now, key) for key in FREE_WHILE_UNRANKED)
    metric, best = (meta.metric, meta.best) if same else (None, None)
    at = (source, found.step, metric, best, meta.put_off, meta.data)
    said, left, folder = found.said, found.left, found.folder
    start = Start(directory, own, loaded.recipe, identity, *at, {}, said, left, folder, changed)
    return start, found.timeline


def _begun_from(choice: str, own: Checkpoints, steps: Sequence[int]) -> list[int]:
    """The steps that a run saved since it began from the checkpoint that a path names: they continue it."""
    for index, step in enumerate(steps):
        if own.damage(step, ("meta",)) is None and _at(own.meta(step).recipe, "checkpoint.resume") == choice:
            return list(steps[index:])
    return []


def refuse_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    free: Sequence[str],
    where: Callable[[str], str],
    checkpoint: str,
) -> None:
    """Refuses to continue a run whose recipe has changed in a key that is not among the `free` ones, or below one.

    Raises:
        RecipeError: naming each such key, with both values. Secrets are not compared: they are in no checkpoint.
    """
    before = without_secrets(before)
    changed = [key for key in _differences(before, now) if not any(f"{key}.".startswith(f"{one}.") for one in free)]
    if changed:
        raise RecipeError.of(
            [
                Problem(
                    where(key),
                    f"{_told(_at(now, key))}{_gone(key, _at(now, key))}, but {checkpoint} was trained with "
                    f"{_told(_at(before, key))}",
                    "restore the value, or choose another output_dir for a new run",
                )
                for key in changed
            ]
        )


def _gone(key: str, value: Any) -> str:
    is_path = key in ("model.params", "adapter.from") or (key.startswith("models.") and key.endswith(".params"))
    return " is gone" if is_path and isinstance(value, str) and not os.path.isdir(value) else ""


def _told(value: Any) -> str:
    """A value as an error shows it: of a text of many lines, such as a chat template, the beginning."""
    return f"{value[:40]!r}..." if isinstance(value, str) and "\n" in value.strip() else repr(value)


def _differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {**before, **now}
        return [
            found
            for key in keys
            for found in _differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    lists = isinstance(before, list) and isinstance(now, list) and len(before) == len(now)
    if lists and before and all(isinstance(one, dict) for one in (*before, *now)):  # datasets, overrides
        before, now = ({str(number): one for number, one in enumerate(many)} for many in (before, now))
        return _differences(before, now, prefix)
    nothing: tuple[Any, ...] = (None, {})  # what an earlier version did not know, and what a recipe does not use
    return [] if before == now or (before in nothing and now in nothing) else [prefix]


def _at(recipe: Mapping[str, Any], key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value
