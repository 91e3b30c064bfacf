"""What is planned: a loss, its parameters and batches, and an optimizer. From a recipe, or from a model alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from redco_cli.batch_sizes import micro_batch_size
from redco_cli.chips.compiler import Value, step_options
from redco_cli.console import warn
from redco_cli.errors import UsageError
from redco_cli.job import Job, prepare
from redco_cli.models.config.read import read_config
from redco_cli.models.decoder.block import Remat
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.example_inputs import default_batch, default_loss
from redco_cli.models.presets import close_presets, preset
from redco_cli.models.resolve import resolve_model
from redco_cli.placement import abstract_batch, overrides
from redco_cli.plugin.contract import Loss
from redco_cli.plugin.state import Variables
from redco_cli.privacy.accounting import Budget
from redco_cli.recipe.load import RESOLVED_NAME, load_recipe
from redco_cli.recipe.schema import ModelSection, OtherModelSection, Recipe
from redco_cli.recipe.shipped import shipped_recipes
from redco_cli.recipe.yaml12 import parse_yaml
from redco_cli.sharding.decide.override import Override
from redco_cli.training.optimizer import UpdateWork
from redco_cli.training.session import plan_updates
from redco_cli.training.step import StateUpdate
from redco_cli.training.timeline import make_timeline

DEFAULT_SEQ_LENGTH, _LONGEST = 1024, 4096
DEFAULT_DTYPE = "bfloat16"
"""What a model that is named without a recipe computes in, as most are trained; its parameters are float32."""

_OPTIONS = {"train.global_batch_size": "--batch-size", "mesh": "--mesh"}
"""Where a model has no recipe, the options that stand for keys of one."""


@dataclass(frozen=True)
class Workload:
    """One train step, abstractly.

    Attributes:
        name: of the model.
        loss: of (variables, batch, key), traceable.
        abstract: parameters, and state of the plugin.
        frozen: paths of those that are not updated.
        optimizer: the optax transformation.
        update_state: of the plugin.
        batch: number of examples to abstract arrays with that leading dim.
        global_batch_size: examples in a step.
        micro_batch_size: examples that go through the model at once; None where that may be chosen.
        seq_length: tokens in an example; None where examples are no tokens.
        mesh: sizes of the axes; None where they may be chosen.
        override: what comes before the sharding rules.
        remat: what the loss recomputes in the backward pass.
        dtype: in which it computes.
        recomputing: the same workload with that remat, or a `ModelError` where the model does not have it; None where
            remat is decided, or no model is named that could have any.
        where: dotted recipe key to its place.
        whole_batch: a batch must not be cut: the loss sees it as a whole.
        steps: of a whole run; None where no recipe says.
        privacy: what the gradients may spend: each example has one of its own then. None without.
        xla: options that the step is compiled with.
        compares: ways to run it are compiled to be compared, `planning: compile`.
        update_work: of trained parameters, their specs and a mesh, what an update takes beyond elementwise operations.
    """

    name: str
    loss: Callable[[Variables, Any, Any], Loss]
    abstract: Variables
    frozen: frozenset[str]
    optimizer: optax.GradientTransformation
    update_state: StateUpdate
    batch: Callable[[int], Any]
    global_batch_size: int
    micro_batch_size: int | None
    seq_length: int | None
    mesh: Mapping[str, int] | None
    override: tuple[Override, ...]
    remat: Remat
    dtype: str
    recomputing: Callable[[Remat], Workload] | None
    where: Callable[[str], str]
    whole_batch: bool = False
    steps: int | None = None
    privacy: Budget | None = None
    xla: Mapping[str, Value] = field(default_factory=dict)
    compares: bool = False
    update_work: Callable[[Any, Any, Mapping[str, int]], UpdateWork] = lambda *_: UpdateWork()

    def passes(self, micro_batch_size: int) -> int:
        """Micro-batches of a step."""
        rows = self.global_batch_size if self.privacy is None else self.privacy.rows(micro_batch_size)
        return rows // micro_batch_size


def find_workload(
    model: str,
    *,
    batch_size: int | None,
    seq_length: int | None,
    dtype: str | None = None,
    kept_in: str = "float32",
) -> Workload:
    """What `redco inspect-sharding MODEL` is about.

    Args:
        model: a recipe, a run, a directory or file with a model's config, the config itself, a preset, or a hub id.
        batch_size: examples in a step; default: the recipe's, or 64 for a model.
        seq_length: tokens in an example, for a model; default: the preset's, or what the model has positions for.
        dtype: in which a model computes, over parameters in float32; default: `DEFAULT_DTYPE`. A recipe has its own.

    Raises:
        RedcoError: there is no such thing, or it cannot be used.
    """
    run = Path(model) / RESOLVED_NAME
    if model.endswith((".yaml", ".yml")) or model in shipped_recipes() or os.path.isfile(run):
        if seq_length is not None:
            remedy = "leave it out, and change data.max_length in the recipe"
            raise UsageError("--seq-length", f"{model} is a recipe, whose data decide how long examples are", remedy)
        changes = [] if batch_size is None else [f"train.global_batch_size={batch_size}"]
        changes += [] if dtype is None else [f"model.dtype={dtype}"]
        return recipe_workload(str(run) if os.path.isfile(run) else model, changes)
    return _model_workload(model, batch_size or 64, seq_length, dtype or DEFAULT_DTYPE, kept_in)


def recipe_workload(recipe: str, changes: Sequence[str] = ()) -> Workload:
    """The train step of a recipe, with its plugin's loss.

    Args:
        recipe: a file or shipped name.
        changes: `dotted.key=value` strings.

    Raises:
        RedcoError: the recipe cannot be used.
    """
    return job_workload(prepare(load_recipe(recipe, changes), stages=("train",)))


def job_workload(job: Job) -> Workload:
    """The train step of a job.

    Raises:
        RedcoError: its schedule or its optimizer is wrong.
    """
    section = job.recipe
    timeline = make_timeline(section, job.train_size, job.where)
    updates = plan_updates(job, timeline)
    batch = abstract_batch(job, micro_batch_size(section))
    tokens = batch["input_ids"].shape[1] if "input_ids" in batch and batch["input_ids"].ndim == 2 else None

    def recomputing(remat: Remat) -> Workload:
        train = section.train.model_copy(update={"remat": remat})
        loaded = replace(job.loaded, recipe=section.model_copy(update={"train": train}))
        return job_workload(prepare(loaded, stages=("train",), known=job))

    return Workload(
        name=job.loaded.path.stem,
        loss=lambda variables, arrays, key: job.loss(variables, arrays, key, train=True),
        abstract=job.abstract,
        frozen=updates.frozen,
        optimizer=updates.optimizer,
        update_state=job.update_state,
        update_work=updates.work,
        batch=lambda size: abstract_batch(job, size),
        global_batch_size=section.train.global_batch_size,
        micro_batch_size=_fixed_micro_batch(job),
        seq_length=tokens,
        mesh=None if section.mesh == "auto" else section.mesh.model_dump(),
        override=overrides(section),
        remat="none" if section.train.remat == "auto" else section.train.remat,
        dtype=section.model.dtype,
        recomputing=recomputing if section.train.remat == "auto" and _names_models(section) else None,
        where=job.where,
        whole_batch=job.plugin.whole_batch,
        steps=timeline.steps,
        privacy=updates.privacy,
        xla=step_options(section.train.xla),
        compares=section.planning == "compile",
    )


def _names_models(section: Recipe) -> bool:
    """Whether any model is built by its name or config; what a plugin builds recomputes what it wants."""
    models: list[ModelSection | OtherModelSection] = [section.model, *section.models.values()]
    return any(one.name is not None or one.config is not None for one in models)


def _fixed_micro_batch(job: Job) -> int | None:
    """The size of micro-batches that the recipe or the plugin leaves no choice of."""
    train = job.recipe.train
    if job.plugin.whole_batch:
        return train.global_batch_size
    return None if train.micro_batch_size == "auto" else train.micro_batch_size


def _model_workload(target: str, batch_size: int, seq_length: int | None, dtype: str, kept_in: str) -> Workload:
    known = None if _is_directory(target) else preset(target)
    section = _section(target).model_copy(update={"dtype": dtype})
    place = " ".join(target.split())[:60]

    def where(key: str) -> str:
        return f"{place}: {_OPTIONS.get(key, key)}"

    config = read_config(section, where=where)
    name = config.model_type if target.lstrip().startswith("{") else target if known is None else known.name

    def with_remat(remat: Remat) -> Workload:
        model = resolve_model(section, where=where, remat=remat)
        has_tokens = not isinstance(model, DiffusionModel) and model.task != "image_classification"
        if seq_length is not None and not has_tokens:
            raise UsageError("--seq-length", f"the examples of {name} are images, and no tokens", "leave it out")
        length = seq_length or (
            known.seq_length if known else min(_positions(model.config) or DEFAULT_SEQ_LENGTH, _LONGEST)
        )
        whole_batch = not isinstance(model, DiffusionModel) and model.task == "clip"
        return Workload(
            name=name,
            loss=lambda variables, arrays, key: default_loss(model, variables.params, arrays, key),
            abstract=Variables(_kept_in(kept_in, model.abstract), step=jax.ShapeDtypeStruct((), jnp.int32)),
            frozen=frozenset(),
            optimizer=_in_its_types(optax.adamw(1e-4)),
            update_state=lambda variables, _: variables.state,
            batch=lambda size: default_batch(model, size, length),
            global_batch_size=batch_size,
            micro_batch_size=batch_size if whole_batch else None,
            seq_length=length if has_tokens else None,
            mesh=None,
            override=(),
            remat=remat,
            dtype=dtype,
            recomputing=with_remat if remat == "none" else None,
            where=where,
            whole_batch=whole_batch,
            xla=step_options("auto"),
        )

    workload = with_remat("none")
    positions = _positions(config)
    if seq_length is not None and positions is not None and seq_length > positions:
        warn(f"{name} has {positions:,} positions, and --seq-length is {seq_length:,}")
    return workload


def _kept_in(dtype: str, params: Any) -> Any:
    """Abstract parameters of another type."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), params)


def _in_its_types(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same, whose new state has the types of the old one, though gradients are in float32."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, following = optimizer.update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: new.astype(old.dtype), following, state)

    return optax.GradientTransformation(optimizer.init, update)


def _section(target: str) -> ModelSection:
    """The model that a name, a path or a config stands for."""
    known = preset(target)
    if target.lstrip().startswith("{"):
        return ModelSection(config=parse_yaml(target, "MODEL").data)
    if target.endswith(".json"):
        if not os.path.isfile(target) or Path(target).name != "config.json":
            problem = "is no config.json of a model" if os.path.isfile(target) else "there is no such file"
            raise UsageError(target, problem, "give the directory of a saved model, or its config.json")
        return ModelSection(name=str(Path(target).parent.absolute()))
    if known is not None and not _is_directory(target):
        return ModelSection.model_validate({"config": dict(known.config), "task": known.task})
    if not _is_directory(target) and target.count("/") != 1:
        close = close_presets(target)
        remedy = f"did you mean {close[0]}?" if close else "redco inspect-sharding --list shows what is built in"
        raise UsageError(target, "no recipe, no directory, no preset and no hub id", remedy)
    return ModelSection(name=target)


def _is_directory(target: str) -> bool:
    """Whatever was typed: what is too long for a path is none."""
    return os.path.isdir(os.path.expanduser(target))


def _positions(config: Any) -> int | None:
    """Tokens that a model was made for; None where its config does not say."""
    config = getattr(config, "text_config", None) or config
    values = (
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    )
    return next((value for value in values if isinstance(value, int) and value > 0), None)
