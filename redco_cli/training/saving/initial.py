"""The first parameters of a run: those of another run, saved weights, or a random number.

`params` of a model comes before the weights of its `name`, which are not read then. Parameters of another run must be
those of the model: one by one the same paths and shapes, on whatever mesh they were saved. Only they are taken;
optimizer state, step and data begin anew.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from redco_cli.adapters.attach import adapter_in
from redco_cli.adapters.model import ADAPTER, Adapter
from redco_cli.adapters.peft import is_peft
from redco_cli.adapters.quantized.base import keeping
from redco_cli.adapters.quantized.layout import dense_places
from redco_cli.adapters.quantized.leaf import is_quantized
from redco_cli.adapters.quantized.program import dense_params
from redco_cli.adapters.source import check_source, values_in
from redco_cli.errors import ModelError, StorageError
from redco_cli.job import Job
from redco_cli.models.initial import check_initial, initial_params, kept_each
from redco_cli.models.several import MAIN, Models, constant_of, members_of, place_of_model, section_of
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import LoadedRecipe, shown
from redco_cli.recipe.paths import find_params
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.files.digest import refuse_other_base
from redco_cli.training.saving.selection import (
    choosing_again,
    first_undamaged,
    named_checkpoint,
    own_checkpoints,
    refuse_damaged,
    steps_of,
)

T = TypeVar("T")
_NAMED = 8
_KEY = "model.params"


@dataclass
class InitialCheckpoint:
    """A checkpoint whose parameters are taken, and nothing else.

    Attributes:
        checkpoints: where it is.
        step: which one; another, once `reading` found it deleted by a run that goes on.
        where: what asked for it, for errors.
        named: whether this one was asked for, rather than the newest.
    """

    checkpoints: Checkpoints
    step: int
    where: str
    named: bool = True

    def reading(self, read: Callable[[], T]) -> T:
        """What reading it comes to; where it is deleted meanwhile, the newest of its run is chosen and read again.

        Raises:
            CheckpointDeletedError: it was named, or it happened again and again.
        """
        tried: list[int] = []

        def attempt() -> T:
            if tried:
                self.step = _newest(self.checkpoints)
            tried.append(self.step)
            return read()

        return choosing_again(attempt, named=self.named)

    @property
    def name(self) -> str:
        """Its path, for a person."""
        return shown(self.checkpoints.path(self.step))


def find_initial_checkpoints(
    loaded: LoadedRecipe, names: Collection[str] | None = None
) -> dict[str, InitialCheckpoint]:
    """By name of a model, the checkpoint that its `params` names, or the newest whole one of the run that it names.

    Args:
        loaded: the recipe.
        names: of the models that are looked for; default: all. The adapter's is what `adapter.from` names, if a run.

    Raises:
        StorageError: one names neither, or what it names is damaged.
    """
    names = (MAIN, ADAPTER, *loaded.recipe.models) if names is None else names
    found = {name: _find_initial_checkpoint(loaded, name) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def _find_initial_checkpoint(loaded: LoadedRecipe, name: str) -> InitialCheckpoint | None:
    params, where = section_of(loaded.recipe, name).params, place_of_model(name, loaded.where)(_KEY)
    if name == ADAPTER:
        params = None if loaded.recipe.adapter is None else loaded.recipe.adapter.source
        where = loaded.where("adapter.from")
    if params is None or (name == ADAPTER and is_peft(find_params(params, loaded.directory))):
        return None
    path = find_params(params, loaded.directory)
    checkpoints = own_checkpoints(path, loaded.recipe)
    if steps_of(checkpoints):

        def newest() -> int:
            step = _newest(checkpoints)
            _refuse_other_kind(checkpoints, step, where, name)
            return step

        return InitialCheckpoint(checkpoints, choosing_again(newest), where, named=False)
    if path.is_dir() and not path.name.startswith("checkpoint-"):
        remedy = "train that run first, or name another: its output directory, or a checkpoint-<step> in it"
        raise StorageError(where, f"{params} holds no checkpoint", remedy)
    checkpoints, step = named_checkpoint(path, loaded.recipe, where, "the output directory of a run")
    refuse_damaged(checkpoints, step, ("params",))
    _refuse_other_kind(checkpoints, step, where, name)
    return InitialCheckpoint(checkpoints, step, where)


def _refuse_other_kind(checkpoints: Checkpoints, step: int, where: str, name: str) -> None:
    """Refuses for a model a run that trained an adapter, and for an adapter one that trained none."""
    if checkpoints.damage(step, ("meta",)) is not None:
        return
    is_adapted = bool(checkpoints.meta(step).recipe.get("adapter"))
    if name == ADAPTER and not is_adapted:
        problem = f"{shown(checkpoints.directory)} trained no adapter"
        raise StorageError(where, problem, "name a run that did; model.params takes the parameters of a model")
    if name != ADAPTER and is_adapted:
        problem = f"{shown(checkpoints.directory)} trained an adapter, and holds no parameters of a model"
        remedy = "merge it (redco export RUN --output DIR), and name that directory in model.name"
        raise StorageError(where, problem, remedy)


def _newest(checkpoints: Checkpoints) -> int:
    steps = steps_of(checkpoints)
    if not steps:
        raise StorageError(shown(checkpoints.directory), "holds no checkpoint any more", "train that run first")
    return first_undamaged(checkpoints, steps[::-1], ("params",))


def check_initial_params(job: Job, initial: Mapping[str, InitialCheckpoint]) -> None:
    """Finds out what is wrong with the first parameters of a run from what files say of themselves: none is read.

    Raises:
        ModelError: they are not those of the model, or weights of `model.name` are missing or cut off.
        StorageError: a checkpoint cannot be read.
    """
    _check_source(job)
    for name, model in members_of(job.model).items():
        given = _given(job, name, initial)
        if given is None:
            check_initial(model, section_of(job.recipe, name))
        else:
            _refuse_mismatches(job, name, given)


def _check_source(job: Job) -> None:
    adapter = adapter_in(job.model)
    if adapter is not None:
        check_source(adapter.section, members_of(job.model)[MAIN], job.loaded)


def _refuse_mismatches(job: Job, name: str, given: InitialCheckpoint) -> None:
    model = members_of(job.model)[name]
    wrong = given.reading(lambda: given.checkpoints.mismatches(given.step, model.abstract, name))
    if not wrong:
        return
    prefix = f"{name}/" if isinstance(job.model, Models) and job.model.is_named else ""
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    told = "; ".join(f"{prefix}{one}" for one in wrong[:_NAMED])
    problem = f"the parameters in {given.name} are not those of this model: {told}{more}"
    key = "adapter.from" if name == ADAPTER else _KEY
    remedy = f"give the model the config and the implementation of that run, or leave {key} out"
    if name != ADAPTER and any(one.endswith(" is missing") for one in wrong):
        remedy = f"{remedy}; {_part_of_it(job, shown(given.checkpoints.directory))}"
    raise ModelError(given.where, problem, remedy)


def _part_of_it(job: Job, run: str) -> str:
    """How some parts of another run are trained on beside new ones."""
    if job.plugin.build_model is not None and job.recipe.model.name is None and job.recipe.model.config is None:
        recipe = f"models: {{encoder: {{params: {run}, frozen: false}}}}"
        return f"for one part of it beside new ones, {recipe} and a build_model that returns encoder and these by name"
    return f"for another head on it, redco export {run} --output DIR, and model.name: DIR"


def load_initial_params(
    job: Job, placement: Placement, initial: Mapping[str, InitialCheckpoint]
) -> tuple[Params, tuple[str, ...]]:
    """The parameters to begin with, on the mesh; of models that are never updated too.

    Args:
        job: its model, or models.
        placement: where they live.
        initial: by name, the checkpoints to take them from; else they are the weights of a model's `name`, or fresh.

    Returns:
        The parameters, and the paths of those that the weights of a `name` lack and that were initialised.

    Raises:
        ModelError: they do not fit the model, or cannot be loaded.
        StorageError: a checkpoint is damaged.
    """
    _check_source(job)
    params, fresh = {}, []
    several = isinstance(job.model, Models)
    for name in members_of(job.model):
        places = placement.params[name] if several else placement.params
        params[name], new = load_model_params(job, name, places, _given(job, name, initial))
        if name == MAIN and job.recipe.adapter is not None:
            _refuse_fresh(job, new)
        fresh += [f"{name}/{path}" if several else path for path in new]
    adapter = adapter_in(job.model)
    if adapter is not None:
        params[ADAPTER] = _begun(job, placement, adapter, params, initial.get(ADAPTER))
    return params if several else params[MAIN], tuple(fresh)


def _begun(job: Job, placement: Placement, adapter: Adapter, params: Params, given: InitialCheckpoint | None) -> Params:
    """The first parameters of an adapter: those that `adapter.from` names, or such that change nothing."""
    model, places = members_of(job.model)[MAIN], placement.params[ADAPTER]
    if given is not None:
        refuse_other_base(params[MAIN], placement.mesh, given.checkpoints.meta(given.step), given.where, given.name)
        return params[ADAPTER]
    if adapter.section.source is not None:
        return values_in(find_params(adapter.section.source, job.loaded.directory), model, places)

    def begun(base: Params, own: Params) -> Params:
        return adapter.begun(dense_params(base), own)

    return jax.jit(begun, out_shardings=places)(params[MAIN], params[ADAPTER])


def _refuse_fresh(job: Job, fresh: Sequence[str]) -> None:
    """Refuses a new head beside an adapter: what is not updated would stay random."""
    left = [path for path in fresh if path not in members_of(job.model)[ADAPTER].saved]
    if left:
        problem = f"the weights of {job.recipe.model.name} have no {', '.join(left[:_NAMED])}, which would stay random"
        named = ", ".join(re.escape(path) for path in left[:_NAMED])
        raise ModelError(job.where("adapter.modules_to_save"), problem, f"train it: adapter.modules_to_save: [{named}]")


def _given(job: Job, name: str, initial: Mapping[str, InitialCheckpoint]) -> InitialCheckpoint | None:
    """Where a model begins: modules that only the plugin names begin with what `model.params` has under their names."""
    inherits = name not in job.recipe.models and name != ADAPTER
    return initial.get(name, initial.get(MAIN) if inherits else None)


def load_model_params(
    job: Job, name: str, places: Any, given: InitialCheckpoint | None
) -> tuple[Params, tuple[str, ...]]:
    """Parameters of one model where they live, and the paths of those that were initialised.

    Args:
        job: its models.
        name: of the model.
        places: the sharding of each parameter.
        given: a checkpoint to take them from; None for the weights of the model's `name`, or fresh ones.

    Raises:
        ModelError, StorageError: as `load_initial_params`.
    """
    model, section = members_of(job.model)[name], section_of(job.recipe, name)
    dtype = constant_of(job.model).get(name)
    kept, read = keeping(places, dtype), dense_places(places)
    if given is not None:
        _refuse_mismatches(job, name, given)
        wanted = jax.tree.map(
            lambda leaf, place, own: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype if is_quantized(own) else dtype or leaf.dtype, sharding=place
            ),
            model.abstract,
            read,
            places,
        )
        return kept_each(given.reading(lambda: given.checkpoints.restore_params(given.step, wanted, name)), kept), ()
    key = jax.random.key(job.recipe.seed)
    if name != MAIN and name not in job.recipe.models:  # several modules of a plugin, which must not begin alike
        key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return initial_params(model, section, read, key=key, where=place_of_model(name, job.where), keeping=kept)
