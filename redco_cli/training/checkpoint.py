"""Checkpoints: written beside the training, whole or not at all.

The story of a save. `save` copies the state off the devices, and training goes on while orbax writes it to a directory
with a temporary name. Only when every file is there is it renamed to `checkpoint-<step>`, and it is renamed back before
it is deleted: a directory of that name is complete, whenever the power went. The next save, and the end of the run,
first wait for the one before, and only then delete what is no longer kept. So at any moment the newest complete
checkpoint is on disk. What a killed or failed save leaves behind has a temporary name, and `sweep` deletes it.

Three items: `params` (all that prediction needs), `training` (optimizer state and counters), `meta` (JSON: step, the
metric that ranks it, the resolved recipe).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from redco_cli.errors import StorageError
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import shown
from redco_cli.training.state import TrainState, partition, paths

_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".orbax-checkpoint-tmp"
_DAMAGE = (OSError, ValueError, KeyError, TypeError)
"""What orbax and the libraries below it raise for files that are cut off, missing, or hold something else."""
_SHOWN = 3


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps done.
        metric: the value that ranks it; None when it was not evaluated.
        recipe: the resolved recipe, as plain data.
    """

    step: int
    metric: float | None
    recipe: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one output directory."""

    def __init__(self, directory: Path, keep: int, mode: Literal["min", "max"]) -> None:
        """Touches no disk yet.

        Args:
            directory: the output directory; absolute.
            keep: how many of the newest stay; the best stays besides.
            mode: whether the best metric is the smallest or the largest.
        """
        _mute_orbax()
        self.directory = directory
        self._keep = keep
        self._mode = mode
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler("params", "training", "meta"))
        self._metas: dict[int, Meta] = {}

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in names if match)

    def save(self, state: TrainState, meta: Meta, *, replace: bool = False) -> None:
        """Starts writing a checkpoint; waits only for the copy off the devices, and for the save before.

        Args:
            replace: write it even where this step is saved already, because the state has changed since.

        Raises:
            StorageError: this or the previous save cannot be written; what was complete before stays complete.
        """
        if meta.step in self._metas or self.path(meta.step).exists():
            if not replace:
                return
            self.wait()
            if self.path(meta.step).exists():
                self._delete(meta.step)
        training = {"opt_state": state.opt_state, "skipped": state.skipped, "streak": state.streak}
        try:
            self.wait()
            self._checkpointer.save(
                self.path(meta.step),
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(_nested(state.params)),
                    training=ocp.args.StandardSave(_nested(training)),
                    meta=ocp.args.JsonSave(meta.__dict__),
                ),
            )
        except (OSError, ValueError) as error:
            raise self._unwritable(meta.step, error) from error
        self._metas[meta.step] = meta

    def wait(self) -> None:
        """Waits until everything is on disk, then deletes what is not kept.

        Raises:
            StorageError: the last save failed.
        """
        try:
            self._checkpointer.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._unwritable(max(self._metas, default=0), error) from error
        steps = self.steps()
        kept = {*steps[-self._keep :], self.best()}
        for step in steps:
            if step not in kept:
                self._delete(step)

    def sweep(self) -> None:
        """Deletes what killed and failed saves left behind."""
        for unfinished in self.directory.glob(f"checkpoint-*{_TEMPORARY}"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def close(self) -> None:
        """Waits as `wait` does, and ends the writing threads."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def meta(self, step: int) -> Meta:
        """What a checkpoint says of itself.

        Raises:
            StorageError: it is damaged.
        """
        if step not in self._metas:
            with self._readable(step):
                args = ocp.args.Composite(meta=ocp.args.JsonRestore())
                restored = self._checkpointer.restore(self.path(step), args=args)["meta"]
                if not isinstance(restored, dict) or restored.keys() != Meta.__annotations__.keys():
                    raise ValueError("meta does not say step, metric and recipe")
                self._metas[step] = Meta(**restored)
        return self._metas[step]

    def best(self) -> int | None:
        """The step of the complete checkpoint with the best metric; None when none was evaluated."""
        ranked = [(meta.metric, -step) for step in self.steps() if (meta := self.meta(step)).metric is not None]
        if not ranked:
            return None
        return -(min(ranked) if self._mode == "min" else max(ranked, key=lambda pair: (pair[0], pair[1])))[1]

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a checkpoint, born on the shardings of `abstract`.

        Args:
            abstract: ShapeDtypeStructs with shardings; its split into trainable and frozen is the one returned.

        Raises:
            StorageError: it is damaged, or holds another model or optimizer than `abstract`.
        """
        training = {"opt_state": abstract.opt_state, "skipped": abstract.skipped, "streak": abstract.streak}
        restored = self._restore(step, params=_nested(abstract.params), training=_nested(training))
        frozen = frozenset(paths(abstract.frozen))
        trainable, rest = partition(_unnested(restored["params"], abstract.params), frozen)
        counters = _unnested(restored["training"], training)
        step_array = jax.device_put(jax.numpy.int32(step), abstract.step.sharding)
        return TrainState(step_array, trainable, rest, counters["opt_state"], counters["skipped"], counters["streak"])

    def restore_params(self, step: int, abstract: Params) -> Params:
        """The parameters of a checkpoint alone, born on the shardings of `abstract`.

        Raises:
            StorageError: it is damaged, or holds another model.
        """
        restored = self._restore(step, params=_nested(abstract))
        return _unnested(restored["params"], abstract)

    def _restore(self, step: int, **items: dict[str, Any]) -> Any:
        """Items of a checkpoint as nested dicts, born on the shardings of `items`, whose shapes they must have."""
        path, handler = self.path(step), ocp.StandardCheckpointHandler()
        with self._readable(step):
            stored = {name: handler.metadata(path / name).tree for name in items}
        misfits = [f"{name} {misfit}" for name in items for misfit in _misfits(stored[name], items[name])]
        if misfits:
            more = f", and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
            problem = f"is of another model or optimizer: {', '.join(misfits[:_SHOWN])}{more}"
            remedy = "restore the recipe and the plugin that wrote it, or choose another checkpoint or output_dir"
            raise StorageError(shown(path), problem, remedy)
        with self._readable(step):
            args = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
            return self._checkpointer.restore(path, args=ocp.args.Composite(**args))

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            others = [self.path(other).name for other in self.steps() if other < step]
            remedy = f"move it away to fall back to {others[-1]}" if others else "move it away"
            problem = f"is damaged and cannot be read: {_reason(error)}"
            raise StorageError(shown(self.path(step)), problem, remedy) from error

    def _delete(self, step: int) -> None:
        doomed = self.path(step).with_name(f"{self.path(step).name}{_TEMPORARY}")
        try:
            self.path(step).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            problem = f"cannot be deleted: {error.strerror or error}"
            raise StorageError(shown(self.path(step)), problem, "correct the permissions of output_dir") from error
        self._metas.pop(step, None)

    def _unwritable(self, step: int, error: Exception) -> StorageError:
        self.sweep()
        remedy = "free space or correct the permissions, then run the same command again: it continues"
        kept = f"complete before it: {', '.join(self.path(s).name for s in self.steps()) or 'none'}"
        return StorageError(shown(self.path(step)), f"cannot be written: {_reason(error)}; {kept}", remedy)


@functools.cache
def _mute_orbax() -> None:
    """Silences, once and for the process, what orbax says besides what it raises.

    It narrates every save and logs its own errors; and after one, tensorstore complains of every other read and write
    that ends when nobody listens any more.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others


def _reason(error: Exception) -> str:
    """What orbax raised in a few words: the system's own for an error code, else the first line, without its specs."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    first = str(error).strip().partition("\n")[0].partition(" [tensorstore_spec")[0]
    return first or type(error).__name__


def _misfits(stored: Any, wanted: Any) -> list[str]:
    """Each array of nested dicts whose shape differs: `hidden/kernel is [5, 16], not [5, 8]`."""
    there, here = _shapes(stored), _shapes(wanted)
    wrong = [
        f"{path} is {there[path]}, not {here[path]}" for path in there if path in here and there[path] != here[path]
    ]
    return [
        *wrong,
        *(f"{path} is missing" for path in here if path not in there),
        *(f"{path} has no use" for path in there if path not in here),
    ]


def _shapes(tree: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.shape) for path, leaf in leaves}


def _nested(tree: Any) -> dict[str, Any]:
    """Any pytree as nested dicts of text keys: what is on disk then depends on no class of optax."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, name = [jax.tree_util.keystr((part,), simple=True) for part in path]
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = leaf
    return nested


def _unnested(nested: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `_nested`, with the structure of `like`."""

    def pick(path: Any, _leaf: Any) -> Any:
        inner: Any = nested
        for part in path:
            inner = inner[jax.tree_util.keystr((part,), simple=True)]
        return inner

    return jax.tree_util.tree_map_with_path(pick, like)
