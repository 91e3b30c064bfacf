"""`train.profile`: traces some steps of a run, once, and says what they spend their time on.

JAX's profiler is one for a process. The trace lies in a hidden folder until it is whole: what a signal, an error or a
kill cuts off is no trace, and the run makes it anew when it is continued.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from redco_cli.console import note, warn
from redco_cli.console.profile import show_profile
from redco_cli.recipe.load import shown
from redco_cli.recipe.sections.profile import ProfileSection
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.training.records.trace import STEP, as_json, read_trace, summarise
from redco_cli.training.saving.owner import check_owner

FOLDER = "profile"
SUMMARY = "summary.json"
_NOTHING = contextlib.nullcontext()


class StepProfiler:
    """Traces the steps that a recipe names, on process 0."""

    def __init__(
        self,
        section: ProfileSection | None,
        directory: Path,
        step: int,
        paused: Callable[[Any], contextlib.AbstractContextManager[None]],
        sources: Callable[[], Mapping[str, str]],
    ) -> None:
        """Traces nothing yet.

        Args:
            section: of the recipe.
            directory: the run's output directory.
            step: where the run begins or goes on; in one that goes on, a trace that is there is not made again.
            paused: surrounds what is no training, for whoever measures its speed; given what devices are still at.
            sources: of each instruction of the compiled step, where in the traced function it is from.
        """
        self._paused, self._sources = paused, sources
        self._section = section if is_main_process() else None
        self._first: int | None = None
        self._is_warm, self._last = False, None
        self._owner = directory
        if section is not None:
            self._folder = directory / FOLDER / f"start-{section.start}"
            self._part = self._folder.with_name(f".{self._folder.name}.new")
            if step and (self._folder / SUMMARY).is_file():
                self._section = None

    @contextlib.contextmanager
    def around(self, *, ends: bool) -> Iterator[None]:
        """Surrounds steps: what fails or is stopped within gives up a trace that has begun.

        Args:
            ends: no steps come after them.
        """
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            if not is_whole:
                self.abandon()
            elif ends:
                self.finish()

    def step(self, done: int, state: Any) -> contextlib.AbstractContextManager[Any]:
        """Surrounds the dispatch of a step.

        Args:
            done: steps before it.
            state: what it takes; waited for before a trace begins.
        """
        if self._section is None:
            return _NOTHING
        if self._first is None and self._is_warm and done >= self._section.start:
            self._begin(done, state)
        self._is_warm = True
        return _NOTHING if self._first is None else jax.profiler.StepTraceAnnotation(STEP, step_num=done + 1)

    def after(self, done: int, metrics: Any) -> None:
        """Told of a step that is dispatched; behind the last one of the trace, waits for it and ends the trace.

        Args:
            done: steps, with it.
            metrics: what it returns beside the state.
        """
        if self._first is not None and self._section is not None:
            self._last = metrics
            if done - self._first >= self._section.steps:
                self.finish()

    def finish(self) -> None:
        """Ends the trace where there is one, keeps it, and says what it shows."""
        if self._first is None:
            return
        first, self._first, self._section = self._first, None, None
        with self._paused(self._last):
            try:
                self._keep(first)
            except (OSError, RuntimeError, ValueError) as error:
                warn(f"train.profile: no trace was kept: {error}")
                shutil.rmtree(self._part, ignore_errors=True)

    def abandon(self) -> None:
        """Ends the trace where there is one, and keeps nothing: the steps were cut off."""
        if self._first is None:
            return
        self._first = self._section = None
        with contextlib.suppress(OSError, RuntimeError):
            jax.profiler.stop_trace()
        shutil.rmtree(self._part, ignore_errors=True)

    def _begin(self, done: int, state: Any) -> None:
        assert self._section is not None
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python would bury what the devices do
        with self._paused(state):
            try:
                shutil.rmtree(self._part, ignore_errors=True)
                jax.profiler.start_trace(str(self._part), profiler_options=options)
            except (OSError, RuntimeError) as error:
                warn(f"train.profile: nothing is traced: {error}")
                self._section = None
                return
        self._first = done
        if done > max(self._section.start, 1):
            note(f"train.profile: the run went on behind step {self._section.start}: tracing from step {done + 1} on")

    def _keep(self, first: int) -> None:
        check_owner(self._owner)
        jax.profiler.stop_trace()
        found = summarise(read_trace(self._part), self._sources())
        if found is None:
            raise RuntimeError("the profiler saw no operation of these steps")
        summary = {"first_step": first + 1, **as_json(found)}
        (self._part / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._part.replace(self._folder)
        show_profile(summary, shown(self._folder))
