"""Trained models for use elsewhere: `load_model` for Python, and `export` for other tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from redco_cli.adapters.attach import adapter_in, merged_params
from redco_cli.adapters.model import ADAPTER
from redco_cli.adapters.quantized.program import dense_params, seen_params
from redco_cli.console import note
from redco_cli.errors import ModelError, PluginError, StorageError, UsageError
from redco_cli.exporting.adapter import export_adapter
from redco_cli.exporting.export import SETS_AT_ONCE, Exported, check_place, export_model
from redco_cli.exporting.own_module import export_own_module, is_own_module, read_own_module, tell_left
from redco_cli.job import Job, prepare
from redco_cli.models.example_inputs import AnyModel, example_inputs, example_loss
from redco_cli.models.own_module import ModuleModel
from redco_cli.models.resolve import load_named_model, model_shardings, resolve_model
from redco_cli.models.several import MAIN, Models, members_of, section_of, unsaved
from redco_cli.models.weights.load import checkpoint_directory
from redco_cli.placement import Placement, place, read_nothing
from redco_cli.planning.choice import memory_of_a_device
from redco_cli.planning.out_of_memory import explaining_out_of_memory
from redco_cli.plugin.contract import Params
from redco_cli.plugin.shapes import Shapes
from redco_cli.recipe.load import LoadedRecipe, find_run, load_recipe, shown
from redco_cli.recipe.schema import ModelSection
from redco_cli.runtime.cache import enable_compilation_cache
from redco_cli.sharding.plan import DATA, FSDP, TENSOR
from redco_cli.sharding.program.reading import read
from redco_cli.training.saving.files.state_dict import to_state_dict
from redco_cli.training.saving.parameters import trained_variables
from redco_cli.training.saving.selection import choosing_again, own_checkpoints
from redco_cli.training.saving.stored import (
    StoredModel,
    is_run,
    names_checkpoint,
    stored_model,
    stored_shapes,
    with_adapter_of,
)

Name = str | os.PathLike[str]
Dtype = Literal["float32", "bfloat16", "float16"]


def load_model(
    name_or_path: Name,
    *,
    mesh: Mesh | None = None,
    dtype: Dtype | None = None,
    implementation: Literal["auto", "hf_flax", "decoder"] = "auto",
    model: str = MAIN,
    adapter: Name | None = None,
) -> tuple[AnyModel, Params]:
    """A model with its parameters, for use from Python: trained by redco, exported by it, or saved by others.

    A run whose model is its plugin's own runs that plugin's code, and so does what was exported from it.

    Args:
        name_or_path: the output directory of a run, of which the newest whole checkpoint counts; one
            `checkpoint-<step>` in it; what `redco export` wrote; a hub id; or a local directory with `config.json`.
        mesh: devices that share the parameters: split as the derived plan says where its axes are among `data`, `fsdp`
            and `tensor`, else whole on each. None for the first device alone.
        dtype: compute type. Default: of a run what its recipe says, else float32. Parameters are float32.
        implementation: which code runs the model; `auto` is for a run what its recipe says.
        model: which one of a run that trains several; one for which an adapter was trained is merged with it.
        adapter: a directory of PEFT's files, or for a U-Net of diffusers', as `redco export --adapter` writes them
            too, or a run that trained an adapter for this model: the parameters are merged with it.

    Returns:
        The model and its parameters, of a run those of training whatever `predict.use` says:
        `model(params, input_ids)`, `model.generate(params, input_ids)`; of a plugin's own module `model(params, ...)`,
        with what its `__call__` takes.

    Raises:
        ModelError: there is no such model, it cannot be loaded, or the plugin's state lacks what it keeps.
        StorageError: a run has no checkpoint that is whole.
        PluginError: the plugin of a run is gone, or fails.
        DeviceError: the parameters cannot be split over the mesh.
    """
    if adapter is not None:
        base, params = load_model(name_or_path, mesh=mesh, dtype=dtype, implementation=implementation, model=model)
        return base, with_adapter_of(Path(adapter), base, params)
    path = Path(name_or_path)

    def where(key: str) -> str:
        return f"load_model({os.fspath(name_or_path)!r}): {key}"

    if is_own_module(path):
        overrides = [] if dtype is None else [f"model.dtype={dtype}"]
        return read_own_module(path, lambda model: model_shardings(model, mesh, where), overrides)
    if is_run(path) and not (path / "config.json").is_file():
        changed = {"dtype": dtype, "implementation": None if implementation == "auto" else implementation}

        def attempt() -> tuple[AnyModel, Params]:
            stored = stored_model(path)
            section = stored.loaded.recipe.model.model_copy(update={key: one for key, one in changed.items() if one})
            recipe = stored.loaded.recipe.model_copy(update={"model": section})
            return _from_run(replace(stored, loaded=replace(stored.loaded, recipe=recipe)), mesh, model)

        return choosing_again(attempt, named=names_checkpoint(path))
    section = ModelSection(name=os.fspath(name_or_path), dtype=dtype or "float32", implementation=implementation)
    return load_named_model(section, mesh, where)


def _from_run(stored: StoredModel, mesh: Mesh | None, name: str) -> tuple[AnyModel, Params]:
    loaded = stored.loaded
    if name == MAIN and loaded.recipe.adapter is not None:
        return _merged_run(stored, mesh)
    if name in unsaved(loaded.recipe):
        problem = f"{name} was never updated, and is in no checkpoint"
        raise ModelError(loaded.where(f"models.{name}"), problem, "load it from where it is from")
    if name == MAIN and _is_named(loaded):
        model: AnyModel = resolve_model(loaded.recipe.model, where=loaded.where)
    elif _is_named(loaded):
        model = _member(prepare(loaded, stages=(), given=()).model, name, "load_model")
    else:
        module = loaded.recipe.plugin.module
        if os.path.isabs(module) and not os.path.isfile(module):
            problem = f"the plugin that builds this model, {module}, is gone"
            remedy = (
                "put it back there; or export the run where it still is (redco export RUN --output DIR), and load that"
            )
            raise PluginError(loaded.where("plugin.module"), problem, remedy)
        model = _member(_own_job(loaded, stored.init_shapes).model, name, "load_model")
        if isinstance(model, ModuleModel) and model.collections:
            model = _with_kept(model, stored, name)
    places = model_shardings(model, mesh, loaded.where)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), model.abstract, places
    )
    return model, stored.checkpoints.restore_params(stored.step, abstract, name)


def _merged_run(stored: StoredModel, mesh: Mesh | None) -> tuple[AnyModel, Params]:
    """The model of a run that trained an adapter of it, merged."""
    loaded, shapes = stored.loaded, stored.init_shapes
    job = prepare(loaded, stages=(), given=()) if _is_named(loaded) else _own_job(loaded, shapes)
    model = _member(job.model, MAIN, "load_model")
    places = model_shardings(model, mesh, loaded.where)
    count = len(jax.tree.leaves(places)[0].device_set)
    placement = place(job, read_nothing(job), {DATA: 1, FSDP: count, TENSOR: 1})
    at = stored.checkpoints.path(stored.step)
    variables, _ = trained_variables(job, placement, at.parent, str(at))
    return model, jax.device_put(merged_params(job.model, variables.params), places)


def _with_kept(model: ModuleModel, stored: StoredModel, name: str) -> ModuleModel:
    """The model with what it keeps besides its parameters, from the plugin's state in its checkpoint."""
    wanted, checkpoints, step = jax.eval_shape(model.init_variables), stored.checkpoints, stored.step
    places = model.places_in(checkpoints.state(step), name)
    return replace(model, kept={one: checkpoints.restore_state(step, at, wanted[one]) for one, at in places.items()})


def _kept_of(model: ModuleModel, state: Any, name: str, used: str | None) -> dict[str, Any]:
    """What a module keeps besides its parameters, of a plugin's state on devices; on the host of every process."""
    places = model.places_in(nested := to_state_dict(state), name)
    tell_left(nested, {used, *(place[0] for place in places.values())})
    parts = {one: reduce(getitem, at, nested) for one, at in places.items()}
    kept: dict[str, Any] = jax.tree.map(
        lambda leaf: np.asarray(leaf if leaf.is_fully_addressable else process_allgather(leaf, tiled=True)), parts
    )
    return kept


def _member(model: Any, name: str, where: str) -> AnyModel:
    """One of the models of a run."""
    members = members_of(model)
    if name not in members:
        raise UsageError(where, f"the run has no model {name}", f"it has {', '.join(members)}: give model one of them")
    found: AnyModel = members[name]
    return found


def _is_named(loaded: LoadedRecipe) -> bool:
    return loaded.recipe.model.name is not None or loaded.recipe.model.config is not None


def _own_job(loaded: LoadedRecipe, shapes: Shapes | None) -> Job:
    """A job for its model alone; where no checkpoint says how that is built, training data do."""
    return prepare(loaded, stages=("train",) if shapes is None else (), given=(), init_shapes=shapes)


def export(
    target: Name,
    overrides: Sequence[str] = (),
    *,
    output: Name,
    checkpoint: str = "last",
    dtype: Dtype | None = None,
    model: str = MAIN,
    adapter: bool = False,
) -> Exported:
    """Writes a trained model as a directory that transformers and vLLM load, and proves it by loading it again.

    The model of a plugin's `build_model` becomes a directory that `load_model` reads; see `exporting.own_module`.
    Needs no data. Whatever the recipe's mesh, one device holds the parameters where there is room, else all share them.

    Args:
        target: the output directory of a run, a recipe file, or the name of a shipped recipe. A recipe exports the
            newest checkpoint in its `output_dir`; without one, `model.params` or the weights of `model.name`.
        overrides: `dotted.key=value` strings.
        output: a new or empty directory.
        checkpoint: `last`, `best`, or the path of a `checkpoint-<step>` directory.
        dtype: of all weights; default: of each what it has in `model.name`, else float32.
        model: which one of a run that trains several. One for which an adapter was trained is merged with it.
        adapter: write the adapter alone instead, as PEFT does; that of a U-Net as diffusers does.

    Returns:
        What was written, and how far its logits are from those of the model.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    recipe, directory = find_run(target)
    loaded = load_recipe(recipe, overrides)
    check_place(Path(output).absolute())
    _check_trained(loaded, directory, checkpoint)
    directory = directory or Path(loaded.recipe.output_dir)
    enable_compilation_cache()
    if _is_named(loaded):
        job = prepare(loaded, stages=(), given=())
    else:
        job = _own_job(loaded, stored_shapes(loaded, directory, checkpoint))
    chosen, section = _member(job.model, model, "--model"), section_of(loaded.recipe, model)
    alone = _adapter_alone(job, model, dtype) if adapter else None
    placement = _spread(job)
    with explaining_out_of_memory(job, placement, "export"):
        variables, origin = trained_variables(job, placement, directory, checkpoint)
        note(f"exporting the parameters of {origin}")
        params = variables.using(job.recipe.predict.use).params
        if alone is not None:
            return alone(params, Path(output), name=section.params or section.name)
        if job.recipe.adapter is not None and model == MAIN:
            params = merged_params(job.model, params)
        else:
            params = params[model] if isinstance(job.model, Models) else params
        if isinstance(chosen, ModuleModel):
            kept = _kept_of(chosen, variables.state, model, job.recipe.predict.use)
            return export_own_module(job, model, params, kept, Path(output), dtype)
        source = None if section.name is None else checkpoint_directory(section, where=job.where)
        is_own = source is None or section.tokenizer or section.chat_template or section.added_tokens
        return export_model(
            chosen,
            params,
            Path(output),
            source=source,
            began_there=section.params is None,
            tokenizer=job.tokenizer if is_own else None,
            dtype=dtype,
        )


def _adapter_alone(job: Job, model: str, dtype: Dtype | None) -> Callable[..., Exported]:
    """Writes the adapter of a model, given all parameters, a directory, and the name of the model."""
    if dtype is not None:
        raise UsageError("--dtype", f"{dtype} given, but adapters are written in float32", "leave it out")
    adapter, chosen = adapter_in(job.model), _member(job.model, model, "--model")
    if adapter is None or model != MAIN or isinstance(chosen, ModuleModel):
        problem = f"{model} has no adapter" if adapter is None else f"PEFT has no form for {model}"
        raise UsageError("--adapter", problem, "leave it out: the model is exported")

    def write(params: Params, directory: Path, name: str | None) -> Exported:
        own, base = params[ADAPTER], jax.jit(dense_params)(params[MAIN])
        return export_adapter(adapter, own, base, chosen, directory, name=name, tokenizer=job.tokenizer)

    return write


def _check_trained(loaded: LoadedRecipe, run: Path | None, checkpoint: str) -> None:
    """Refuses a run that has not been trained, before anything is built."""
    if run is not None and checkpoint == "last" and not own_checkpoints(run.resolve(), loaded.recipe).steps():
        raise StorageError(shown(run), "holds no checkpoint", "train first: redco train")


def _spread(job: Job) -> Placement:
    """Parameters on one device where it has room for those of an export and of its check; else over all devices."""
    memory, count = memory_of_a_device(), len(jax.devices())
    needed = SETS_AT_ONCE * sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(seen_params(job.model.abstract))
    )
    if jax.process_count() == 1 and (memory is None or needed <= memory):
        count = 1
    reading = read_nothing(job)
    if count > 1 and not isinstance(job.model, Models):
        inputs = example_inputs(job.model, count)
        reading = read(lambda params, batch: example_loss(job.model, params, batch), job.model.abstract, inputs)
    return place(job, reading, {DATA: 1, FSDP: count, TENSOR: 1})
