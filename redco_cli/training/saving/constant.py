"""Models that are never updated are in no checkpoint: which parameters they had is pinned, and proved by a digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from redco_cli.adapters.model import ADAPTER
from redco_cli.errors import ModelError, PluginError, StorageError
from redco_cli.job import Job
from redco_cli.models.several import MAIN, keeps_base, never_updated, place_of_model, section_of, unsaved
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import find_params
from redco_cli.training.saving.files.deletion import CheckpointDeletedError, is_gone
from redco_cli.training.saving.files.digest import digests
from redco_cli.training.saving.initial import find_initial_checkpoints, load_model_params
from redco_cli.training.saving.saved import SavedCheckpoints


def pinned_models(loaded: LoadedRecipe, before: Mapping[str, Any] | None) -> LoadedRecipe:
    """A recipe in which `params` of a model that is never updated names one checkpoint, whatever its run saves later.

    Args:
        loaded: the recipe.
        before: the recipe of the checkpoint that is continued or read, whose choice stays; None for a fresh run.

    Raises:
        StorageError: there is no such checkpoint.
    """
    recipe = loaded.recipe
    if recipe.adapter is not None and recipe.adapter.base_dtype == "auto":  # computed in another type, it stays
        known = recipe.model.dtype if before is None else (before.get("adapter") or {}).get("base_dtype")
        adapter = recipe.adapter.model_copy(update={"base_dtype": known or recipe.model.dtype})
        loaded = replace(loaded, recipe=recipe.model_copy(update={"adapter": adapter}))
    loaded = _with_pinned_source(loaded, before)
    recipe = loaded.recipe
    names = [name for name in never_updated(recipe) if section_of(recipe, name).params is not None]
    if not names:
        return loaded
    found = find_initial_checkpoints(loaded, names) if before is None else {}
    pinned_sections: dict[str, Any] = {}
    for name in names:
        params = find_params(section_of(recipe, name).params or "", loaded.directory)
        if before is None:
            pinned = found[name].checkpoints.directory / f"checkpoint-{found[name].step}"
        else:
            known = before.get("model", {}) if name == MAIN else before.get("models", {}).get(name, {})
            pinned = Path(known.get("params") or params)
        if pinned not in (params, params / pinned.name):
            continue  # another one is asked for: what is compared with the recipe, or with the digest, tells
        if not pinned.is_dir() and not (name == MAIN and keeps_base(recipe)):
            problem = f"{shown(pinned)}, with which the run was trained, is gone"
            raise StorageError(place_of_model(name, loaded.where)("model.params"), problem, "restore it from a copy")
        section = recipe.model if name == MAIN else recipe.models[name]
        pinned_sections[name] = section.model_copy(update={"params": str(pinned)})
    changed = {"model": pinned_sections.pop(MAIN, recipe.model), "models": {**recipe.models, **pinned_sections}}
    return replace(loaded, recipe=recipe.model_copy(update=changed))


def _with_pinned_source(loaded: LoadedRecipe, before: Mapping[str, Any] | None) -> LoadedRecipe:
    """A recipe in which `adapter.from` names one checkpoint of a run; it may be gone where a run continues."""
    section = loaded.recipe.adapter
    if section is None or section.source is None:
        return loaded
    path = find_params(section.source, loaded.directory)
    if before is None:
        found = find_initial_checkpoints(loaded, [ADAPTER])
        pinned = next((one.checkpoints.path(one.step) for one in found.values()), path)
    else:
        pinned = Path((before.get("adapter") or {}).get("from") or path)
    if pinned not in (path, path / pinned.name):
        return loaded
    adapter = section.model_copy(update={"from": str(pinned)})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"adapter": adapter}))


def load_constants(job: Job, placement: Placement, checkpoints: SavedCheckpoints) -> Params:
    """The parameters of the models that are in no checkpoint, by name; on the mesh.

    Args:
        job: its models.
        placement: where they live.
        checkpoints: those that were saved beside them.

    Raises:
        ModelError, StorageError: as `load_initial_params`.
        CheckpointDeletedError: the checkpoint of one is no longer there.
    """
    kept = {MAIN} if keeps_base(job.recipe) else set()
    names = unsaved(job.recipe) - kept
    for name in names:  # they are pinned: another one of the same run would be another model
        path = find_params(section_of(job.recipe, name).params or "", job.loaded.directory)
        if path.name.startswith("checkpoint-") and is_gone(path):
            raise CheckpointDeletedError.at(path)
    initial = find_initial_checkpoints(job.loaded, names)
    loaded = {name: load_model_params(job, name, placement.params[name], initial.get(name))[0] for name in names}
    return loaded | {
        name: checkpoints.restore_base(_placed(job.model.abstract[name], placement, name)) for name in kept
    }


def _placed(abstract: Params, placement: Placement, name: str) -> Params:
    """Abstract parameters of a model where they live."""
    places = placement.params[name]
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), abstract, places)


def refuse_others(
    found: Mapping[str, str], known: Mapping[str, str], where: Callable[[str], str], checkpoint: str
) -> None:
    """Refuses models that are never updated and are not those of a checkpoint.

    Args:
        found: their digests.
        known: those that the checkpoint has written down.
        where: dotted recipe key to its place.
        checkpoint: its name.

    Raises:
        ModelError: naming the first.
    """
    for name, digest in found.items():
        if known.get(name, digest) != digest:
            problem = f"its parameters are not those that {checkpoint} was trained with"
            raise ModelError(
                place_of_model(name, where)("model"), problem, "restore its weights, or choose another output_dir"
            )


def refuse_new_constants(params: Params, known: Mapping[str, str], mesh: Mesh, file: str) -> None:
    """Refuses other parameters for models that are in no checkpoint: a run that continues would not find them.

    Args:
        params: that a `run_fn` assigns.
        known: the digests of these models.
        mesh: the devices.
        file: the plugin's.

    Raises:
        PluginError: naming the first model that is not the same.
    """
    for name, digest in known.items():
        if digests({name: params.get(name)}, mesh)[name] != digest:
            problem = f"run.params was given other parameters for {name}, which is frozen and in no checkpoint"
            remedy = f'keep them: {{**params, "{name}": run.params["{name}"]}}; what changes belongs into init_state'
            raise PluginError(f"{file}: run_fn", problem, remedy)
