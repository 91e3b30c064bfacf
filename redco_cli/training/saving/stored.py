"""What a checkpoint says of the model in it, so that it can be built without the run that it was trained in."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from redco_cli.errors import StorageError
from redco_cli.models.several import MAIN
from redco_cli.plugin.shapes import Shapes
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.initial import find_initial_checkpoints
from redco_cli.training.saving.selection import named_checkpoint, refuse_damaged, steps_of

_NAME = re.compile(r"checkpoint-(\d+)")


def stored_shapes(loaded: LoadedRecipe, directory: Path, choice: str, where: str = "--checkpoint") -> Shapes | None:
    """The shapes of the batch that a plugin's own model is built with, as a checkpoint says with which it is used.

    Args:
        loaded: the recipe.
        directory: the output directory of a run, which need not exist.
        choice: as for `trained_variables`; all checkpoints of a run say the same.
        where: what gave the choice, for errors.

    Returns:
        None where no checkpoint says so: it is of an earlier version, or its parameters alone can be read; and for
        models that need none.

    Raises:
        StorageError: there is no such checkpoint, or one that was named is damaged.
    """
    section = loaded.recipe.model
    if section.name is not None or section.config is not None:
        return None
    if choice not in ("last", "best"):
        checkpoints, step = named_checkpoint(choice, loaded.recipe, where, "last, best")
        refuse_damaged(checkpoints, step, ("meta",))
        return checkpoints.meta(step).init_shapes
    checkpoints, steps = _newest_first(directory)
    if not steps and choice == "last" and (given := find_initial_checkpoints(loaded).get(MAIN)) is not None:
        checkpoints, steps = given.checkpoints, [given.step]
    if not steps:
        raise _untrained(directory)
    for step in steps:
        with contextlib.suppress(StorageError):
            return checkpoints.meta(step).init_shapes
    return None


def _untrained(directory: Path) -> StorageError:
    return StorageError(shown(directory), "holds no checkpoint", "train first: redco train")


def _newest_first(path: Path) -> tuple[Checkpoints, list[int]]:
    """The checkpoints of a run, or the one that a path names, to be read only."""
    path = path.resolve()
    match = _NAME.fullmatch(path.name)
    if match is not None:
        return Checkpoints(path.parent, 1, "min"), [int(match[1])]
    checkpoints = Checkpoints(path, 1, "min")
    return checkpoints, steps_of(checkpoints)[::-1]
