"""Which checkpoint: the one that a path names, or the first of several that is whole.

A checkpoint is compared with its manifest before anything of it is used. One that is damaged is skipped with a warning
when it was not asked for by name; when all are, nothing starts: a run must not begin anew beside what may be repaired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from redco_cli.console import note, warn
from redco_cli.errors import StorageError
from redco_cli.models.several import unsaved
from redco_cli.recipe.load import shown
from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.peers.multihost import current_connection, is_main_process, process_allgather
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.files.deletion import CheckpointDeletedError

T = TypeVar("T")
_TRIES = 5


def own_checkpoints(directory: Path, recipe: Recipe) -> Checkpoints:
    """The checkpoints of a run's output directory."""
    return Checkpoints(directory, recipe.checkpoint.keep, recipe.eval.best_mode, unsaved(recipe))


def steps_of(checkpoints: Checkpoints) -> list[int]:
    """The steps of the checkpoints that the first process sees; a network's file system may show others them later."""
    steps: list[int] = process_allgather("checkpoints", checkpoints.steps())[0]
    return steps


def named_checkpoint(choice: str | Path, recipe: Recipe, where: str, words: str) -> tuple[Checkpoints, int]:
    """The checkpoint that a path names; whether it is whole is not looked at.

    Args:
        choice: of a `checkpoint-<step>` directory.
        recipe: says which metric is the best.
        where: what gave it, for errors.
        words: what else could have been given.

    Raises:
        StorageError: it names none.
    """
    path = Path(choice).resolve()
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    checkpoints = own_checkpoints(path.parent, recipe)
    if match is None or not checkpoints.path(int(match[1])).is_dir():
        remedy = f"give {words}, or a directory such as runs/x/checkpoint-100"
        raise StorageError(where, f"{choice} is no checkpoint", remedy)
    return checkpoints, int(match[1])


def choosing_again(attempt: Callable[[], T], *, named: bool = False) -> T:
    """What an attempt to choose and read a checkpoint comes to, tried again where it was deleted meanwhile.

    A live run deletes its older checkpoints while others read them; then it has newer ones. Several processes try again
    only where they all know of it: one of them alone would leave the others waiting.

    Args:
        attempt: looks anew each time at which checkpoints there are.
        named: whether a certain one was asked for, in whose place no other is taken.

    Raises:
        CheckpointDeletedError: it happened again and again; or once, to the one that was named.
    """
    for left in reversed(range(_TRIES)):
        try:
            return attempt()
        except CheckpointDeletedError as error:
            together = current_connection() is None or error.on_all_processes
            if named or not left or not together:
                raise
            if is_main_process():
                note(f"{error.problems[0].where} was deleted while it was read; the newest one is looked for again")
    raise AssertionError


def first_undamaged(checkpoints: Checkpoints, steps: Sequence[int], items: Collection[str] = ()) -> int:
    """The first of some checkpoints that is not damaged; those before it are skipped, with a warning.

    Args:
        checkpoints: where they are.
        steps: in the order in which they are wanted; not empty.
        items: what must be whole; default: everything.

    Raises:
        StorageError: all are damaged.
    """
    damaged: list[str] = []
    for step in steps:
        problem = checkpoints.damage(step, items)
        name = checkpoints.path(step).name
        if problem is None:
            for skipped in damaged if is_main_process() else ():
                warn(f"{skipped}; {name} is taken instead")
            return step
        checkpoints.skip(step)
        damaged.append(f"{shown(checkpoints.path(step))} is damaged: {problem}")
    remedy = "restore one from a copy, or move all of them away to start anew"
    raise StorageError(shown(checkpoints.directory), f"no checkpoint is whole: {'; '.join(damaged)}", remedy)


def skip_without_meta(checkpoints: Checkpoints) -> None:
    """Skips, with a warning, the checkpoints that cannot say what they are: none could be ranked beside them."""
    for step in steps_of(checkpoints):
        try:
            problem = checkpoints.damage(step, ("meta",))
        except CheckpointDeletedError:
            checkpoints.skip(step)
            continue
        if problem is not None:
            if is_main_process():
                warn(f"{shown(checkpoints.path(step))} is damaged: {problem}; it is ignored")
            checkpoints.skip(step)


def refuse_damaged(checkpoints: Checkpoints, step: int, items: Collection[str] = ()) -> None:
    """Refuses a checkpoint that was asked for by name and is damaged.

    Raises:
        StorageError: naming another.
    """
    problem = checkpoints.damage(step, items)
    if problem is not None:
        others = [shown(checkpoints.path(other)) for other in checkpoints.steps() if other != step]
        remedy = f"choose another, such as {others[-1]}" if others else "restore it from a copy"
        raise StorageError(shown(checkpoints.path(step)), f"is damaged: {problem}", remedy)
