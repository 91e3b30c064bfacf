"""What `run_fn` of a plugin drives: pieces of work, and boundaries between them.

A piece (`train` on some examples or for some steps, `evaluate`, `predict`) is done as a whole, whatever a signal asked
for: `run_fn` alone knows when its parameters are those of the run, and not those of one client. It says so by `save`.
There what is due happens, an evaluation or a checkpoint, and there the run ends if it was asked to. A checkpoint holds
`state` too, so that `run_fn`, which begins at its first line when the run continues, finds where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from types import CodeType
from typing import Any

import jax
import numpy as np

from redco_cli.console import note, warn
from redco_cli.errors import PluginError
from redco_cli.plugin.contract import Context, Example, Params
from redco_cli.plugin.guard import guarded
from redco_cli.runtime.peers.multihost import process_allgather
from redco_cli.runtime.stopping.signals import in_one_piece
from redco_cli.training.loop import TrainingRun
from redco_cli.training.saving.outer_state import KINDS, OuterState, SavedOuterState, to_saved
from redco_cli.training.setup import Setup


class OuterLoop:
    """A run in the hands of `run_fn`; see `plugin.contract.Run`, which says what each method does.

    Attributes:
        state: what `run_fn` keeps; None in a fresh run.
        steps: where the run ends.
        examples: of the recipe, for training.
    """

    def __init__(self, run: TrainingRun, setup: Setup, restored: OuterState) -> None:
        """Does nothing yet.

        Args:
            run: ready to train.
            setup: what it is made of.
            restored: what a run that continues has kept.
        """
        self.state = restored.state
        self.steps, self.examples = setup.timeline.steps, setup.job.train_examples
        self._run, self._predictions = run, restored.predictions
        self._place = f"{setup.job.plugin.file}: run_fn"
        self._is_over, self._is_fresh = restored.is_over, run.step == 0 and restored.state is None
        self._has_worked, self._assigned_at, self._uncounted = False, -1, 0
        self._told: set[str] = set()
        run.outer_state = self._saved
        run.evaluations.restore(restored, run.step)

    @property
    def ctx(self) -> Context:
        """What the plugin's functions are told."""
        return self._run.ctx

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._run.step

    @property
    def params(self) -> Params:
        """The current parameters."""
        return self._run.params

    @params.setter
    def params(self, params: Params) -> None:
        self._refuse_other_shapes(params)
        self._has_worked, self._assigned_at = True, self.step
        self._run.params = params

    def train(self, examples: Sequence[Example] | None = None, steps: int | None = None) -> Mapping[str, float]:
        """Trains; see `plugin.contract.Run.train`.

        Raises:
            PluginError: there are no examples, or the number of steps makes no sense.
        """
        if examples is not None and not len(examples):
            raise PluginError(self._place, "run.train was given no examples", "leave out clients that have none")
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise PluginError(self._place, f"run.train was given steps={steps!r}", "give a positive number")
        self._has_worked = True
        self._tell_of_the_cap("run.train", steps)
        if examples is None and steps is None:
            return self._run.train()
        return self._run.train_piece(examples, steps)

    def advance(self, steps: int = 1) -> None:
        """Counts steps that `run_fn` did itself; see `plugin.contract.Run.advance`.

        Raises:
            PluginError: the number makes no sense.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise PluginError(self._place, f"run.advance was given {steps!r}", "give a positive number of steps")
        self._has_worked = True
        self._tell_of_the_cap("run.advance", steps)
        self._run.advance(min(steps, self.steps - self.step))

    def evaluate(self, examples: Sequence[Example] | None = None) -> Mapping[str, float]:
        """Evaluates; see `plugin.contract.Run.evaluate`.

        Raises:
            PluginError: there are no examples.
        """
        if examples is not None and not len(examples):
            raise PluginError(self._place, "run.evaluate was given no examples", "leave out clients that have none")
        self._has_worked = True
        with in_one_piece():
            return self._run.evaluate(examples)

    def predict(self, examples: Sequence[Example] | None = None) -> list[Any]:
        """Predicts; see `plugin.contract.Run.predict`."""
        self._has_worked = True
        self._predictions += 1
        if examples is not None and not len(examples):
            return []
        with in_one_piece():
            return self._run.predict(examples, (self._run.step, self._predictions))

    def log(self, values: Mapping[str, float]) -> None:
        """Records values of the outer loop; see `plugin.contract.Run.log`.

        Raises:
            PluginError: one is no number, or all of it no mapping.
        """
        if not isinstance(values, Mapping):
            problem = f"run.log was given {values!r:.60}"
            raise PluginError(self._place, problem, 'give numbers by name: run.log({"return": 1.5})')
        for name, value in values.items():
            if np.ndim(value) or not isinstance(value, Real | np.number | jax.Array):
                problem = f"run.log was given {value!r:.60} for {name}, which is no number"
                raise PluginError(self._place, problem, "log numbers; keep other things in run.state")
        self._run.evaluations.log(self._run.step, values)

    def reset_optimizer(self) -> None:
        """Begins the optimizer's state anew; see `plugin.contract.Run.reset_optimizer`."""
        self._run.reset_optimizer()

    def save(self, *, force: bool = False) -> None:
        """A boundary; see `plugin.contract.Run.save`.

        Raises:
            Interrupted, Requeue: a signal asked the run to end; a checkpoint is saved.
            PluginError: `state` cannot be saved, or differs between processes.
        """
        if self._assigned_at == self.step == self._run.boundary_at and not force:
            self._uncounted += 1
        if self._uncounted == 2:  # once is a choice of the best
            self._tell(
                "run.params was assigned twice, but no step counted between run.save() and run.save(): nothing becomes "
                "due by steps; call run.advance() after each update that is not run.train's"
            )
        digests = process_allgather("run.state", self._saved().digest)
        other = next((index for index, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            problem = f"run.state of process {other} differs from that of process 0"
            raise PluginError(
                self._place, problem, "derive it from values that all processes have, such as run.predict"
            )
        self._run.boundary(force=force)

    def drive(self, run_fn: Any) -> None:
        """Calls `run_fn`, and ends the run behind it.

        Raises:
            PluginError: it raised, or did nothing.
        """
        if self._is_over:  # only an evaluation was left to be done
            return
        if not _mentions(run_fn.__code__, "save"):
            note("run_fn never calls run.save(): a signal waits for its end, and nothing of it can be continued")
        with guarded(self._place, "run_fn", self._place.partition(": ")[0]):
            run_fn(self)
        if self._is_fresh and not self._has_worked:
            problem = "run_fn did nothing: it neither trained, evaluated nor predicted"
            raise PluginError(self._place, problem, "call run.train() in it, or remove it")
        self._is_over = True
        self._run.boundary(at_end=True)

    def _saved(self) -> SavedOuterState:
        try:
            known = self._run.evaluations
            counted, is_evaluated = self._predictions, known.has(self.step)
            return to_saved(OuterState(self.state, counted, known.logged, self._is_over, is_evaluated))
        except TypeError as error:
            raise PluginError(self._place, f"{error}, which cannot be saved", f"keep {KINDS}") from None

    def _refuse_other_shapes(self, params: Params) -> None:
        known, given = (
            {jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf) for path, leaf in leaves}
            for leaves in map(jax.tree.leaves_with_path, (self._run.params, params))
        )
        found = [f"without {path}" for path in known if path not in given]
        found += [f"with {path}, which the model has not" for path in given if path not in known]
        found += [
            f"with {path} of shape {list(given[path])} instead of {list(shape)}"
            for path, shape in known.items()
            if path in given and given[path] != shape
        ]
        if found:
            more = f", and {len(found) - 1} more such" if found[1:] else ""
            problem = f"run.params was given parameters {found[0]}{more}"
            raise PluginError(self._place, problem, "assign all of them, as run.params has them: {**run.params, ...}")

    def _tell_of_the_cap(self, call: str, steps: int | None) -> None:
        left = self.steps - self.step
        if steps is not None and 0 < left < steps:
            self._tell(f"{call} was to do {steps} steps, and does {left}: these are left of {self.steps} (train.steps)")
        if left <= 0:
            self._tell(
                f"{call} does nothing more: all {self.steps} steps are done (train.steps); "
                "a loop of run_fn ends with `while run.step < run.steps`"
            )

    def _tell(self, text: str) -> None:
        """Says something once: a loop would say it in every round."""
        if text not in self._told:
            self._told.add(text)
            warn(text)


def _mentions(code: CodeType, name: str) -> bool:
    """Whether a function, or one that is defined in it, uses a name."""
    return name in code.co_names or any(
        _mentions(inner, name) for inner in code.co_consts if isinstance(inner, CodeType)
    )
