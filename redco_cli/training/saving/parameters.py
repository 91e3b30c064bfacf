"""The parameters that a run has come to, from its checkpoints; before the first of them, those it begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.adapters.model import ADAPTER
from redco_cli.errors import RecipeError, StorageError
from redco_cli.job import Job
from redco_cli.models.several import MAIN, unsaved
from redco_cli.placement import Placement
from redco_cli.plugin.state import Variables
from redco_cli.recipe.load import shown
from redco_cli.recipe.paths import moved, pin_paths
from redco_cli.runtime.peers.multihost import process_allgather
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.constant import load_constants, pinned_models, refuse_others
from redco_cli.training.saving.files.digest import digests
from redco_cli.training.saving.initial import InitialCheckpoint, find_initial_checkpoints, load_initial_params
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
            place. Of a run that trained no adapter, `adapter.from` is one for its model.
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
        origin = initial[MAIN].name if MAIN in initial else str(section.name)
        return _first(job, placement, initial), f"{origin}{_beside(job)}"
    if choice not in ("last", "best"):
        checkpoints, step = named_checkpoint(choice, job.recipe, where, "last, best")
        refuse_damaged(checkpoints, step, _items(job))
        return _read(job, placement, checkpoints, step)
    if choice == "best":
        skip_without_meta(own)
    candidates = process_allgather("ranked", own.ranked())[0] if choice == "best" else steps[::-1]
    if not candidates:
        problem = "holds no evaluated checkpoint" if steps else "holds no checkpoint"
        raise StorageError(shown(directory), problem, "train first: redco train")
    step = first_undamaged(own, candidates, _items(job))
    return _read(job, placement, own, step)


def _items(job: Job) -> tuple[str, ...]:
    """What must be whole of a checkpoint to predict with it: which models it was trained beside is in `meta`."""
    return ("params", "state", "meta") if unsaved(job.recipe) else ("params", "state")


def _beside(job: Job) -> str:
    source = None if job.recipe.adapter is None else job.recipe.adapter.source
    return "" if source is None else f", and the adapter in {source}"


def _read(job: Job, placement: Placement, checkpoints: Checkpoints, step: int) -> tuple[Variables, str]:
    """Parameters and state of a checkpoint, and where they are from."""
    name = shown(checkpoints.path(step))
    if not unsaved(job.recipe):
        return checkpoints.restore_variables(step, _placed(job, placement)), name
    meta = checkpoints.meta(step)
    now = pin_paths(job.loaded).recipe.model_dump(mode="json")
    before = moved(meta.recipe, checkpoints.directory, now)
    if job.recipe.adapter is not None and job.recipe.adapter.source is not None and not before.get("adapter"):
        if checkpoints.state(step):
            problem = (
                f"{name} has a plugin's state besides its parameters, which nothing tells an adapter for its model"
            )
            raise StorageError(job.where("adapter.from"), problem, "train the adapter: give it as model.params")
        initial = find_initial_checkpoints(job.loaded, (ADAPTER, *job.recipe.models))
        initial[MAIN] = InitialCheckpoint(checkpoints, step, job.where("adapter.from"))
        return _first(job, placement, initial), f"{name}{_beside(job)}"
    job = dataclasses.replace(job, loaded=pinned_models(job.loaded, before))
    _refuse_other_adapter(job, before, name)
    return _restored(job, placement, checkpoints, step), name


def _refuse_other_adapter(job: Job, before: Mapping[str, Any], name: str) -> None:
    """Refuses an adapter that is named beside the one of a checkpoint."""
    section = pin_paths(job.loaded).recipe.adapter
    asked, known = None if section is None else section.source, (before.get("adapter") or {}).get("from")
    if asked is not None and asked != known:
        problem = f"{shown(Path(asked))} given, but {name} holds an adapter of its own"
        remedy = "leave it out to use that one; or name the model alone: a recipe with its name, or the run it is from"
        raise RecipeError(job.where("adapter.from"), problem, remedy)


def _restored(job: Job, placement: Placement, checkpoints: Checkpoints, step: int) -> Variables:
    """What a checkpoint holds, and the parameters of the models that it was trained beside."""
    variables, meta = checkpoints.restore_variables(step, _placed(job, placement)), checkpoints.meta(step)
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


def _first(job: Job, placement: Placement, initial: Mapping[str, InitialCheckpoint]) -> Variables:
    """Parameters that were not trained by this run, with the state that a plugin begins with."""
    params = load_initial_params(job, placement, initial)[0]
    places = placement.following(job.abstract, job.model.abstract)
    begin = jax.jit(lambda given: (job.first_state(given), jnp.int32(0)), out_shardings=(places.state, places.step))
    return Variables(params, *begin(params))
