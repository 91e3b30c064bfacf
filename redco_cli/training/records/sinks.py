"""Trackers that get a copy of every record: TensorBoard and Weights & Biases. Both are optional extras."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from redco_cli.errors import RedcoError, StorageError
from redco_cli.recipe.keeping import LoggingSection, WandbSection
from redco_cli.recipe.redaction import shown_override
from redco_cli.runtime.peers.multihost import is_main_process

_FLUSH_SECONDS = 5.0  # an fsync can take tens of milliseconds on a network disk


class Sink(Protocol):
    """Gets records.

    Attributes:
        name: what to call it in a warning.
        failures: the exceptions by which it fails for reasons outside this program; anything else is a defect.
    """

    name: str
    failures: tuple[type[Exception], ...]

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Takes the numbers of one record; they may be nan or infinite."""
        ...

    def close(self) -> None:
        """Sends or writes what is left."""
        ...


def open_sinks(
    logging: LoggingSection, directory: Path, resume_step: int | None, recipe: Mapping[str, Any]
) -> list[Sink]:
    """The sinks that a recipe asks for, on the first process.

    Args:
        logging: the section of the recipe.
        directory: the output directory; each sink has a folder in it.
        resume_step: the optimizer step that the run resumes at; None for a run that starts.
        recipe: the whole recipe, as plain values, for trackers that show it.

    Raises:
        RedcoError: a package is missing, or the tracker refuses the run.
        StorageError: a folder cannot be written.
    """
    sinks: list[Sink] = []
    if not is_main_process():
        return sinks
    if logging.tensorboard:
        sinks.append(TensorBoardSink(directory / "tensorboard", resume_step))
    if logging.wandb is not None:
        sinks.append(WandbSink(logging.wandb, directory, resume_step is not None, recipe))
    return sinks


class TensorBoardSink:
    """Writes an event file; TensorBoard hides what earlier files of the folder hold after `resume_step`.

    It writes by itself, as the queue behind tensorboardX's `SummaryWriter` blocks for ever once a write has failed.
    """

    name = "TensorBoard"
    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ModuleNotFoundError:
            raise _missing("logging.tensorboard", "tensorboardX", "tensorboard") from None
        self._event, self._scalar = event_pb2.Event, summary.scalar
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names
            self._file = record_writer.RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise StorageError(str(folder), problem, "set output_dir to a place you can write to") from None
        self._flushed = 0.0
        self._add(file_version="brain.Event:2")
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=resume_step + 1, session_log=start)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Adds one scalar `kind/name` per value."""
        for name, value in values.items():
            self._add(step=step, summary=self._scalar(f"{kind}/{name}", value))
        now = time.monotonic()
        if now - self._flushed > _FLUSH_SECONDS:
            self._flushed = now
            self._file.flush()

    def close(self) -> None:
        """Writes what is left and closes the event file."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class WandbSink:
    """Sends records to Weights & Biases; a resumed run goes on as the same run there."""

    name = "wandb"

    def __init__(self, section: WandbSection, directory: Path, resumes: bool, recipe: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise _missing("logging.wandb", "wandb", "wandb") from None
        self.failures: tuple[type[Exception], ...] = (OSError, wandb.errors.Error)
        try:
            self._run = _start(wandb, section, directory, resumes, recipe)
        except self.failures as error:
            remedy = "run `wandb login`, or set logging.wandb.mode=offline"
            raise RedcoError("logging.wandb", f"wandb cannot start: {error}", remedy) from None
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot go back, a resumed run does

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Logs `kind/name` for each value, drawn over `step`."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


def _start(wandb: ModuleType, section: WandbSection, directory: Path, resumes: bool, recipe: Mapping[str, Any]) -> Any:
    """The wandb run, under an id that stays in the output directory."""
    file = directory / "wandb" / "redco-run-id"
    run_id = file.read_text() if resumes and file.exists() else uuid.uuid4().hex[:12]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(run_id)
    sys.argv = [shown_override(one) for one in sys.argv]  # wandb records the command line, and nothing reads it again
    return wandb.init(
        project=section.project,
        name=section.name,
        entity=section.entity,
        mode=section.mode,
        dir=os.fspath(directory),
        config=dict(recipe),
        id=run_id,
        resume="allow",
    )


def _missing(key: str, package: str, extra: str) -> RedcoError:
    remedy = f"install the extra {extra}: pip install 'redco[{extra}]'; or leave {key} out"
    return RedcoError(key, f"the package {package} is not installed", remedy)
