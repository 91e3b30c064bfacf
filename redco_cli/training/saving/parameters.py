"""Where parameters come from: a run's own checkpoint, that of another run, saved weights, or a random number.

`model.params` comes before the weights of `model.name`, which are not read then. Parameters of another run must be
those of the model: one by one the same paths and shapes, on whatever mesh they were saved. Only they are taken;
optimizer state, step and data begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from redco_cli.errors import ModelError, StorageError
from redco_cli.job import Job
from redco_cli.models.initial import check_initial, initial_params
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import find_params
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.selection import (
    first_undamaged,
    named_checkpoint,
    own_checkpoints,
    refuse_damaged,
    skip_without_meta,
    steps_of,
)

_ITEMS = ("params", "state")
_NAMED = 8
_KEY = "model.params"


@dataclass(frozen=True)
class InitialCheckpoint:
    """A checkpoint whose parameters are taken, and nothing else.

    Attributes:
        checkpoints: where it is.
        step: which one.
        where: what asked for it, for errors.
    """

    checkpoints: Checkpoints
    step: int
    where: str

    @property
    def name(self) -> str:
        """Its path, for a person."""
        return shown(self.checkpoints.path(self.step))


def find_initial_checkpoint(loaded: LoadedRecipe) -> InitialCheckpoint | None:
    """The checkpoint that `model.params` names, or the newest whole one of the run that it names; None without.

    Raises:
        StorageError: it names neither, or what it names is damaged.
    """
    name, where = loaded.recipe.model.params, loaded.where(_KEY)
    if name is None:
        return None
    path = find_params(name, loaded.directory)
    checkpoints = own_checkpoints(path, loaded.recipe)
    steps = steps_of(checkpoints)
    if steps:
        return InitialCheckpoint(checkpoints, first_undamaged(checkpoints, steps[::-1], _ITEMS), where)
    if path.is_dir() and not path.name.startswith("checkpoint-"):
        remedy = "train that run first, or name another: its output directory, or a checkpoint-<step> in it"
        raise StorageError(where, f"{name} holds no checkpoint", remedy)
    checkpoints, step = named_checkpoint(path, loaded.recipe, where, "the output directory of a run")
    refuse_damaged(checkpoints, step, _ITEMS)
    return InitialCheckpoint(checkpoints, step, where)


def check_initial_params(job: Job, given: InitialCheckpoint | None) -> None:
    """Finds out what is wrong with the first parameters of a run from what files say of themselves: none is read.

    Raises:
        ModelError: they are not those of the model, or weights of `model.name` are missing or cut off.
        StorageError: the checkpoint cannot be read.
    """
    if given is None:
        check_initial(job.model, job.recipe.model)
        return
    wrong = given.checkpoints.mismatches(given.step, job.model.abstract)
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        problem = f"the parameters in {given.name} are not those of this model: {'; '.join(wrong[:_NAMED])}{more}"
        remedy = "give the model the config and the implementation of that run, or leave model.params out"
        raise ModelError(given.where, problem, remedy)


def load_initial_params(
    job: Job, placement: Placement, given: InitialCheckpoint | None
) -> tuple[Params, tuple[str, ...]]:
    """The parameters to begin with, on the mesh.

    Args:
        job: its model.
        placement: where they live.
        given: the checkpoint to take them from; None for the weights of `model.name`, or else fresh ones.

    Returns:
        The parameters, and the paths of those that the weights of `model.name` lack and that were initialised.

    Raises:
        ModelError: they do not fit the model, or cannot be loaded.
        StorageError: the checkpoint is damaged.
    """
    if given is None:
        section, where = job.recipe.model, job.where
        return initial_params(job.model, section, placement.params, seed=job.recipe.seed, where=where)
    check_initial_params(job, given)
    return given.checkpoints.restore_params(given.step, _placed(job, placement).params), ()


def trained_variables(
    job: Job, placement: Placement, directory: Path, choice: str, where: str = "--checkpoint"
) -> tuple[Variables, str]:
    """Parameters and state to predict with, on the mesh, and where they are from.

    Args:
        job: its model.
        placement: where they live.
        directory: the output directory of a run, which need not exist.
        choice: `last`, `best`, or a `checkpoint-<step>` directory. Without any checkpoint, `last` means `model.params`,
            or else the weights of `model.name`. Where the last or best one has damaged parameters, the next takes its
            place.
        where: what gave the choice, for errors.

    Raises:
        StorageError: there is no such checkpoint, or it is damaged, or all are.
        ModelError: the parameters cannot be loaded, or are not those of the model.
    """
    section, own = job.recipe.model, own_checkpoints(directory.resolve(), job.recipe)
    steps = steps_of(own)
    if choice == "last" and not steps and (section.params is not None or section.name is not None):
        given = find_initial_checkpoint(job.loaded)
        params = load_initial_params(job, placement, given)[0]
        return _first(job, placement, params), str(section.name) if given is None else given.name
    if choice not in ("last", "best"):
        checkpoints, step = named_checkpoint(choice, job.recipe, where, "last, best")
        refuse_damaged(checkpoints, step, _ITEMS)
        return checkpoints.restore_variables(step, _placed(job, placement)), shown(checkpoints.path(step))
    if choice == "best":
        skip_without_meta(own)
    candidates = own.ranked() if choice == "best" else steps[::-1]
    if not candidates:
        problem = "holds no evaluated checkpoint" if steps else "holds no checkpoint"
        raise StorageError(shown(directory), problem, "train first: redco train")
    step = first_undamaged(own, candidates, _ITEMS)
    return own.restore_variables(step, _placed(job, placement)), shown(own.path(step))


def _placed(job: Job, placement: Placement) -> Variables:
    """Parameters and state, abstractly, where they live."""
    placed: Variables = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        job.abstract,
        placement.following(job.abstract, job.model.abstract),
    )
    return placed


def _first(job: Job, placement: Placement, params: Params) -> Variables:
    """Parameters that were not trained by this run, with the state that a plugin begins with."""
    places = placement.following(job.abstract, job.model.abstract)
    begin = jax.jit(lambda given: (job.first_state(given), jnp.int32(0)), out_shardings=(places.state, places.step))
    return Variables(params, *begin(params))
