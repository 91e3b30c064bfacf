"""Where a run starts, and where a prediction gets its parameters: checkpoints, saved weights, or nothing.

A checkpoint is compared with its manifest before anything of it is used. One that is damaged is skipped with a warning
when it was not asked for by name; when all are, nothing starts: a run must not begin anew beside what may be repaired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from redco_cli.console import warn
from redco_cli.errors import Problem, RecipeError, StorageError
from redco_cli.job import Job
from redco_cli.models.initial import initial_params
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import pin_paths
from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.disk import check_directory
from redco_cli.runtime.everyone import process
from redco_cli.training.checkpoint import Checkpoints
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


def own_checkpoints(directory: Path, recipe: Recipe) -> Checkpoints:
    """The checkpoints of a run's output directory."""
    return Checkpoints(directory, recipe.checkpoint.keep, recipe.eval.best_mode)


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
    """

    directory: Path
    checkpoints: Checkpoints
    source: Checkpoints | None = None
    step: int = 0
    best: Best = None
    put_off: bool = False


def find_start(loaded: LoadedRecipe, directory: Path) -> Start:
    """Where to start, by `checkpoint.resume` and what is in the output directory. Reads the whole checkpoint.

    Raises:
        StorageError: `never`, but there is a run; or a path that is no checkpoint, or a damaged one; or a run of which
            every checkpoint is damaged.
        RecipeError: the recipe differs from the checkpoint's in a way that changes what a step computes.
    """
    choice, where = loaded.recipe.checkpoint.resume, loaded.where("checkpoint.resume")
    source = own = own_checkpoints(directory, loaded.recipe)
    steps = own.steps()
    if choice == "never":
        if steps:
            remedy = "set checkpoint.resume: auto to continue it, or choose another output_dir"
            raise StorageError(where, f"never, but {shown(own.path(steps[-1]))} exists", remedy)
    elif choice != "auto":
        source, step = _chosen(choice, loaded.recipe, where, "auto, never")
        _refuse_damage(source, step)
    elif steps:
        step = _first_whole(own, steps[::-1])
    if choice == "never" or (choice == "auto" and not steps):
        return Start(directory, own)
    newer = [other for other in own.steps() if other > step]
    if newer:
        remedy = "choose another output_dir, or move the newer ones away"
        raise StorageError(where, f"{choice} is older than {shown(own.path(newer[-1]))}", remedy)
    _skip_nameless(own)
    free = FREE_TO_CHANGE if own.best() is not None else FREE_TO_CHANGE + FREE_WHILE_UNRANKED
    now = pin_paths(loaded).recipe.model_dump(mode="json")
    meta = source.meta(step)
    refuse_changes(meta.recipe, now, free, loaded.where, source.path(step).name)
    comparable = all(_at(meta.recipe, key) == _at(now, key) for key in FREE_WHILE_UNRANKED)
    return Start(directory, own, source, step, meta.best if comparable else None, meta.put_off)


def trained_params(job: Job, placement: Placement, directory: Path, choice: str) -> tuple[Params, str]:
    """Parameters to predict with, on the mesh, and where they are from.

    Args:
        directory: the output directory of a run, which need not exist.
        choice: `last`, `best`, or a `checkpoint-<step>` directory. Without any checkpoint, `last` means the weights of
            `model.name`. Where the last or best one has damaged parameters, the next takes its place.

    Raises:
        StorageError: there is no such checkpoint, or it is damaged, or all are.
        ModelError: the weights cannot be loaded.
    """
    checkpoints = own_checkpoints(directory.resolve(), job.recipe)
    if choice in ("last", "best"):
        steps = checkpoints.steps()
        if not steps and choice == "last" and job.recipe.model.name is not None:
            params, _ = initial_params(
                job.model, job.recipe.model, placement.params, seed=job.recipe.seed, where=job.where
            )
            return params, job.recipe.model.name
        if choice == "best":
            _skip_nameless(checkpoints)
        candidates = checkpoints.ranked() if choice == "best" else steps[::-1]
        if not candidates:
            problem = "holds no checkpoint" if not steps else "holds no evaluated checkpoint"
            raise StorageError(shown(directory), problem, "train first: redco train")
        step = _first_whole(checkpoints, candidates, ("params",))
    else:
        checkpoints, step = _chosen(choice, job.recipe, "--checkpoint", "last, best")
        _refuse_damage(checkpoints, step, ("params",))
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        job.model.abstract,
        placement.params,
    )
    return checkpoints.restore_params(step, abstract), shown(checkpoints.path(step))


def _chosen(choice: str, recipe: Recipe, where: str, words: str) -> tuple[Checkpoints, int]:
    path = Path(choice).resolve()
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if match is None or not path.is_dir():
        remedy = f"give {words}, or a directory such as runs/x/checkpoint-100"
        raise StorageError(where, f"{choice} is no checkpoint", remedy)
    return own_checkpoints(path.parent, recipe), int(match[1])


def _first_whole(checkpoints: Checkpoints, steps: Sequence[int], items: Collection[str] = ()) -> int:
    """The first of some checkpoints that is not damaged; those before it are skipped, with a warning.

    Args:
        checkpoints: where they are.
        steps: in the order in which they are wanted; not empty.
        items: what must be whole.
    """
    damaged: list[str] = []
    for step in steps:
        problem = checkpoints.damage(step, items)
        name = checkpoints.path(step).name
        if problem is None:
            for skipped in damaged:
                warn(f"{skipped}; {name} is taken instead")
            return step
        checkpoints.skip(step)
        damaged.append(f"{shown(checkpoints.path(step))} is damaged: {problem}")
    remedy = "restore one from a copy, or move all of them away to start anew"
    raise StorageError(shown(checkpoints.directory), f"no checkpoint is whole: {'; '.join(damaged)}", remedy)


def _skip_nameless(checkpoints: Checkpoints) -> None:
    """Skips, with a warning, the checkpoints that cannot say what they are: none could be ranked beside them."""
    for step in checkpoints.steps():
        problem = checkpoints.damage(step, ("meta",))
        if problem is not None:
            warn(f"{shown(checkpoints.path(step))} is damaged: {problem}; it counts no longer")
            checkpoints.skip(step)


def _refuse_damage(checkpoints: Checkpoints, step: int, items: Collection[str] = ()) -> None:
    problem = checkpoints.damage(step, items)
    if problem is not None:
        others = [shown(checkpoints.path(other)) for other in checkpoints.steps() if other != step]
        remedy = f"choose another, such as {others[-1]}" if others else "restore it from a copy"
        raise StorageError(shown(checkpoints.path(step)), f"is damaged: {problem}", remedy)


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
