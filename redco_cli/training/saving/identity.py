"""With which code and data a run is trained, and whether it may go on with others.

Every checkpoint says so in digests. A run that continues is compared with its checkpoint, and refused with what has
changed, unless

- `checkpoint.accept` on the command line consents to it, or
- the run ended by an error of its plugin or its data: what has changed is then taken for the repair.

Either is told, and kept in the checkpoints and records from there on. It holds until the run has saved a checkpoint:
until then `CONTINUATION_NAME` in the output directory remembers it, and the error that ended the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_cli.console import CountProgress, note, warn
from redco_cli.data.digests import FileDigests, alike
from redco_cli.data.encoded.rows import Rows
from redco_cli.data.encoded.windows import EncodedStream
from redco_cli.data.mixture import split_digests
from redco_cli.errors import DataError, Interrupted, PluginError, RecipeError, RedcoError, Requeue
from redco_cli.job import Job
from redco_cli.plugin.code.digests import training_code
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.runtime.peers.multihost import is_main_process, process_allgather, process_index
from redco_cli.training.saving.meta import Meta

CONTINUATION_NAME = ".continuation.json"
"""The file in an output directory that says what a run may go on with until it has saved its next checkpoint."""
_MEANT = {"plugin": "code", "data": "data"}
_EVAL = "data.eval: "
_TOKENS = "tokens"
"""What `encode_fn` has made of the data, by which also another tokenizer is noticed."""
_LISTED = 8
_SHOWN_FROM = 2**28
"""Bytes of data files from which it is shown how far reading them has come."""


@dataclass
class Identity:
    """With which code and data a job trains, worked out when it is asked for: data may take its time.

    Attributes:
        job: recipe, plugin and data.
    """

    job: Job
    _found: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """The output directory."""
        return Path(self.job.recipe.output_dir).resolve()

    def now(self) -> Mapping[str, Mapping[str, str]]:
        """Digests by name of `plugin` and `data`, the same on all processes: data is read by the first.

        Raises:
            PluginError: another process has another plugin.
            DataError: a data file cannot be read.
        """
        if not self._found:
            codes = process_allgather("plugin code", training_code(self.job.plugin))
            for process, code in enumerate(codes):
                if changed := differences(codes[0], code):
                    problem = f"process {process} has another plugin than process 0: {listed(changed)}"
                    raise PluginError(self.job.plugin.file, problem, "give all processes the same files")
            data = process_allgather("data digests", self._data() if is_main_process() else None)[0]
            self._found = {"plugin": codes[0], "data": data}
        return self._found

    def _data(self) -> dict[str, str]:
        found: dict[str, str] = {}
        with _Progress() as progress, FileDigests(self.directory, progress.update) as known:
            for split, examples in (("train", self.job.train_examples), ("eval", self.job.eval_examples)):
                if examples is None:
                    continue
                sources, plugin = self.job.recipe.data.sources(split), Path(self.job.plugin.file).resolve().parent
                digests = split_digests(sources, examples, self.job.loaded.directory, plugin, known)
                rows = self.job.train_rows if split == "train" else self.job.eval_rows
                if isinstance(rows, Rows) or (isinstance(rows, EncodedStream) and digests):
                    digests[_TOKENS] = rows.digest
                found |= {f"data.{split}: {name}": digest for name, digest in digests.items()}
        return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two mappings of digests, in words: `plugin.py: loss_fn differs`."""
    changed = [f"{name} differs" for name in now if name in before and not alike(before[name], now[name])]
    new = [f"{name} is new" for name in now if name not in before]
    return [*changed, *new, *(f"{name} is gone" for name in before if name not in now)]


def listed(changes: Sequence[str]) -> str:
    """Changes as a phrase."""
    more = f"; and {len(changes) - _LISTED} more" if len(changes) > _LISTED else ""
    return f"{'; '.join(changes[:_LISTED])}{more}"


@dataclass(frozen=True)
class Continued:
    """What a run goes on with that is not what its checkpoint was trained with.

    Attributes:
        accepted: what checkpoints say of each such change, those of before included: step, what, why, changed.
        new: those of this time.
        unrecorded: those of them that are not among the records of the run yet.
        eval_changed: whether eval data is among what has changed.
    """

    accepted: tuple[Mapping[str, Any], ...] = ()
    new: tuple[Mapping[str, Any], ...] = ()
    unrecorded: tuple[Mapping[str, Any], ...] = ()
    eval_changed: bool = False


def begun(loaded: LoadedRecipe) -> Continued:
    """What a run goes on with that begins: nothing, which a consent is told."""
    for what in loaded.recipe.checkpoint.accept:
        _tell(note, f"checkpoint.accept={what}: there is nothing to accept, the run begins")
    return Continued()


def compared(loaded: LoadedRecipe, identity: Identity, checkpoint: Path, meta: Meta, *, ranked: bool) -> Continued:
    """Whether a run may go on from a checkpoint, given its code and data; tells what it goes on with. Writes nothing.

    Args:
        loaded: the recipe, with its consent.
        identity: of the job that is to go on.
        checkpoint: its path.
        meta: what it says.
        ranked: whether an evaluation has ranked a checkpoint of the run: eval data is free to change until then.

    Raises:
        PluginError, DataError: something has changed, and nothing permits that; or as `Identity.now`.
    """
    if meta.identity is None:
        _tell(note, f"{checkpoint.name} does not say with which code and data it was trained: nothing is compared")
        return Continued(tuple(meta.accepted))
    now, before = identity.now(), meta.identity
    known = [_read(folder) for folder in dict.fromkeys((identity.directory, checkpoint.parent))]
    consent, known = process_allgather("consent", [list(loaded.recipe.checkpoint.accept), known])[0]
    found: list[Mapping[str, Any]] = []
    unrecorded: list[Mapping[str, Any]] = []
    problems: list[RedcoError] = []
    every = {what: differences(before[what], now[what]) for what in _MEANT}
    if every["plugin"]:  # other code makes other tokens of the same data
        every["data"] = [one for one in every["data"] if not one.endswith((f"{_TOKENS} differs", f"{_TOKENS} is new"))]
    for what, changes in every.items():
        counted = [one for one in changes if ranked or not one.startswith(_EVAL)]
        mark = _mark(what, meta, now)
        why = f"by checkpoint.accept={what}" if what in consent else _permission(what, mark, meta.step, known)
        if not counted:
            if what in consent:
                same = f"the {_MEANT[what]} is that of {checkpoint.name}"
                _tell(note, f"checkpoint.accept={what}: there is nothing to accept, {same}")
        elif why is None:
            problems.append(_refusal(loaded, what, counted, checkpoint))
        else:
            found.append({"step": meta.step, "what": what, "why": why, "changed": counted, "mark": mark})
            unrecorded += [] if any(mark in one["accepted"] for one in known) else found[-1:]
    if problems:
        raise type(problems[0]).of([one for problem in problems for one in problem.problems])
    for one in found:
        _tell(
            warn, f"{checkpoint.name} goes on with other {_MEANT[one['what']]}, {one['why']}: {listed(one['changed'])}"
        )
    eval_changed = any(one.startswith(_EVAL) for one in every["data"])
    return Continued((*meta.accepted, *found), tuple(found), tuple(unrecorded), eval_changed)


@contextlib.contextmanager
def remembering(
    identity: Identity, continued: Continued, step: Callable[[], int], saved: Callable[[], None]
) -> Iterator[None]:
    """Within it a run trains: keeps what it was permitted until it has saved, and the error that ends it.

    Args:
        identity: of the run.
        continued: what it goes on with.
        step: how far it has come.
        saved: waits until all that it saved is on disk.

    Raises:
        StorageError: what was saved is not.
    """
    directory, began = identity.directory, step()
    if continued.new and is_main_process():
        _write(directory, {**_read(directory), "accepted": [one["mark"] for one in continued.new]})
    try:
        yield
    except RedcoError as error:
        told = [one for one in (error, error.__context__) if isinstance(one, PluginError | DataError | RecipeError)]
        if told:
            _write(directory, {**_read(directory), "failed": {"step": step(), **_repairs(told[0], identity.job)}})
        elif isinstance(error, Interrupted | Requeue) and step() > began and is_main_process():  # it has saved
            _forget(directory)
        raise
    saved()
    if is_main_process():
        _forget(directory)


def _repairs(error: RedcoError, job: Job) -> dict[str, Any]:
    """What may change to repair an error: what a plugin raised may be the fault of its data."""
    by_plugin = isinstance(error, PluginError | RecipeError) or job.recipe.data.train is None
    by_data = isinstance(error, PluginError | DataError)
    whose = "data" if isinstance(error, DataError) else "plugin" if isinstance(error, PluginError) else "recipe"
    return {"permits": ["plugin"] * by_plugin + ["data"] * by_data, "whose": whose}


def _permission(what: str, mark: str, step: int, known: Sequence[Mapping[str, Any]]) -> str | None:
    """Why something may have changed without consent; None where it may not."""
    for one in known:
        failed = one["failed"]
        if mark in one["accepted"]:
            return "as accepted before"
        if what in failed["permits"] and failed["step"] >= step:
            return f"as the run had ended by an error of its {failed['whose']}"
    return None


def _refusal(loaded: LoadedRecipe, what: str, changes: Sequence[str], checkpoint: Path) -> RedcoError:
    if what == "plugin":
        kind: type[RedcoError] = PluginError
        key, said = "plugin.module", f"{checkpoint.name} was trained with other code"
    else:
        kind, key, said = DataError, "data.train", f"{checkpoint.name} was trained with other data"
    remedy = "restore it, or choose another output_dir for a new run; or, to go on with it nevertheless, add "
    return kind(loaded.where(key), f"{said}: {listed(changes)}", f"{remedy}checkpoint.accept={what} to the command")


def _mark(what: str, meta: Meta, now: Mapping[str, Mapping[str, str]]) -> str:
    """What tells one change at one checkpoint from all others."""
    before = {} if meta.identity is None else meta.identity[what]
    return hashlib.sha256(json.dumps([what, meta.step, before, now[what]], sort_keys=True).encode()).hexdigest()[:16]


def _read(directory: Path) -> dict[str, Any]:
    """What is remembered in a directory; nothing where that cannot be read."""
    nothing: dict[str, Any] = {"accepted": [], "failed": {"step": -1, "permits": [], "whose": ""}}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = {**nothing, **json.loads((directory / CONTINUATION_NAME).read_bytes())}
        (
            list(found["accepted"]),
            list(found["failed"]["permits"]),
            int(found["failed"]["step"]),
            found["failed"]["whose"],
        )
        return found
    return nothing


def _write(directory: Path, remembered: Mapping[str, Any]) -> None:
    temporary = directory / f"{CONTINUATION_NAME}.{process_index()}"
    with contextlib.suppress(OSError):  # the error that is remembered may be that of a full disk
        temporary.write_text(json.dumps(remembered), encoding="utf-8")
        temporary.replace(directory / CONTINUATION_NAME)


def _forget(directory: Path) -> None:
    with contextlib.suppress(OSError):
        (directory / CONTINUATION_NAME).unlink(missing_ok=True)


def _tell(teller: Callable[[str], None], text: str) -> None:
    if is_main_process():
        teller(text)


class _Progress:
    """Shows how far reading the data has come, where that takes its time; a context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._shown: CountProgress | None = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def update(self, done: int, total: int) -> None:
        """Shows so many of all bytes."""
        if total >= _SHOWN_FROM:
            if self._shown is None:
                self._shown = self._stack.enter_context(CountProgress("reading data", total // 2**20, unit="MiB"))
            self._shown.update(done // 2**20)
