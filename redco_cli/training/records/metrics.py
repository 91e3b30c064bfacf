"""The record of a run, `metrics.jsonl`.

`metrics.jsonl` has one JSON object per line:

    {"step": 20, "kind": "train", "time": 1760000000.5, "loss": 2.25, "learning_rate": 0.0003}

`kind` is `train`, `eval` or `run` (what concerns the run as a whole: what it started with, what an outer loop logs);
`time` is seconds since 1970. Beside the loss and the plugin's metrics a `train` record has `weight`, `grad_norm`,
`learning_rate`, `loss_scale` (in float16), speed (of tokens that are no padding), `padding` (the share of positions
that are, since the record before), `skipped` (steps so far that were not finite) and `compilations` (for how many
shapes of batches this process has compiled the train step so far: 1, unless they vary).

Floats are written such that they read back to the same bits. JSON has no word for a number that is not finite, so it
is null, and `"nonfinite": {"loss": "nan"}` says which it was.

Each record goes to the operating system in one write, so a killed process loses at most the line it was writing.
A resumed run drops the records after the step it resumes at: no step appears twice.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self

from redco_cli.console import warn
from redco_cli.errors import PluginError, StorageError
from redco_cli.runtime.disk import is_at, open_held
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.training.records.sinks import Sink
from redco_cli.training.saving.owner import check_owner

METRICS_NAME = "metrics.jsonl"
Kind = Literal["train", "eval", "run"]

_OWN_NAMES = ("step", "kind", "time", "nonfinite")
_REMEDY = "free space, or set output_dir to a place you can write to; then start again"


class Recorder:
    """Writes `metrics.jsonl` in `directory` and hands every record to the sinks; a context manager.

    Only the first process of a run writes; on the others nothing happens.

    A sink that fails is reported once and left out from then on; the file is the record, and its failure ends the run.

    Args:
        directory: the output directory.
        fresh: begin an empty file; else go on with the one that is there.
        sinks: trackers that get the records as well; closed with the recorder.
        clock: seconds since 1970.

    Raises:
        StorageError: the file cannot be read or written, or holds a line that is no record.
    """

    def __init__(
        self, directory: Path, *, fresh: bool, sinks: Sequence[Sink] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self.path = directory / METRICS_NAME
        self._sinks = list(sinks)
        self._clock = clock
        self._file: FileIO | None = None
        if not is_main_process():
            return
        with _writing(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            self._rewrite([] if fresh or not self.path.exists() else read_records(self.path))
            self._file = open_held(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self, step: int, kind: Kind, values: Mapping[str, Any]) -> None:
        """Appends one record.

        Args:
            step: optimizer steps done.
            kind: what the values are about.
            values: numbers, and for `run` any JSON-able values.

        Raises:
            PluginError: a value has a name that every record uses for itself.
            StorageError: the file cannot be written.
        """
        taken = [name for name in values if name in _OWN_NAMES]
        if taken:
            problem = f"every record in {METRICS_NAME} has a field {taken[0]!r} of its own"
            raise PluginError(f"metric {taken[0]}", problem, "give the metric another name in the plugin")
        plain = {name: _plain(value) for name, value in values.items()}
        if self._file is None:
            return
        line = _encoded({"step": step, "kind": kind, "time": self._clock(), **_without_nonfinite(plain)})
        with _writing(self.path):
            if not is_at(self._file, self.path):
                warn(f"{self.path} was deleted or replaced while the run wrote it; it goes on there with step {step}")
                self._file.close()
                self._file = open_held(self.path)
            while line:  # a write to a full disk may take a part and only then fail
                line = line[self._file.write(line) :]
        numbers = {name: float(value) for name, value in plain.items() if isinstance(value, int | float)}
        for sink in self._sinks.copy():
            self._guard(sink, partial(sink.write, step, kind, numbers))

    def rewind(self, step: int) -> None:
        """Drops the records after `step`, for a run that resumes there.

        Raises:
            StorageError: the file cannot be read or written, or holds a line that is no record.
        """
        if self._file is None:
            return
        with _writing(self.path):
            self._rewrite([record for record in read_records(self.path) if record["step"] <= step])
            self._file.close()
            self._file = open_held(self.path)

    def close(self) -> None:
        """Closes the file and the sinks."""
        if self._file is not None:
            self._file.close()
        for sink in self._sinks.copy():
            self._guard(sink, sink.close)
        self._sinks.clear()

    def _rewrite(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the file in one stroke: whoever reads it sees all of the old one or all of the new one.

        Whoever still has the old one open, as a run that was frozen and has lost its lease, writes to nothing.
        """
        temporary = self.path.with_name(f".{self.path.name}.new")
        with temporary.open("wb") as file:
            file.writelines(map(_encoded, records))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def _guard(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except sink.failures as error:
            self._sinks.remove(sink)
            warn(f"{sink.name} gets no more records: {error}; {self.path} stays complete")
            with suppress(*sink.failures):
                sink.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, without a last line that a kill has cut off.

    Raises:
        StorageError: the file cannot be read, or another line is no record.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise StorageError(
            str(path), f"cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None
    records = []
    for number, line in enumerate(lines, start=1):
        record = _decoded(line)
        if record is not None:
            records.append(record)
        elif number < len(lines) or line.endswith(b"\n"):
            raise StorageError(f"{path}:{number}", "is no record of redco", "delete the line, or move the file away")
    return records


def measured(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a record, without what every record says of itself; None for those that were not finite."""
    return {name: value for name, value in record.items() if name not in _OWN_NAMES}


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_refuse)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which JSON knows."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _without_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    bad = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    finite = {name: None if name in bad else value for name, value in values.items()}
    return {**finite, "nonfinite": bad} if bad else finite


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    check_owner(path.parent)
    try:
        yield
    except OSError as error:
        raise StorageError(str(path), f"cannot be written: {error.strerror}", _REMEDY) from None
