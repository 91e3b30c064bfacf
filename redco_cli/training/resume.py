"""Where a run starts: at a checkpoint of its own, at the parameters of another run, or afresh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_cli.errors import Problem, RecipeError, StorageError
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import pin_paths
from redco_cli.runtime.disk import check_directory
from redco_cli.runtime.everyone import process
from redco_cli.training.checkpoint import Checkpoints
from redco_cli.training.choose import chosen, first_whole, own_checkpoints, refuse_damage, skip_nameless, steps_of
from redco_cli.training.parameters import Given, find_given
from redco_cli.training.ranking import Best

FREE_TO_CHANGE = (
    "output_dir",
    "mesh",
    "sharding",
    "logging",
    "checkpoint",
    "predict",
    "eval.every",
    "eval.at_start",
    "eval.predict",
    "eval.batch_size",
    "data.workers",
    "train.micro_batch_size",
    "train.remat",
    "train.max_nonfinite_steps",
)
"""Keys that do not change what a step computes, so that a run may continue with other values."""
FREE_WHILE_UNRANKED = ("eval.best_metric", "eval.best_mode", "data.eval")
"""Keys that decide which checkpoint is best: free as well while none of the run's has been evaluated."""
_OTHER_OUTPUT = "choose another output_dir, or correct its permissions"


def output_directory(name: str, where: str) -> Path:
    """The output directory, which is not made yet.

    Raises:
        StorageError: it could not be made or written.
    """
    directory = Path(name).resolve()
    check_directory(directory, where, _OTHER_OUTPUT)
    return directory


def open_output(directory: Path, where: str) -> None:
    """Makes the output directory, if need be, and proves that it can be written.

    Raises:
        StorageError: it cannot.
    """
    probe = directory / f".writable-{process()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"redco")
        probe.unlink()
    except OSError as error:
        problem = f"{shown(directory)} cannot be written: {error.strerror or error}"
        raise StorageError(where, problem, _OTHER_OUTPUT) from error


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        directory: its output directory.
        checkpoints: where it saves.
        source: where the checkpoint to continue is; None to start afresh.
        step: optimizer steps done.
        best: step and value of the run's best evaluation until then; None without any.
        put_off: whether the evaluation of this step is still to be done.
        data: where the run was in data of unknown length; None for data whose order follows from the step alone.
        given: the checkpoint of another run whose parameters a fresh run begins with (`model.params`); None without.
    """

    directory: Path
    checkpoints: Checkpoints
    source: Checkpoints | None = None
    step: int = 0
    best: Best = None
    put_off: bool = False
    data: Mapping[str, Any] | None = None
    given: Given | None = None


def find_start(loaded: LoadedRecipe, directory: Path) -> Start:
    """Where to start, by `checkpoint.resume` and what is in the output directory. Reads the whole checkpoint.

    A run that continues needs `model.params` no more: its own checkpoint has the parameters.

    Raises:
        StorageError: `never`, but there is a run; or a path that is no checkpoint, or a damaged one; or a run of which
            every checkpoint is damaged; or `model.params` names none that is whole.
        RecipeError: the recipe differs from the checkpoint's in a way that changes what a step computes.
    """
    choice, where = loaded.recipe.checkpoint.resume, loaded.where("checkpoint.resume")
    source = own = own_checkpoints(directory, loaded.recipe)
    steps = steps_of(own)
    if choice == "never":
        if steps:
            remedy = "set checkpoint.resume: auto to continue it, or choose another output_dir"
            raise StorageError(where, f"never, but {shown(own.path(steps[-1]))} exists", remedy)
    elif choice != "auto":
        source, step = chosen(choice, loaded.recipe, where, "auto, never")
        refuse_damage(source, step)
    elif steps:
        step = first_whole(own, steps[::-1])
    if choice == "never" or (choice == "auto" and not steps):
        return Start(directory, own, given=find_given(loaded))
    newer = [other for other in own.steps() if other > step]
    if newer:
        remedy = "choose another output_dir, or move the newer ones away"
        raise StorageError(where, f"{choice} is older than {shown(own.path(newer[-1]))}", remedy)
    skip_nameless(own)
    free = FREE_TO_CHANGE if own.best() is not None else FREE_TO_CHANGE + FREE_WHILE_UNRANKED
    now = pin_paths(loaded).recipe.model_dump(mode="json")
    meta = source.meta(step)
    refuse_changes(meta.recipe, now, free, loaded.where, source.path(step).name)
    comparable = all(_at(meta.recipe, key) == _at(now, key) for key in FREE_WHILE_UNRANKED)
    return Start(directory, own, source, step, meta.best if comparable else None, meta.put_off, meta.data)


def refuse_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    free: Sequence[str],
    where: Callable[[str], str],
    checkpoint: str,
) -> None:
    """Refuses to continue a run whose recipe has changed in a key that is not among the `free` ones, or below one.

    Raises:
        RecipeError: naming each such key, with both values.
    """
    changed = [key for key in _differences(before, now) if not any(f"{key}.".startswith(f"{one}.") for one in free)]
    if changed:
        raise RecipeError.of(
            [
                Problem(
                    where(key),
                    f"{_at(now, key)!r}, but {checkpoint} was trained with {_at(before, key)!r}",
                    "restore the value, or choose another output_dir for a new run",
                )
                for key in changed
            ]
        )


def _differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {**before, **now}
        return [
            found
            for key in keys
            for found in _differences(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if before == now else [prefix]


def _at(recipe: Mapping[str, Any], key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
