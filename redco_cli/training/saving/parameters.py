"""The parameters that a run has come to, from its checkpoints; before the first of them, those it begins with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from redco_cli.errors import StorageError
from redco_cli.job import Job
from redco_cli.models.several import MAIN, unsaved
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.recipe.load import shown
from redco_cli.recipe.paths import moved, pin_paths
from redco_cli.runtime.peers.multihost import process_allgather
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.constant import pinned_models, refuse_others
from redco_cli.training.saving.files.digest import digests
from redco_cli.training.saving.initial import find_initial_checkpoints, load_constants, load_initial_params
from redco_cli.training.saving.selection import (
    choosing_again,
    first_undamaged,
    named_checkpoint,
    own_checkpoints,
    refuse_damaged,
    skip_without_meta,
    steps_of,
)


def trained_variables(
    job: Job, placement: Placement, directory: Path, choice: str, where: str = "--checkpoint"
) -> tuple[Variables, str]:
    """Parameters and state to predict with, on the mesh, and where they are from.

    The run may still be training: where it deletes the one that is read, the next is taken.

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
    named = choice not in ("last", "best")
    return choosing_again(lambda: _trained_variables(job, placement, directory, choice, where), named=named)


def _trained_variables(
    job: Job, placement: Placement, directory: Path, choice: str, where: str
) -> tuple[Variables, str]:
    section, own = job.recipe.model, own_checkpoints(directory.resolve(), job.recipe)
    steps = steps_of(own)
    if choice == "last" and not steps and (section.params is not None or section.name is not None):
        initial = find_initial_checkpoints(job.loaded)
        params = load_initial_params(job, placement, initial)[0]
        return _first(job, placement, params), initial[MAIN].name if MAIN in initial else str(section.name)
    if choice not in ("last", "best"):
        checkpoints, step = named_checkpoint(choice, job.recipe, where, "last, best")
        refuse_damaged(checkpoints, step, _items(job))
        return _restored(job, placement, checkpoints, step), shown(checkpoints.path(step))
    if choice == "best":
        skip_without_meta(own)
    candidates = process_allgather("ranked", own.ranked())[0] if choice == "best" else steps[::-1]
    if not candidates:
        problem = "holds no evaluated checkpoint" if steps else "holds no checkpoint"
        raise StorageError(shown(directory), problem, "train first: redco train")
    step = first_undamaged(own, candidates, _items(job))
    return _restored(job, placement, own, step), shown(own.path(step))


def _items(job: Job) -> tuple[str, ...]:
    """What must be whole of a checkpoint to predict with it: which models it was trained beside is in `meta`."""
    return ("params", "state", "meta") if unsaved(job.recipe) else ("params", "state")


def _restored(job: Job, placement: Placement, checkpoints: Checkpoints, step: int) -> Variables:
    """What a checkpoint holds, and the parameters of the models that it was trained beside."""
    variables = checkpoints.restore_variables(step, _placed(job, placement))
    if not unsaved(job.recipe):
        return variables
    meta = checkpoints.meta(step)
    now = pin_paths(job.loaded).recipe.model_dump(mode="json")
    before = moved(meta.recipe, checkpoints.directory, now)
    job = dataclasses.replace(job, loaded=pinned_models(job.loaded, before))
    constants = load_constants(job, placement, checkpoints)
    refuse_others(digests(constants, placement.mesh), meta.digests, job.where, shown(checkpoints.path(step)))
    return dataclasses.replace(variables, params=variables.params | constants)


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
