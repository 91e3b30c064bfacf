"""Opens a training run: its state, its records, its checkpoints; and closes them whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from redco_cli.adapters.rates import relative_rates
from redco_cli.console import TrainProgress, note, warn
from redco_cli.data.stream import is_seekable
from redco_cli.errors import DataError, PluginError, RecipeError, StorageError
from redco_cli.job import Job
from redco_cli.models.several import MAIN, keeps_base, unsaved
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.privacy.accounting import plan_budget
from redco_cli.recipe.load import RESOLVED_NAME, resolved_yaml, shown
from redco_cli.recipe.paths import pin_paths
from redco_cli.runtime.peers.multihost import current_connection, is_main_process
from redco_cli.runtime.program import out_of_memory
from redco_cli.runtime.stopping.signals import StopRequest
from redco_cli.training.loop import TrainingRun
from redco_cli.training.optimizer import (
    Updates,
    join_segments,
    make_optimizer,
    own_optimizer,
    update_work,
    with_clipping,
)
from redco_cli.training.outcome import kept_by_loop
from redco_cli.training.outer_loop import OuterLoop
from redco_cli.training.patience import find_patience
from redco_cli.training.precision.loss_scale import first_scale
from redco_cli.training.records.metrics import METRICS_NAME, Recorder, read_records
from redco_cli.training.records.plot import plot_losses
from redco_cli.training.records.sinks import open_sinks
from redco_cli.training.saving.constant import load_constants, refuse_others
from redco_cli.training.saving.extension import leave_behind
from redco_cli.training.saving.files.digest import digests
from redco_cli.training.saving.identity import remembering
from redco_cli.training.saving.initial import load_initial_params
from redco_cli.training.saving.meta import Meta
from redco_cli.training.saving.owner import check_owner, write_again
from redco_cli.training.saving.resume import Start
from redco_cli.training.setup import Predict, Setup
from redco_cli.training.state import TrainState, frozen_paths, new_state, partition
from redco_cli.training.timeline import Timeline

SHARDING_NAME = "sharding.json"
"""Where every parameter of a run lives, and why, in its output directory."""


def plan_updates(job: Job, timeline: Timeline) -> Updates:
    """The recipe's optimizer, or the plugin's, proved on abstract parameters: nothing is computed.

    Raises:
        RecipeError: `train.freeze` or `privacy` is wrong, or `adapter.lr_ratio` beside an `optimizer_fn`.
        PluginError: `optimizer_fn` raised, or returned what cannot update these parameters.
    """
    train, schedule = job.recipe.train, join_segments(job.recipe.train, timeline.segments)
    frozen = frozen_paths(job.model.abstract, train.freeze, getattr(job.model, "frozen", ()), job.where("train.freeze"))
    rates = relative_rates(job.model, job.recipe, job.where, job.plugin.file if job.plugin.optimizer_fn else None)
    privacy = plan_budget(job.recipe, job.train_size, timeline.steps, job.where)
    if privacy is not None and any(leaf.dtype.kind == "c" for leaf in jax.tree.leaves(job.model.abstract)):
        problem = "complex parameters have gradients to which no noise is added here"
        raise RecipeError(job.where("privacy"), problem, "keep real and imaginary parts as two parameters")
    if job.plugin.optimizer_fn is None:
        stacked = getattr(job.model, "stacked", {})
        optimizer = with_clipping(make_optimizer(train, schedule, stacked, rates), train.max_grad_norm)
        return Updates(optimizer, schedule, frozen, privacy, partial(update_work, train, stacked))
    given = own_optimizer(job, schedule, partition(job.model.abstract, frozen)[0])
    return Updates(with_clipping(given, train.max_grad_norm), schedule, frozen, privacy)


@contextlib.contextmanager
def open_run(
    job: Job,
    placement: Placement,
    timeline: Timeline,
    updates: Updates,
    start: Start,
    progress: TrainProgress,
    predict: Predict,
    stop: StopRequest,
    prepared: Callable[[Job, Variables], Job] = lambda job, _: job,
) -> Iterator[tuple[TrainingRun, OuterLoop | None]]:
    """A run that is ready to train, and where the plugin has a `run_fn` what that drives.

    Args:
        job: recipe, plugin, model, data.
        placement: where everything lives.
        timeline: when things happen.
        updates: how parameters change.
        start: the output directory and the checkpoint to continue.
        progress: the live line.
        predict: variables and examples to predictions.
        stop: what a signal asked for.
        prepared: the job with what its plugin computes of every example before the first step.

    Raises:
        RedcoError: weights or checkpoint cannot be read, or the output directory cannot be written.
    """
    pinned = pin_paths(job.loaded)
    state = _first_state(job, placement, updates, start)
    job = prepared(job, state.variables)
    with contextlib.ExitStack() as stack:
        check_owner(start.directory)
        leave_behind(start.checkpoints, start.left, start.directory / start.folder, (RESOLVED_NAME, METRICS_NAME))
        start.checkpoints.set_aside()
        start.checkpoints.sweep()
        stack.callback(start.checkpoints.close)
        recorder = stack.enter_context(_open_recorder(job, start, plain := pinned.recipe.model_dump(mode="json")))
        described = json.dumps(placement.described(job), indent=1)
        texts = {RESOLVED_NAME: resolved_yaml(pinned, timeline.steps), SHARDING_NAME: described}
        _write_missing(start.directory, texts, replace=True)
        write_again(start.directory, lambda: _write_missing(start.directory, texts))
        _bookmark(job.train_rows, start, timeline)
        stack.callback(_plot, start.directory, job.recipe.logging.plot)
        about = _about(job, placement, timeline, state, start, {**plain, "output_dir": str(start.directory)})
        start.checkpoints.keep_base(state.params, about.digests[MAIN] if keeps_base(job.recipe) else None)
        changes = (updates.optimizer, updates.schedule, updates.privacy)
        setup = Setup(job, placement, timeline, *changes, recorder, start.checkpoints, progress, predict, stop, about)
        if updates.privacy is not None:
            note(updates.privacy.told())
        for one in start.continued.unrecorded:
            recorder.record(start.step, "run", {"accepted": one["what"], "why": one["why"], "changed": one["changed"]})
        run = TrainingRun(setup, state, start, find_patience(start, job.recipe.eval))
        stack.enter_context(remembering(start.identity, start.continued, lambda: run.step, start.checkpoints.wait))
        if job.plugin.run_fn is None:
            yield run, None
        else:
            yield run, OuterLoop(run, setup, kept_by_loop(start))


@contextlib.contextmanager
def saved_at_its_end(run: TrainingRun, job: Job) -> Iterator[None]:
    """What surrounds training: the evaluations before it, and the checkpoint of its end, or of where it failed.

    Raises:
        PluginError, DataError, RecipeError: the plugin, the data or a name in the recipe failed on the way; a
            checkpoint of the steps before is saved (of a `run_fn` there is that of its last `run.save()`), and the same
            command continues once that is repaired, first with the evaluation if that is what failed.
        DeviceError: the devices have too little memory.
    """
    try:
        if job.recipe.eval.at_start and run.step == 0:
            run.evaluate()
        run.catch_up()
        yield
    except (PluginError, DataError, RecipeError) as error:
        # A process that fails alone cannot save what the others hold, nor an outer loop what it is in the midst of.
        together = current_connection() is None or error.on_all_processes
        if run.step and together and job.plugin.run_fn is None:
            run.save()
        raise
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # where the device works behind the host, it fails when it is waited for
        raise out_of_memory(error, "training") from error
    run.save()
    run.save()  # waits for the first, and writes it once more where it was deleted meanwhile


def _first_state(job: Job, placement: Placement, updates: Updates, start: Start) -> TrainState:
    """The state to train from, born on the mesh: restored, or begun with the first parameters."""

    def begin(params: Params) -> TrainState:
        return new_state(params, updates.frozen, updates.optimizer, job.first_state, first_scale(job.recipe))

    abstract = jax.eval_shape(begin, job.model.abstract)
    shardings = placement.following(abstract, job.model.abstract)
    if start.source is not None:
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
        )
        for line in filter(None, (start.said, f"continuing from {shown(start.source.path(start.step))}")):
            note(line)
        restored = start.source.restore(start.step, placed)
        constants, meta = load_constants(job, placement, start.source), start.source.meta(start.step)
        checkpoint = shown(start.source.path(start.step))
        refuse_others(digests(constants, placement.mesh), meta.digests, job.where, checkpoint)
        return dataclasses.replace(restored, frozen=restored.frozen | constants)
    params, fresh = load_initial_params(job, placement, start.initial)
    for name, given in start.initial.items():
        of_model = "" if name == MAIN else f" for {name}"
        note(f"beginning with the parameters of {given.name}{of_model}")
    if fresh:
        note(f"the checkpoint has no {', '.join(fresh)}: initialised, to be trained")
    state: TrainState = jax.jit(begin, out_shardings=shardings, donate_argnums=0)(params)
    return state


def _about(
    job: Job, placement: Placement, timeline: Timeline, state: TrainState, start: Start, recipe: Mapping[str, Any]
) -> Meta:
    """What every checkpoint says of a run, as of step 0."""
    constants = {name: state.frozen[name] for name in unsaved(job.recipe)}
    return Meta(
        step=0,
        metric=None,
        best=None,
        put_off=False,
        recipe=recipe,
        segments=[vars(one) for one in timeline.segments],
        digests=digests(constants, placement.mesh),
        init_shapes=job.init_shapes,
        identity=start.identity.now(),
        accepted=list(start.continued.accepted),
    )


def _bookmark(examples: Any, start: Start, timeline: Timeline) -> None:
    """Keeps the checkpoint before a decay; and in all where a stream is, and lets it go on from where it was."""
    start.checkpoints.branch_point = timeline.branch_point
    if is_seekable(examples):
        start.checkpoints.position = examples.journal.saved
        if start.data is not None:
            examples.journal.load(start.step, start.data)


def _open_recorder(job: Job, start: Start, resolved: Mapping[str, Any]) -> Recorder:
    resumes = start.source is not None
    if start.put_off and is_main_process():
        _forget_evaluation(start.directory / METRICS_NAME, start.step)
    sinks = open_sinks(job.recipe.logging, start.directory, start.step if resumes else None, resolved)
    recorder = Recorder(start.directory, fresh=not resumes, sinks=sinks)
    if resumes:
        recorder.rewind(start.step)
    return recorder


def _forget_evaluation(path: Path, step: int) -> None:
    """Drops the evaluation of a step that is to be done again: a run that did it was killed before it could save."""
    records = read_records(path) if path.exists() else []
    kept = [record for record in records if (record["kind"], record["step"]) != ("eval", step)]
    if len(kept) < len(records):
        _write(path, "".join(f"{json.dumps(record, allow_nan=False)}\n" for record in kept))


def _plot(directory: Path, is_wanted: bool) -> None:
    """A picture that cannot be drawn must not hide why a run ended."""
    if not is_wanted or not is_main_process():
        return
    try:
        check_owner(directory)
        if (directory / METRICS_NAME).stat().st_size:
            plot_losses(directory / METRICS_NAME, directory / "loss.png")
    except (OSError, StorageError) as error:
        warn(f"no loss.png: {error}")


def _write_missing(directory: Path, texts: Mapping[str, str], *, replace: bool = False) -> None:
    """Writes files by their names; those that are there too where they are to be replaced."""
    for name, text in texts.items():
        if replace or not (directory / name).exists():
            _write(directory / name, text)


def _write(path: Path, text: str) -> None:
    if not is_main_process():
        return
    check_owner(path.parent)
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(str(path), f"cannot be written: {error.strerror or error}", "free space") from error
