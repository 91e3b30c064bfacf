"""The only `while` of training.

The loop dispatches step k + 1 before it looks at the metrics of step k: the device never waits for the host.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from redco_cli.console import TrainProgress
from redco_cli.errors import RedcoError
from redco_cli.job import Job
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Context, Example, Params
from redco_cli.runtime.mesh import put_like, replicated
from redco_cli.runtime.program import Program
from redco_cli.runtime.stopping.signals import Stopped, StopRequest
from redco_cli.training.evaluate import check_has, compiled_evaluation, evaluate
from redco_cli.training.input_pipeline import DeviceBatch, device_batches, open_census
from redco_cli.training.nonfinite import handle_skipped_step, refuse_to_learn_nothing
from redco_cli.training.optimizer import Schedule
from redco_cli.training.patience import Patience
from redco_cli.training.records.metrics import Meter, Recorder
from redco_cli.training.saving.checkpoint import Checkpoints, Meta
from redco_cli.training.saving.ranking import finite, improves
from redco_cli.training.saving.resume import Start
from redco_cli.training.state import TrainState, partition, paths
from redco_cli.training.step import make_train_step
from redco_cli.training.timeline import Timeline

Predict = Callable[[Params, Sequence[Example]], list[Any]]


@dataclass(frozen=True)
class Setup:
    """What a run is made of; nothing of it changes while training.

    Attributes:
        job: recipe, plugin, model and data.
        placement: where everything lives.
        timeline: when things happen.
        optimizer: the optax transformation, clipping included.
        schedule: updates done to learning rate.
        recorder: writes `metrics.jsonl`.
        checkpoints: writes `checkpoint-<step>/`.
        progress: the live line.
        predict: parameters and examples to predictions.
        stop: what a signal asked for.
        resolved: the resolved recipe, its output_dir absolute, kept in every checkpoint.
    """

    job: Job
    placement: Placement
    timeline: Timeline
    optimizer: Any
    schedule: Schedule
    recorder: Recorder
    checkpoints: Checkpoints
    progress: TrainProgress
    predict: Predict
    stop: StopRequest
    resolved: Mapping[str, Any]


class TrainingRun:
    """A run with its state: what `run_fn` of a plugin drives (see `plugin.contract.Run`)."""

    def __init__(self, setup: Setup, state: TrainState, start: Start, patience: Patience) -> None:
        """Compiles nothing yet.

        Args:
            setup: what the run is made of.
            state: on the mesh; taken over, do not use it afterwards.
            start: where the run starts: `state.step`, known on the host, and what it came to until then.
            patience: what is left of it.
        """
        self._setup, self._state, self._step = setup, state, start.step
        self._meter, self._replaced = Meter(), False
        self._census = open_census(setup.job, setup.timeline.steps, start.step)
        self._best, self._patience = start.best, patience
        self._pending_eval = start.step if start.put_off else None  # the step whose evaluation is still to be done
        self._evaluated: tuple[int, Mapping[str, float]] | None = None
        self.history: list[tuple[int, Mapping[str, float]]] = []
        loss, everywhere = setup.placement.loss(setup.job), replicated(setup.placement.mesh)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        train_step = make_train_step(loss, setup.optimizer, setup.schedule, setup.job.recipe.seed, places.trainable)
        self._train_step = Program(
            "train step", train_step, self._compiling, donate=(0,), out_shardings=(places, everywhere)
        )
        self._eval_step = compiled_evaluation(setup.job, setup.placement, self._compiling)

    @property
    def ctx(self) -> Context:
        """What the plugin's functions are told."""
        return self._setup.job.context("train")

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    @property
    def params(self) -> Params:
        """The current parameters."""
        return self._state.params

    @params.setter
    def params(self, params: Params) -> None:
        frozen = frozenset(paths(self._state.frozen))
        trainable, rest = partition(params, frozen)
        old = self._state
        places = jax.tree.map(put_like, trainable, old.trainable), jax.tree.map(put_like, rest, old.frozen)
        self._state = replace(old, trainable=places[0], frozen=places[1])
        self._replaced = True

    def train(self, examples: Sequence[Example] | None = None, steps: int | None = None) -> dict[str, float]:
        """Trains; see `plugin.contract.Run.train`.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
            TrainingError: too many steps in a row were not finite.
            PluginError, DataError: a batch could not be made.
        """
        sums: defaultdict[str, list[float]] = defaultdict(list)
        waiting: tuple[int, Any] | None = None
        with closing(self._batches(examples, steps)) as batches:
            for batch, counts in batches:
                self._state, metrics = self._train_step(self._state, batch)
                self._step += 1
                if waiting is not None:
                    self._observe(*waiting, sums)
                waiting = (self._step, metrics)
                self._meter.add(*counts)
                if self._setup.stop.due() or self._is_milestone(self._step):
                    self._observe(*waiting, sums)
                    waiting = None
                    self._milestone()
                    if self._patience.is_over:
                        break
            if waiting is not None:
                self._observe(*waiting, sums)
        return {name: float(np.mean(values)) for name, values in sums.items()}

    def evaluate(self, examples: Sequence[Example] | None = None) -> dict[str, float]:
        """Evaluates; see `plugin.contract.Run.evaluate`. On the recipe's data the result is recorded.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
        """
        with self._stopping():
            return self._evaluate(examples)

    def _evaluate(self, examples: Sequence[Example] | None = None) -> dict[str, float]:
        setup = self._setup
        with self._meter.paused():
            values = evaluate(
                setup.job,
                setup.placement.mesh,
                self._eval_step,
                self.params,
                examples,
                functools.partial(setup.progress.phase, "evaluating"),
                setup.predict if setup.job.recipe.eval.predict else None,
            )
        if examples is None:
            self._record_evaluation(values)
        return values

    def predict(self, examples: Sequence[Example] | None = None) -> list[Any]:
        """Predicts; see `plugin.contract.Run.predict`.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
        """
        chosen = self._setup.job.eval_examples if examples is None else examples
        with self._meter.paused(), self._stopping():
            return self._setup.predict(self.params, chosen)

    def log(self, values: Mapping[str, float]) -> None:
        """Records values of an outer loop; see `plugin.contract.Run.log`."""
        self._setup.recorder.record(self._step, "run", values)

    def save(self) -> None:
        """Writes a checkpoint of the current state, unless it is there already and `params` were not assigned since."""
        metric = None
        if self._evaluated is not None and self._evaluated[0] == self._step:
            metric = self._evaluated[1].get(self._setup.job.recipe.eval.best_metric)
        with self._meter.paused():
            meta = Meta(self._step, finite(metric), self._best, self._pending_eval == self._step, self._setup.resolved)
            self._setup.checkpoints.save(self._state, meta, replace=self._replaced)
            self._replaced = False

    def _batches(self, examples: Sequence[Example] | None, steps: int | None) -> Generator[DeviceBatch, None, None]:
        """The batches of one call of `train`: the recipe's data from where the run is, or other examples."""
        job, mesh = self._setup.job, self._setup.placement.mesh
        if examples is None:
            last = self._step if self._patience.is_over else self._setup.timeline.steps
            steps_left = range(self._step, last if steps is None else min(last, self._step + steps))
            return device_batches(job, mesh, self._meter, job.train_examples, steps_left, job.recipe.seed, self._census)
        count = -(-len(examples) // job.recipe.train.global_batch_size) if steps is None else steps
        seed = int(np.random.SeedSequence((job.recipe.seed, self._step)).generate_state(1)[0])
        return device_batches(job, mesh, self._meter, examples, range(count), seed)

    def _is_milestone(self, step: int) -> bool:
        timeline = self._setup.timeline
        return timeline.due(step, timeline.eval_every) or timeline.due(step, timeline.checkpoint_every)

    def _milestone(self) -> None:
        """What happens between two steps: evaluation, checkpoint, the end that a signal asked for."""
        timeline, stopping, improved = self._setup.timeline, self._setup.stop.exit_code is not None, False
        due = self._setup.job.eval_examples is not None and timeline.due(self._step, timeline.eval_every)
        self._pending_eval = self._step if due else None
        if due and not stopping:
            try:
                improved = self._evaluates_better()
            except Stopped:
                stopping = True
        if stopping and (due or self._step != timeline.steps):  # else all is done: there is nothing to stop
            raise self._stopped()
        if improved or timeline.due(self._step, timeline.checkpoint_every):
            self.save()

    def catch_up(self) -> None:
        """Does the evaluation that a signal or an error left undone when the checkpoint of this step was saved."""
        if self._pending_eval is not None and self._setup.job.eval_examples is not None:
            with self._stopping():
                self._evaluates_better()
            self._replaced = True  # not the state, but what the checkpoint says of itself: it is evaluated now
            self.save()

    def _evaluates_better(self) -> bool:
        before = self._best
        self._evaluate()
        self._pending_eval = None
        return self._best != before

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            raise self._stopped() from None

    def _stopped(self) -> RedcoError:
        """Saves what is not saved, and returns what to raise."""
        stop, checkpoints = self._setup.stop, self._setup.checkpoints
        if self._step == 0 and not self._replaced:
            return stop.outcome("training", "before its first step; nothing was to be saved")
        self.save()
        checkpoints.wait()
        return stop.outcome(str(checkpoints.path(self._step)), f"after step {self._step}; saved")

    def _observe(self, step: int, device_metrics: Any, sums: dict[str, list[float]]) -> None:
        """Looks at the metrics of a step: the finite check, the record, the live line."""
        metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
        skipped, streak, weight = int(metrics.pop("skipped")), int(metrics.pop("streak")), metrics.pop("weight")
        for name in metrics.keys() - {"grad_norm", "learning_rate"}:
            if math.isfinite(metrics[name]):
                sums[name].append(metrics[name])
        if streak:
            handle_skipped_step(self._setup.job, step, streak, weight, self._setup.checkpoints, self._census)
            refuse_to_learn_nothing(self._setup.job, step, skipped, weight, self._census)
        timeline = self._setup.timeline
        if step % timeline.log_every and step != timeline.steps:
            return
        rates = self._meter.read()
        speed = {"examples_per_second": rates.examples_per_second, "input_wait": rates.input_wait}
        if rates.tokens_per_second is not None:
            speed["tokens_per_second"] = rates.tokens_per_second
        self._setup.recorder.record(step, "train", {**metrics, "weight": weight, "skipped": skipped, **speed})
        self._setup.progress.update(
            step, metrics["loss"], metrics["learning_rate"], rates.tokens_per_second, rates.examples_per_second
        )

    def _record_evaluation(self, values: Mapping[str, float]) -> None:
        metric = self._setup.job.recipe.eval.best_metric
        check_has(values, metric, self._setup.job)
        self._evaluated = (self._step, values)
        self.history.append((self._step, values))
        self._setup.recorder.record(self._step, "eval", values)
        improved = improves(values.get(metric), self._best, self._setup.job.recipe.eval.best_mode)
        if improved:
            self._best = (self._step, values[metric])
        self._setup.progress.evaluated(self._step, values, improved)
        self._patience.count(improved, self._step)

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        with self._meter.paused(), self._setup.progress.compiling(what):
            yield
