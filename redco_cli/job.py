"""A job: everything that a recipe names, found and proved, before any device memory is taken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.adapters.attach import computed, seen_models, with_adapter
from redco_cli.data.batch import check_shapes
from redco_cli.data.collate import collated
from redco_cli.data.encoded.buckets import LENGTHS, Buckets, buckets_of
from redco_cli.data.places import place_of
from redco_cli.encoding.collate import Collate, bound_collate
from redco_cli.encoding.prepared import Prepared, blank, refuse_unprepared
from redco_cli.encoding.rows import first_examples, refuse_unencoded, refuse_unseen_segments, rows_of
from redco_cli.errors import RecipeError
from redco_cli.examples import find_examples, refuse_best_metric, refuse_untrainable, refuse_without_eval
from redco_cli.models.config.hub import tell_retries_once
from redco_cli.models.config.tokenizer import load_tokenizer
from redco_cli.models.decoder.model import calls_with_segments
from redco_cli.models.own_module import own_model
from redco_cli.models.resolve import resolve_model
from redco_cli.models.several import MAIN, assembled, constant_of, without
from redco_cli.plugin.calls import call_loss, call_predict, call_prepare, prove
from redco_cli.plugin.code.draws import undrawn
from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params, Stage
from redco_cli.plugin.guard import Named, guarded
from redco_cli.plugin.load import LoadedPlugin, load_plugin, refuse_to_cut, with_secrets
from redco_cli.plugin.shapes import Shapes, batch_of, shapes_of
from redco_cli.plugin.state import Stats, Variables, init_state, update_state
from redco_cli.privacy.refusals import refuse_unprivate, seen_batch
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.recipe.paths import find_models
from redco_cli.recipe.schema import Recipe

PROBED_EXAMPLES = 8
"""How many examples make the batch that proves a plugin: enough to tell the batch dim from others."""


@dataclass(frozen=True)
class Job:
    """What a recipe names, at hand.

    Attributes:
        loaded: the recipe, with the origin of its values.
        plugin: the plugin's functions.
        model: the model, with abstract parameters (`model.abstract`); no weights yet.
        tokenizer: its tokenizer or processor, or None.
        train_examples: a sequence, or an iterable of unknown length; None when not asked for.
        eval_examples: a sequence; None where there are none.
        init_shapes: of the batch that the model is built with, or would be; None where nothing says so.
        train_rows: what the loss reads in training: the same examples, or what `encode_fn` made of them.
        eval_rows: likewise in evaluation.
    """

    loaded: LoadedRecipe
    plugin: LoadedPlugin
    model: Any
    tokenizer: Any
    train_examples: Any
    eval_examples: Any
    init_shapes: Shapes | None = None
    train_rows: Any = None
    eval_rows: Any = None

    @property
    def recipe(self) -> Recipe:
        """The typed recipe."""
        return self.loaded.recipe

    def where(self, key: str) -> str:
        """The place of a dotted recipe key."""
        return self.loaded.where(key)

    def context(self, stage: Stage) -> Context:
        """What the plugin's functions are told, those apart that compute with `Variables`."""
        models = Named({} if self.model is None else seen_models(self.model))
        return Context(models.get(MAIN), self.tokenizer, self.plugin.options, self.recipe, stage, models=models)

    def with_pinned(self, pinned: Recipe) -> Job:
        """The same with the sections of another recipe that say where the same models begin."""
        changed = {name: getattr(pinned, name) for name in ("model", "models", "adapter")}
        return replace(self, loaded=replace(self.loaded, recipe=self.recipe.model_copy(update=changed)))

    def completed(self, loaded: LoadedRecipe) -> LoadedRecipe:
        """The recipe as it was given, with what `adapter.from` says of the adapter."""
        return replace(loaded, recipe=loaded.recipe.model_copy(update={"adapter": self.recipe.adapter}))

    def collate(self, stage: Stage) -> Collate:
        """The plugin's `collate_fn` for a stage."""
        return bound_collate(self.plugin, self.context(stage))

    @property
    def collate_place(self) -> str:
        """The place of `collate_fn`, for errors about its batches."""
        return f"{self.plugin.file}: collate_fn"

    def loss(self, variables: Variables, batch: Batch, rng: Any, train: bool) -> Loss:
        """The plugin's `loss_fn`, always a `Loss` of float32 scalars. Traceable."""
        ctx = self.context("train" if train else "eval")

        def loss(seen: Variables, batch: Batch, rng: Any) -> Loss:
            return call_loss(self.plugin, seen.told(ctx), seen.params, batch, rng, train=train)

        found: Loss = computed(self.model, loss, variables, batch, rng, dropout=rng if train else None)
        return found

    def prediction(self, variables: Variables, batch: Batch, rng: Any) -> Any:
        """The plugin's `predict_fn`. Traceable."""

        def predict(seen: Variables, batch: Batch, rng: Any) -> Any:
            return call_predict(self.plugin, seen.told(self.context("predict")), seen.params, batch, rng)

        return computed(self.model, predict, variables, batch, rng, repeats=True)

    def prepared(self, variables: Variables, batch: Batch, rng: Any = None) -> dict[str, Any]:
        """The columns that the plugin's `prepare_fn` makes of a batch, by models that are never updated. Traceable."""
        constant = {name: variables.params[name] for name, one in self.recipe.models.items() if one.frozen}
        return call_prepare(self.plugin, self.context("prepare"), constant, batch)

    def first_state(self, params: Params) -> Any:
        """The plugin's state before the first step, from the parameters that may change; None without. Traceable."""
        return init_state(self.plugin, self.context("train"), without(params, constant_of(self.model)))

    def update_state(self, variables: Variables, stats: Stats) -> Any:
        """The plugin's state after an update; see `plugin.state.update_state`. Traceable."""
        changing = replace(variables, params=without(variables.params, constant_of(self.model)))
        return update_state(self.plugin, self.context("train"), changing, stats)

    @functools.cached_property
    def abstract(self) -> Variables:
        """The shapes of everything that a loss or a prediction is computed from, besides its batch."""
        shapes = jax.eval_shape(lambda params: (self.first_state(params), jnp.int32(0)), self.model.abstract)
        return Variables(self.model.abstract, *shapes)

    @property
    def train_size(self) -> int | None:
        """How many rows there are to train on; None when the data has no known length."""
        return len(self.train_rows) if hasattr(self.train_rows, "__len__") else None

    def buckets(self, rows: Any, stage: Stage, most: int = LENGTHS) -> Buckets | None:
        """What rows that a loss reads are padded to, the recipe's or others; see `buckets_of`."""
        data, known = self.recipe.data, self.train_rows if stage == "train" else self.eval_rows
        if data.buckets == "auto" and self.plugin.build_model is not None:
            return None  # the plugin's own module may have been built for data.max_length
        return buckets_of(data, rows, known, self.recipe.train.global_batch_size if stage == "train" else 1, most)

    def rows_of(self, examples: Any, stage: Stage) -> Any:
        """What the loss reads of examples that are not the recipe's."""
        return rows_of(self.plugin, self.context(stage), examples, f"{self.plugin.file}: run_fn", kept=False)


Given = Sequence[Example] | Callable[[LoadedPlugin], Sequence[Example]]
"""Examples, or what makes them once the plugin is known."""


def prepare(
    loaded: LoadedRecipe,
    *,
    stages: Sequence[Stage],
    given: Given | None = None,
    init_shapes: Shapes | None = None,
    known: Job | None = None,
) -> Job:
    """Finds plugin, tokenizer, model and data, and proves the plugin's functions on a real batch.

    Args:
        loaded: the recipe.
        stages: what the job is for; only the data and functions of these stages are looked at.
        given: examples to take as eval examples, instead of the recipe's.
        init_shapes: what a checkpoint says of the batch that the plugin's own model is built with; without it,
            `init_batch` says so, or else the first batch of the first stage.
        known: a job of the same data, of which the examples are taken instead of reading and encoding them again.

    Raises:
        RedcoError: something is missing, malformed, or breaks the contract.
    """
    tell_retries_once()
    loaded = find_models(with_secrets(loaded))
    plugin = load_plugin(loaded.recipe.plugin, loaded.directory, loaded.where)
    refuse_to_cut(plugin, loaded.recipe.train, loaded.where)
    section = loaded.recipe.model
    named = section.name is not None or section.config is not None
    if not named and plugin.build_model is None:
        problem = f"neither name nor config is given, and {plugin.file} has no build_model"
        raise RecipeError(loaded.where("model"), problem, "name a model, give a config, or define build_model(ctx)")
    model = resolve_model(section, where=loaded.where, remat=loaded.recipe.train.remat) if named else None
    job = Job(loaded, plugin, model, load_tokenizer(section, where=loaded.where), None, None, init_shapes)
    if "train" in stages:
        job = replace(job, train_examples=_examples(job, "train", known))
        refuse_untrainable(loaded, plugin, job.train_examples)
    given = given(plugin) if callable(given) else given
    job = replace(job, eval_examples=_examples(job, "eval", known) if given is None else given)
    if job.eval_examples is None:
        refuse_without_eval(loaded, stages)
    if job.model is None:
        job = _with_own_model(job, stages[0] if stages else "predict")
    model, loaded = with_adapter(assembled(loaded.recipe, job.model, loaded.where), loaded)
    job = _with_columns(_with_rows(replace(job, model=model, loaded=loaded), stages, known), stages)
    first = prove_plugin(job, stages)
    return job if first is None or job.init_shapes is not None else replace(job, init_shapes=shapes_of(first))


def _examples(job: Job, split: Literal["train", "eval"], known: Job | None) -> Any:
    if known is not None:
        return known.train_examples if split == "train" else known.eval_examples
    return find_examples(job.loaded, job.plugin, job.context(split), split, job.train_examples)


def _with_rows(job: Job, stages: Sequence[Stage], known: Job | None) -> Job:
    """The job with what its losses read: encoded for the stages that it is for."""
    if known is not None:
        return replace(job, train_rows=known.train_rows, eval_rows=known.eval_rows)
    refuse_unencoded(job.recipe, job.plugin, job.context("train").models, job.where)
    train, evaluated = job.train_examples, job.eval_examples
    if "train" in stages:
        train = rows_of(job.plugin, job.context("train"), train, job.where("data.train"))
    if "eval" in stages:
        evaluated = rows_of(job.plugin, job.context("eval"), evaluated, job.where("data.eval"))
    return replace(job, train_rows=train, eval_rows=evaluated)


def _with_columns(job: Job, stages: Sequence[Stage]) -> Job:
    """The job whose rows have the columns of `prepare_fn`, of which only the shapes are known yet."""
    if job.plugin.prepare_fn is None or isinstance(job.train_rows, Prepared):
        return job
    for split, rows in (("train", job.train_rows), ("eval", job.eval_rows)):
        if split in stages and rows is not None:
            refuse_unprepared(job.plugin, job.recipe, rows, job.where, split)
            outputs = prove(job.prepared, job.abstract, first_batch(job, "prepare", rows))
            job = replace(job, **cast("Any", {f"{split}_rows": blank(rows, outputs)}))
    return job


def prove_plugin(job: Job, stages: Sequence[Stage]) -> Batch | None:
    """Traces the plugin's functions over one real batch per stage, with abstract parameters.

    Returns:
        The first of these batches; None where no stage has examples.

    Raises:
        PluginError: a function raised, or returned something else than the contract says.
        RecipeError: evaluation will not give the metric that decides which checkpoint is best.
    """
    first: Batch | None = None
    try:
        if job.recipe.predict.use is not None:
            job.abstract.using(job.recipe.predict.use)
    except ValueError as error:
        remedy = "name what init_state returns by that name: parameters of the model"
        raise RecipeError(job.where("predict.use"), str(error), remedy) from None
    for stage in stages:
        if (job.train_examples if stage == "train" else job.eval_examples) is None:
            continue
        batch, train = first_batch(job, stage), stage == "train"
        first = batch if first is None else first
        compute = job.prediction if stage == "predict" else functools.partial(job.loss, train=train)
        with calls_with_segments() as calls, undrawn(job.plugin):
            seen, update = seen_batch(job.recipe, batch, stage), job.update_state if train else None
            proved = prove(compute, job.abstract, seen, update=update)
        if stage != "predict":
            refuse_unprivate(job.recipe, job.plugin, proved, job.where)
            refuse_unseen_segments(job.plugin, job.train_rows if stage == "train" else job.eval_rows, calls)
        if stage == "eval" and "train" in stages:
            refuse_best_metric(job.loaded, job.plugin, ["loss", *proved.metrics])
    return first


def first_batch(job: Job, stage: Stage, examples: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    """The collated first examples of a stage, or others, as long as any: what holds them holds every batch."""
    chosen = {"train": job.train_rows, "eval": job.eval_rows}.get(stage, examples)
    if chosen is None:  # for a prediction; or to build the model, before which nothing is encoded
        chosen = job.train_examples if stage == "train" else job.eval_examples
    probed, buckets = first_examples(chosen, PROBED_EXAMPLES), job.buckets(chosen, stage)
    collate = functools.partial(job.collate(stage), length=None if buckets is None else buckets.lengths[-1])
    return collated(collate, probed, job.collate_place, functools.partial(place_of, chosen))


def _with_own_model(job: Job, stage: Stage) -> Job:
    """The job with the plugin's own model: the same one from stored shapes as from the batch that they are of."""
    shapes = job.init_shapes or _init_shapes(job, stage)
    model = own_model(job.plugin, job.context(stage), batch_of(shapes, PROBED_EXAMPLES))
    return replace(job, model=model, init_shapes=shapes)


def _init_shapes(job: Job, stage: Stage) -> Shapes:
    plugin, where = job.plugin, f"{job.plugin.file}: init_batch"
    if plugin.init_batch is None:
        if plugin.prepare_fn is None or stage == "predict":
            return shapes_of(first_batch(job, stage))
        return shapes_of(first_batch(job, "prepare", job.train_examples or job.eval_examples))
    with guarded(where, "init_batch", plugin.file):
        batch = plugin.init_batch(job.context(stage))
    return shapes_of(check_shapes(batch, where), built_for=True)
