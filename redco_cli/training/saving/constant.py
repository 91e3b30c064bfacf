"""Models that are never updated are in no checkpoint: which parameters they had is pinned, and proved by a digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from redco_cli.errors import ModelError, PluginError, StorageError
from redco_cli.models.several import MAIN, never_updated, place_of_model, section_of
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import find_params
from redco_cli.runtime.mesh import replicated
from redco_cli.training.saving.initial import find_initial_checkpoints

_ODD = 2654435761
"""Multiplies places, so that two arrays that differ in the order of their elements differ in their sums."""


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
        recipe = recipe.model_copy(update={"adapter": adapter})
        loaded = replace(loaded, recipe=recipe)
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
        if not pinned.is_dir():
            problem = f"{shown(pinned)}, with which the run was trained, is gone"
            raise StorageError(place_of_model(name, loaded.where)("model.params"), problem, "restore it from a copy")
        section = recipe.model if name == MAIN else recipe.models[name]
        pinned_sections[name] = section.model_copy(update={"params": str(pinned)})
    changed = {"model": pinned_sections.pop(MAIN, recipe.model), "models": {**recipe.models, **pinned_sections}}
    return replace(loaded, recipe=recipe.model_copy(update=changed))


def digests(constants: Mapping[str, Params], mesh: Mesh) -> dict[str, str]:
    """By name of a model, a hash of all its parameters: the same on every mesh.

    Sums of integers do not depend on their order, so each device adds up its own part.

    Args:
        constants: by name, on the mesh.
        mesh: the devices.
    """
    add_up = jax.jit(_weighted_sum, out_shardings=replicated(mesh))
    found = {}
    for name, params in constants.items():
        text = hashlib.sha256()
        for path, leaf in jax.tree.leaves_with_path(params):
            text.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {int(add_up(leaf))};".encode())
        found[name] = text.hexdigest()
    return found


def _weighted_sum(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        stride = math.prod(x.shape[dim + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride)
    return (x.astype(jnp.uint32) * (2 * place * jnp.uint32(_ODD) + 1)).sum(dtype=jnp.uint32)


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
