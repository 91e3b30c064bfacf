"""The only `while` of training.

The loop dispatches step k + 1 before it looks at the metrics of step k: the device never waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from redco_cli.errors import RedcoError
from redco_cli.plugin.contract import Context, Example, Params
from redco_cli.runtime.mesh import put_like
from redco_cli.runtime.stopping.signals import Stopped, in_one_piece
from redco_cli.training.cuts.proof import prove_cut
from redco_cli.training.evaluate import compiled_evaluation, evaluate, no_eval_data
from redco_cli.training.evaluations import Evaluations
from redco_cli.training.input_pipeline import DeviceBatch, compile_ahead, device_batches, open_census
from redco_cli.training.optimizer import with_schedules_of
from redco_cli.training.patience import Patience
from redco_cli.training.records.observer import Observer
from redco_cli.training.records.profile import StepProfiler
from redco_cli.training.records.speed import Meter
from redco_cli.training.saving.constant import refuse_new_constants
from redco_cli.training.saving.outer_state import SavedOuterState
from redco_cli.training.saving.resume import Start
from redco_cli.training.setup import Setup, train_program
from redco_cli.training.state import TrainState, partition, paths


class TrainingRun:
    """A run with its state.

    Attributes:
        evaluations: what is known of them.
        boundary_at: the step of the last boundary of an outer loop; where the run started, before the first.
        outer_state: what an outer loop keeps, to be saved besides; None without one.
    """

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
        self.evaluations = Evaluations(setup.job, setup.recorder, setup.progress, start, patience)
        watched = (setup.job, setup.timeline, setup.recorder, setup.progress, setup.checkpoints)
        self._observer = Observer(*watched, self._meter, self._census, setup.privacy)
        self.boundary_at, self._best_at_boundary = start.step, start.best
        self.outer_state: Callable[[], SavedOuterState] | None = None
        self._saved_digest: str | None = None
        self._train_step = train_program(setup, state, self._compiling)
        self._profiler = StepProfiler(
            setup.job.recipe.train.profile, start.directory, start.step, self._meter.paused, self._train_step.sources
        )
        self._eval_step = compiled_evaluation(setup.job, setup.placement, self._compiling)
        places = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
        self._fresh_optimizer = jax.jit(setup.optimizer.init, out_shardings=places)

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
        setup = self._setup
        refuse_new_constants(params, setup.meta.digests, setup.placement.mesh, setup.job.plugin.file)
        frozen = frozenset(paths(self._state.frozen))
        trainable, rest = partition(params, frozen)
        old = self._state
        places = jax.tree.map(put_like, trainable, old.trainable), jax.tree.map(put_like, rest, old.frozen)
        self._state = replace(old, trainable=places[0], frozen=places[1])
        self._replaced = True

    @property
    def means(self) -> dict[str, float]:
        """Means of loss and metrics over all steps of this process."""
        return self._observer.means

    def train(self) -> dict[str, float]:
        """Trains to the end of the recipe; evaluates, saves and stops in between.

        Returns:
            The means of loss and metrics.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
            TrainingError: too many steps in a row were not finite.
            PluginError, DataError: a batch could not be made.
        """
        return self._train(self._batches(None, None), in_pieces=False)

    def train_piece(self, examples: Sequence[Example] | None, steps: int | None) -> dict[str, float]:
        """A piece of an outer loop: nothing happens in between; see `plugin.contract.Run.train`."""
        return self._train(self._batches(examples, steps), in_pieces=True)

    def _train(self, batches: Generator[DeviceBatch, None, None], *, in_pieces: bool) -> dict[str, float]:
        waiting: tuple[int, Any] | None = None
        with closing(batches), self._profiler.around(ends=not in_pieces):
            for batch, counts in batches:
                if self._step == 0:
                    job, placement, steps = self._setup.job, self._setup.placement, self._setup.timeline.steps
                    prove_cut(job, placement, steps, self._state.variables, batch, self._compiling)
                with self._profiler.step(self._step, self._state):
                    self._state, metrics = self._train_step(self._state, batch)
                self._step += 1
                self._profiler.after(self._step, metrics)
                if waiting is not None:
                    self._observer.see(*waiting)
                waiting = (self._step, {**metrics, "compilations": self._train_step.compilations})
                self._meter.add(*counts)
                if not in_pieces and (self._setup.stop.due() or self._is_milestone(self._step)):
                    self._observer.see(*waiting)
                    waiting = None
                    self._milestone()
                    if self.evaluations.patience.is_over:
                        break
            if waiting is not None:
                self._observer.see(*waiting)
        return self._observer.end_piece()

    def evaluate(self, examples: Sequence[Example] | None = None) -> dict[str, float]:
        """Evaluates; see `plugin.contract.Run.evaluate`. On the recipe's data the result is recorded.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
        """
        with self._stopping():
            return self._evaluate(examples)

    def _evaluate(self, examples: Sequence[Example] | None = None) -> dict[str, float]:
        setup = self._setup
        with self._meter.paused(self._state):
            shown = functools.partial(setup.progress.phase, "evaluating")
            predicted = (lambda some, of: setup.predict(some, of, ())) if setup.job.recipe.eval.predict else None
            what = (setup.job, setup.placement.mesh, self._eval_step, self._state.variables, examples)
            values = evaluate(*what, shown, predicted)
        if examples is None:
            self.evaluations.add(self._step, values)
        return values

    def predict(self, examples: Sequence[Example] | None, salt: Sequence[int]) -> list[Any]:
        """Predicts; see `plugin.contract.Run.predict`. Calls with other salts draw other numbers.

        Raises:
            DataError: there are no examples: neither these nor eval data.
        """
        chosen = self._setup.job.eval_examples if examples is None else examples
        if chosen is None:
            raise no_eval_data(self._setup.job)
        with self._meter.paused(self._state):
            return self._setup.predict(self._state.variables, chosen, salt)

    def advance(self, steps: int) -> None:
        """Counts steps that an outer loop did itself: the data and the optimizer do not notice."""
        self._step += steps
        self._state = replace(self._state, step=put_like(self._step, self._state.step))

    def reset_optimizer(self) -> None:
        """Begins the optimizer's state anew, but for how far its schedules have come."""
        fresh = self._fresh_optimizer(self._state.trainable)
        self._state = replace(self._state, opt_state=with_schedules_of(self._state.opt_state, fresh))
        self._replaced = True

    def boundary(self, *, force: bool = False, at_end: bool = False) -> None:
        """Between two pieces of an outer loop: evaluation, checkpoint, the end that a signal asked for.

        Args:
            force: write a checkpoint though none is due.
            at_end: no piece comes after it: everything is due.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
        """
        timeline, stopping, known = self._setup.timeline, self._setup.stop.due(), self.evaluations
        if at_end:
            self._profiler.finish()
        due = self._setup.job.eval_examples is not None and not known.has(self._step)
        due = due and (at_end or timeline.passed(self.boundary_at, self._step, timeline.eval_every))
        known.pending = self._step if due and stopping else None
        if due and not stopping:
            with in_one_piece():
                self._evaluate()
        known.settle(self._step)
        if stopping and (due or not at_end):
            raise self._stopped()
        improved = known.best != self._best_at_boundary
        if force or at_end or improved or timeline.passed(self.boundary_at, self._step, timeline.checkpoint_every):
            self.save()
        self.boundary_at, self._best_at_boundary = self._step, known.best
        known.begin()

    def save(self) -> None:
        """Writes a checkpoint of the current state, unless it is there already and nothing was assigned since."""
        known, outer = self.evaluations, None if self.outer_state is None else self.outer_state()
        changed = self._replaced or (outer is not None and outer.digest != self._saved_digest)
        with self._meter.paused(self._state):
            pending = known.pending == self._step
            metric = known.metric_at(self._step)
            meta = replace(self._setup.meta, step=self._step, metric=metric, best=known.best, put_off=pending)
            self._setup.checkpoints.save(self._state, meta, outer, replace=changed)
            self._replaced, self._saved_digest = False, None if outer is None else outer.digest

    def _batches(self, examples: Sequence[Example] | None, steps: int | None) -> Generator[DeviceBatch, None, None]:
        """The batches of one call of `train`: the recipe's data from where the run is, or other examples."""
        job, mesh, privacy = self._setup.job, self._setup.placement.mesh, self._setup.privacy
        if examples is None:
            last = self._step if self.evaluations.patience.is_over else self._setup.timeline.steps
            steps_left = range(self._step, last if steps is None else min(last, self._step + steps))
            ahead, seed = range(self._step, last), job.recipe.seed
            compile_ahead(job, mesh, self._train_step, self._state, job.train_rows, ahead, seed, privacy)
            what = (job, mesh, self._meter, job.train_rows, steps_left, seed, self._census)
            return device_batches(*what, privacy=privacy)
        examples = job.rows_of(examples, "train")
        count = -(-len(examples) // job.recipe.train.global_batch_size) if steps is None else steps
        count = min(count, self._setup.timeline.steps - self._step)
        seed = int(np.random.SeedSequence((job.recipe.seed, self._step)).generate_state(1)[0])
        compile_ahead(job, mesh, self._train_step, self._state, examples, range(count), seed)
        return device_batches(job, mesh, self._meter, examples, range(count), seed, done=self._step)

    def _is_milestone(self, step: int) -> bool:
        timeline = self._setup.timeline
        return timeline.due(step, timeline.eval_every) or timeline.saves(step)

    def _milestone(self) -> None:
        """What happens between two steps: evaluation, checkpoint, the end that a signal asked for."""
        timeline, stopping, improved = self._setup.timeline, self._setup.stop.exit_code is not None, False
        due = self._setup.job.eval_examples is not None and timeline.due(self._step, timeline.eval_every)
        self.evaluations.pending = self._step if due else None
        if due and not stopping:
            try:
                improved = self._evaluates_better()
            except Stopped:
                stopping = True
        if stopping and (due or self._step != timeline.steps):  # else all is done: there is nothing to stop
            raise self._stopped()
        if improved or timeline.saves(self._step):
            self.save()

    def catch_up(self) -> None:
        """Does the evaluation that a signal or an error left undone when the checkpoint of this step was saved."""
        if self.evaluations.pending is not None and self._setup.job.eval_examples is not None:
            with self._stopping():
                self._evaluates_better()
            self._replaced = True  # not the state, but what the checkpoint says of itself: it is evaluated now
            self.save()
            self.evaluations.begin()

    def _evaluates_better(self) -> bool:
        before = self.evaluations.best
        self._evaluate()
        self.evaluations.pending = None
        return self.evaluations.best != before

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            raise self._stopped() from None

    def _stopped(self) -> RedcoError:
        """Saves what is not saved, and returns what to raise."""
        stop, checkpoints = self._setup.stop, self._setup.checkpoints
        if self._step == 0 and not self._replaced and self.outer_state is None:
            return stop.outcome("training", "before its first step; nothing was to be saved")
        self.save()
        self.save()  # waits for the first, and writes it once more where it was deleted meanwhile
        checkpoints.wait()
        return stop.outcome(str(checkpoints.path(self._step)), f"after step {self._step}; saved")

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        with self._meter.paused(self._state), self._setup.progress.compiling(what):
            yield
