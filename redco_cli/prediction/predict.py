"""Predictions of many examples: each exactly once, in order, whatever the last batch; and a file that survives a kill.

A predictions file is written as `<output>.partial`, line by line, beside `<output>.partial.json`, which says what is
being predicted: recipe, examples, the code that the plugin's functions reach, the content of the parameters. Run again,
prediction continues behind the last whole line if the description is the same, and starts over if not: no file mixes
predictions of two programs. Only a complete file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_cli.console import note
from redco_cli.errors import PluginError, StorageError, UsageError
from redco_cli.job import Job
from redco_cli.models.weights.load import checkpoint_directory
from redco_cli.plugin.code.digests import prediction_code
from redco_cli.plugin.contract import Example
from redco_cli.plugin.state import Variables
from redco_cli.prediction.predictor import Done, Predictor
from redco_cli.recipe.load import shown
from redco_cli.recipe.paths import pin_paths
from redco_cli.recipe.redaction import holds_secrets
from redco_cli.runtime.disk import check_directory
from redco_cli.runtime.peers.census import RowCensus
from redco_cli.runtime.peers.multihost import is_main_process, process_allgather
from redco_cli.runtime.stopping.signals import Stopped, stop_on_signal

_MANIFEST = "manifest.json"
"""The file of a checkpoint that has a checksum of each of the others."""
_SMALL = 16
"""Elements of an array that a person still reads."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.msgpack", "config.json")


def check_output(output: Path, input: str | os.PathLike[str] | None) -> None:
    """Refuses, before anything is computed, an output that cannot be written or would replace something else.

    Args:
        output: the predictions file to be.
        input: the file of examples, if there is one.

    Raises:
        UsageError: it is a directory, the input itself, or a file that holds no predictions.
        StorageError: its directory cannot be made or written.
    """
    remedy = "choose another file: --output FILE"
    check_directory(output.absolute().parent, str(output), remedy)
    if output.is_dir():
        raise UsageError(str(output), "is a directory, but predictions go to a file", remedy)
    if output.exists():
        if input is not None and os.path.exists(input) and output.samefile(input):
            raise UsageError(str(output), "is the input as well", remedy)
        if not _holds_predictions(output):
            raise UsageError(str(output), "is there already, and holds no predictions", remedy)


def _holds_predictions(file: Path) -> bool:
    with file.open("rb") as lines:
        try:
            first = json.loads(lines.readline())
        except (ValueError, RecursionError):
            return False
    return isinstance(first, dict) and first.keys() == {"index", "example", "prediction"}


def write_predictions(
    predictor: Predictor, variables: Variables, job: Job, output: Path, origin: str, done: Done
) -> None:
    """Predicts the eval examples into a JSON-lines file: `{"index": 0, "example": {...}, "prediction": ...}`, in order.

    The first process writes it. A signal ends it between two batches, the same on all processes.

    Args:
        origin: where the parameters are from: the directory of a checkpoint, or `model.name`.
        done: told of progress.

    Raises:
        Interrupted, Requeue: a signal asked to end; the same command continues.
        StorageError: the file cannot be written.
    """
    examples = job.eval_examples
    partial, description = Path(f"{output}.partial"), Path(f"{output}.partial.json")
    start, writing = 0, is_main_process()
    census = RowCensus(len(examples), lambda counts: note(counts.line()) if counts.line() else None)
    identity = _identity(job, origin, predictor.batch_size(len(examples))) if writing else {}
    secret = holds_secrets(job.recipe.plugin.options)
    with _writing(output):
        if writing:
            output.parent.mkdir(parents=True, exist_ok=True)
            start = _whole_lines(partial) if _continues(partial, description, identity, secret) else 0
            if start == 0:
                partial.unlink(missing_ok=True)
                description.write_text(json.dumps(identity), encoding="utf-8")
        # nothing is held back that could fail once more when it is closed
        file = (partial if writing else Path(os.devnull)).open("ab", buffering=0)
    start = process_allgather("predicted", start)[0]
    done(start)
    with stop_on_signal(note) as stop, file:
        try:
            for index, prediction in predictor(variables, examples, start, census):
                line = line_of(index, examples[index], prediction, job)
                with _writing(output):
                    while line:  # a write to a full disk may take a part and only then fail
                        line = line[file.write(line) :]
                start = index + 1
                done(start)
        except Stopped:
            raise stop.outcome(str(output), f"after {start} of {len(examples)} examples; kept") from None
        finally:
            if writing:
                with _writing(output):
                    os.fsync(file.fileno())
    with _writing(output):
        if writing:
            partial.replace(output)
            description.unlink()
    process_allgather("predictions written")
    census.finish()


def line_of(index: int, example: Example, prediction: Any, job: Job) -> bytes:
    """The line of a predictions file; a `PluginError` for a number that JSON cannot hold."""
    line = {"index": index, "example": _shown(example), "prediction": prediction}
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode(errors="backslashreplace")  # half a surrogate pair becomes what JSON calls it
    except ValueError:
        problem = f"the prediction of example {index} holds a number that is not finite, which JSON cannot"
        raise PluginError(
            f"{job.plugin.file}: predict_fn", problem, "look at the model, or name it in output_fn"
        ) from None


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "free space or correct the permissions, then run the same command again: it continues"
        raise StorageError(str(output), f"cannot be written: {error.strerror or error}", remedy) from error


def _identity(job: Job, origin: str, batch_size: int) -> dict[str, Any]:
    """What decides the predictions, each by its name for a person."""
    return {
        "recipe": pin_paths(job.loaded).recipe.model_dump(mode="json"),
        "plugin code": prediction_code(job.plugin),
        "parameters": [origin, _content(job, origin)],
        "batch size": batch_size,
        "examples": _fingerprint(job.eval_examples),
    }


def _content(job: Job, origin: str) -> str:
    """A hash of what tells parameters from others of the same name.

    Of a checkpoint it is the manifest, which has a checksum of each file; of other weights, sizes and times of files.
    """
    if origin != job.recipe.model.name:
        try:
            return _hash([(Path(origin) / _MANIFEST).read_bytes()])
        except FileNotFoundError:  # a training has deleted the checkpoint meanwhile: no later prediction can have it
            return ""
    directory = checkpoint_directory(job.recipe.model, where=job.where)
    files = sorted(file for pattern in _WEIGHTS for file in directory.glob(pattern))
    marks = ((file.name, status.st_size, status.st_mtime_ns) for file in files if (status := file.stat()))
    return _hash(repr(mark).encode() for mark in marks)


def _continues(partial: Path, description: Path, identity: dict[str, Any], secret: bool = False) -> bool:
    """Whether what a killed prediction left behind is the beginning of this one; says so where it is not."""
    if not (partial.exists() and partial.stat().st_size):
        return False
    if secret:
        note(f"{shown(partial)} may be of another secret among plugin.options, which is in no file: starting over")
        return False
    try:
        known = dict(json.loads(description.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # not there, torn, or no description
        known = {}
    others = [name for name, value in identity.items() if json.dumps(known.get(name)) != json.dumps(value)]
    if others:
        note(f"{shown(partial)} was made with other {', '.join(others)}: starting over")
    return not others


def _whole_lines(partial: Path) -> int:
    """How many whole lines a partial file holds, after cutting off a torn last one."""
    if not partial.exists():
        return 0
    data = partial.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(partial, whole)
    return data.count(b"\n")


def _fingerprint(examples: Sequence[Example]) -> str:
    """The number of examples, and a hash of their text, numbers and arrays."""
    lines = (json.dumps(_shown(examples[index], _digest), sort_keys=True).encode() for index in range(len(examples)))
    return f"{len(examples)}:{_hash(lines)}"


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _shown(example: Example, array: Callable[[NDArray[Any]], Any] | None = None) -> dict[str, Any]:
    """An example as plain JSON values: text, numbers, and lists and dicts of them as they are.

    Args:
        array: what becomes of an array; by default a small one is a list, and a large one its type and shape.
    """
    return {name: _plain(value, array or _described) for name, value in example.items()}


def _plain(value: Any, array: Callable[[NDArray[Any]], Any]) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(inner, array) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, array) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return array(np.asarray(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__name__


def _described(value: NDArray[Any]) -> Any:
    small = value.size <= _SMALL and value.dtype.kind in "biufU"
    return _plain(value.tolist(), _described) if small else f"{value.dtype}{list(value.shape)}"


def _digest(value: NDArray[Any]) -> str:
    return f"{value.dtype}{list(value.shape)} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
