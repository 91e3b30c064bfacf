"""What a checkpoint says of the model in it, so that it can be built without the run that it was trained in."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import ValidationError

from redco_cli.adapters.model import ADAPTER, Adapter, adapter_of
from redco_cli.adapters.peft import is_peft, merged_with, read_peft
from redco_cli.errors import RecipeError, StorageError
from redco_cli.models.several import MAIN
from redco_cli.plugin.contract import Params
from redco_cli.plugin.shapes import Shapes
from redco_cli.recipe.explain import explain
from redco_cli.recipe.load import RESOLVED_NAME, LoadedRecipe, place, shown
from redco_cli.recipe.paths import found_again
from redco_cli.recipe.schema import Recipe
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.files.deletion import CheckpointDeletedError
from redco_cli.training.saving.files.digest import refuse_other_base
from redco_cli.training.saving.initial import find_initial_checkpoints
from redco_cli.training.saving.selection import (
    choosing_again,
    first_undamaged,
    named_checkpoint,
    refuse_damaged,
    steps_of,
)

_NAME = re.compile(r"checkpoint-(\d+)")
_ITEMS = ("params", "meta")


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint whose model is wanted, and nothing else of its run.

    Attributes:
        checkpoints: where it is.
        step: which one.
        loaded: the recipe it was trained by.
        init_shapes: of the batch that its model is built with; None in one of an earlier version.
    """

    checkpoints: Checkpoints
    step: int
    loaded: LoadedRecipe
    init_shapes: Shapes | None


def is_run(path: Path) -> bool:
    """Whether a directory is the output directory of a run, or one of its checkpoints."""
    if not path.is_dir():
        return False
    candidates = [path.resolve(), *path.iterdir()]
    return (path / RESOLVED_NAME).is_file() or any(
        _NAME.fullmatch(one.name) and (one / "params").is_dir() for one in candidates
    )


def names_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, rather than a run."""
    return _NAME.fullmatch(path.resolve().name) is not None


def stored_model(path: Path) -> StoredModel:
    """The newest whole checkpoint of a run, or the one that a path names, with its recipe.

    Where the run was moved with its project, its plugin and its model are looked for where they are now.

    Args:
        path: for which `is_run` holds.

    Raises:
        StorageError: there is no checkpoint, or all that are meant are damaged.
        RecipeError: this version does not read its recipe.
    """
    checkpoints, steps = _newest_first(path)
    if not steps:
        raise _untrained(path)
    if checkpoints.directory == path.resolve():
        step = first_undamaged(checkpoints, steps, _ITEMS)
    else:
        (step,) = steps
        refuse_damaged(checkpoints, step, _ITEMS)
    meta, where = checkpoints.meta(step), shown(checkpoints.path(step))
    try:
        recipe = Recipe.model_validate(found_again(meta.recipe, checkpoints.directory))
    except ValidationError as error:
        raise RecipeError.of(explain(error, lambda key: place(key, {}, where))) from None
    return StoredModel(checkpoints, step, LoadedRecipe(recipe, Path(where), {}), meta.init_shapes)


def with_adapter_of(path: Path, model: Any, params: Params) -> Params:
    """The parameters of a model merged with an adapter, where they live.

    Args:
        path: a directory of PEFT's files or of diffusers', a run that trained an adapter for this model, or one of its
            checkpoints.
        model: a named one, or a plugin's own; of that PEFT knows nothing.
        params: its parameters.

    Raises:
        ModelError: the adapter does not fit the model, or was trained for other parameters.
        StorageError: there is none, or it cannot be read.
    """
    where = f"adapter={os.fspath(path)!r}"
    if is_peft(path):
        return merged_with(*read_peft(path, model), params)
    if not is_run(path):
        problem = "is neither a directory of PEFT's files, or of diffusers', nor a run"
        raise StorageError(
            where, problem, "give what PEFT, diffusers or redco export --adapter wrote, or a run with an adapter"
        )

    def attempt() -> tuple[Adapter, Params]:
        stored = stored_model(path)
        section, checkpoints, step = stored.loaded.recipe.adapter, stored.checkpoints, stored.step
        if section is None:
            problem = f"{shown(checkpoints.path(step))} is of a run that trained no adapter"
            raise StorageError(where, problem, "load it by itself: load_model(RUN)")
        adapter, (place, *_) = adapter_of(model, section, stored.loaded.where), jax.tree.leaves(params)
        whole = (
            NamedSharding(place.sharding.mesh, PartitionSpec())
            if isinstance(place.sharding, NamedSharding)
            else place.sharding
        )
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), adapter.abstract
        )
        own = checkpoints.restore_params(step, abstract, ADAPTER)
        refuse_other_base(params, None, checkpoints.meta(step), where, shown(checkpoints.path(step)))
        return adapter, own

    return merged_with(*choosing_again(attempt, named=names_checkpoint(path)), params)


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
    return choosing_again(lambda: _shapes_of(loaded, directory, choice))


def _shapes_of(loaded: LoadedRecipe, directory: Path, choice: str) -> Shapes | None:
    """What the newest checkpoint says that can say it."""
    checkpoints, steps = _newest_first(directory)
    if not steps and choice == "last" and (given := find_initial_checkpoints(loaded, (MAIN,)).get(MAIN)) is not None:
        checkpoints, steps = given.checkpoints, [given.step]
    if not steps:
        raise _untrained(directory)
    deleted = None
    for step in steps:
        try:
            return checkpoints.meta(step).init_shapes
        except CheckpointDeletedError as error:
            deleted = error
        except StorageError:
            continue
    if deleted is not None:
        raise deleted
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
