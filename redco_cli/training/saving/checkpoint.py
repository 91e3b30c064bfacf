"""Checkpoints: written beside the training, whole or not at all.

The story of a save. `save` copies the state off the devices, and training goes on while orbax writes it to a directory
with a temporary name. When every file is there, the manifest of `integrity` is added, and only then is the directory
renamed to `checkpoint-<step>`; it is renamed back before it is deleted: a directory of that name is complete, whenever
the power went. The next save, and the end of the run, first wait for the one before, and only then delete what is no
longer kept. So at any moment the newest complete checkpoint is on disk. What a killed or failed save leaves behind has
a temporary name, and `sweep` deletes it. What is damaged later is skipped, and set aside by `set_aside`: never deleted.

A save that replaces one of the same step is written as `checkpoint-<step>.new`, which counts as soon as it has that
name. Only then is the one before it deleted, and `checkpoint-<step>` its name.

Three items: `params`, `training` (optimizer state and counters), `meta` (JSON: step, the metric that ranks it, the best
of the run so far, the resolved recipe, the position in data of unknown length); and where there is any, `state` of the
plugin (with `params` all that prediction needs), and `outer`, the arrays of a `run_fn`. Neither the random keys nor the
position in other data are among them: both follow from the seed and the step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from redco_cli.errors import StorageError
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.runtime.peers.multihost import current_connection, is_main_process, process_allgather
from redco_cli.training.saving.deletion import DirectoryDeleter, set_aside
from redco_cli.training.saving.integrity import find_damage, write_manifest
from redco_cli.training.saving.items import STATE, readable, restored_items, stored
from redco_cli.training.saving.meta import Meta, read_meta
from redco_cli.training.saving.orbax_errors import mute_orbax, unwritable
from redco_cli.training.saving.outer_state import OuterState, SavedOuterState, from_saved
from redco_cli.training.saving.state_dict import shape_mismatches, to_state_dict
from redco_cli.training.state import TrainState, partition, paths

_NAME = re.compile(r"checkpoint-(\d+)(\.new)?")
_NEW = ".new"
_TEMPORARY = ".orbax-checkpoint-tmp"
_ARRAYS = "outer"
"""The item with the arrays of an outer loop, where it has any."""


class Checkpoints:
    """The checkpoints of one output directory.

    Attributes:
        directory: where they are.
        position: of a step, what `Meta.data` says in its checkpoint.
        branch_point: the newest checkpoint up to this step stays besides; None for none.
    """

    def __init__(self, directory: Path, keep: int, mode: Literal["min", "max"]) -> None:
        """Touches no disk yet.

        Args:
            directory: the output directory; absolute.
            keep: how many of the newest stay; the best stays besides.
            mode: whether the best metric is the smallest or the largest.
        """
        mute_orbax()
        self.directory = directory
        self.position: Callable[[int], Mapping[str, Any] | None] = lambda _step: None
        self.branch_point: int | None = None
        self._keep = keep
        self._mode = mode
        # Called when every file is written, in the thread that renames the directory after it.
        sealing = ocp.options.AsyncOptions(post_finalization_callback=self._seal)
        handler = ocp.CompositeCheckpointHandler("params", "training", "meta", STATE, _ARRAYS)
        self._checkpointer = ocp.AsyncCheckpointer(handler, async_options=sealing)
        self._saving = directory
        self._metas: dict[int, Meta] = {}
        self._skipped: set[int] = set()
        self._deleter = DirectoryDeleter(_TEMPORARY)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        new = self.directory / f"checkpoint-{step}{_NEW}"
        return new if new.is_dir() else new.with_suffix("")

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints that are not skipped, ascending."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted({int(match[1]) for match in names if match} - self._skipped)

    def damage(self, step: int, items: Collection[str] = ()) -> str | None:
        """What is wrong with the files of a checkpoint, or of some items, of which each process reads its share."""
        others = current_connection()
        share = slice(None) if others is None else slice(others.process, None, others.processes)
        return next(filter(None, process_allgather("damage", find_damage(self.path(step), items, share))), None)

    def skip(self, step: int) -> None:
        """Takes a checkpoint for one that is not there: it is damaged, or about to be deleted or moved."""
        self._skipped.add(step)
        self._metas.pop(step, None)

    def set_aside(self) -> None:
        """Renames what is skipped, to `checkpoint-<step>.damaged`: the step can be saved again, and nothing is lost.

        Raises:
            StorageError: it cannot be renamed.
        """
        for step in sorted(self._skipped) if is_main_process() else ():
            while (path := self.path(step)).exists():
                set_aside(path, f"checkpoint-{step}.damaged")
        self._skipped.clear()

    def save(
        self, state: TrainState, meta: Meta, outer: SavedOuterState | None = None, *, replace: bool = False
    ) -> None:
        """Starts writing a checkpoint; waits only for the copy off the devices, and for the save before.

        Args:
            state: on the devices.
            meta: what it says of itself, apart from the position in the data and what `outer` and `state` say.
            outer: what an outer loop keeps; None without one.
            replace: write it even where this step is saved already, because the state has changed since.

        Raises:
            StorageError: this or the previous save cannot be written; what was complete before stays complete.
        """
        path, values = self.path(meta.step), None if outer is None else outer.values
        meta = dataclasses.replace(meta, data=self.position(meta.step), outer=values, skipped=int(state.skipped))
        if meta.step in self._metas or path.exists():
            if not replace:
                return
            self.wait()
            process_allgather("replaced checkpoint")
            path = path.with_name(f"checkpoint-{meta.step}{_NEW}")
        items = {"params": state.params, "training": _training(state), STATE: state.plugin_state}
        arrays = {name: to_state_dict(tree) for name, tree in items.items()} | {_ARRAYS: outer.arrays if outer else {}}
        written = {name: ocp.args.StandardSave(dict(tree)) for name, tree in arrays.items() if tree}
        try:
            self.wait()
            self._saving = path
            args = ocp.args.Composite(meta=ocp.args.JsonSave(meta.__dict__), **written)
            self._checkpointer.save(path, args=args)
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error
        self._metas[meta.step] = meta

    def wait(self) -> None:
        """Waits until everything is on disk, then begins to delete what is not kept.

        Raises:
            StorageError: the last save, or a deletion, failed.
        """
        try:
            self._checkpointer.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error
        self._deleter.collect(wait=False)
        if is_main_process():
            self._deleter.settle(self.directory, _NEW)
        steps, until = self.steps(), self.branch_point
        branch = [step for step in steps if until is not None and step <= until]
        kept = {*steps[-self._keep :], *branch[-1:], self.best()}
        for step in sorted({*steps} - kept):
            self._delete(step)

    def sweep(self) -> None:
        """Ends what killed and failed saves left behind: replacements get their name, the rest is deleted."""
        if is_main_process():
            self._deleter.settle(self.directory, _NEW)
            self._deleter.sweep(self.directory, "checkpoint-*")

    def close(self) -> None:
        """Waits as `wait` does, and for the deletions, and ends the threads."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            self._deleter.close()
            self.sweep()

    def meta(self, step: int) -> Meta:
        """What a checkpoint says of itself.

        Raises:
            StorageError: it is damaged.
        """
        if step not in self._metas:
            with readable(self.path(step), self._others(step)):
                args = ocp.args.Composite(meta=ocp.args.JsonRestore())
                restored = self._checkpointer.restore(self.path(step), args=args)["meta"]
                self._metas[step] = read_meta(restored, step)
        return self._metas[step]

    def best(self) -> int | None:
        """The step of the complete checkpoint with the best metric; None when none was evaluated."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[int]:
        """The steps of the complete checkpoints that were evaluated, best first, and the earlier one of two equals.

        Raises:
            StorageError: what one says of itself is damaged.
        """
        sign = 1 if self._mode == "min" else -1
        known = [(sign * meta.metric, step) for step in self.steps() if (meta := self.meta(step)).metric is not None]
        return [step for _, step in sorted(known)]

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a checkpoint, born on the shardings of `abstract`.

        Args:
            abstract: ShapeDtypeStructs with shardings; its split into trainable and frozen is the one returned.

        Raises:
            StorageError: it is damaged, or holds another model or optimizer than `abstract`.
        """
        trees = {"params": abstract.params, "training": _training(abstract), STATE: abstract.plugin_state}
        restored = self._restored(step, **trees)
        trainable, rest = partition(restored["params"], frozenset(paths(abstract.frozen)))
        step_array = jax.device_put(jax.numpy.int32(step), abstract.step.sharding)
        return TrainState(step_array, trainable, rest, plugin_state=restored[STATE], **restored["training"])

    def restore_outer(self, step: int) -> OuterState:
        """What an outer loop has kept, arrays as numpy's.

        Raises:
            StorageError: it is damaged.
        """
        values, arrays = self.meta(step).outer, {}
        path, others = self.path(step), self._others(step)
        with readable(path, others):
            if (path / _ARRAYS).is_dir():
                like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in stored(path, _ARRAYS, others).items()}
                arrays = self._restored(step, **{_ARRAYS: like})[_ARRAYS]
            return OuterState() if values is None else from_saved(values, arrays)

    def restore_params(self, step: int, abstract: Params) -> Params:
        """The parameters of a checkpoint alone, born on the shardings of `abstract`.

        Raises:
            StorageError: it is damaged, or holds another model.
        """
        return self._restored(step, params=abstract)["params"]

    def restore_variables(self, step: int, abstract: Variables) -> Variables:
        """Parameters and state of the plugin alone, born on the shardings of `abstract`.

        Raises:
            StorageError: it is damaged, or holds another model or another plugin's state.
        """
        restored = self._restored(step, params=abstract.params, state=abstract.state)
        step_array = jax.device_put(jax.numpy.int32(step), abstract.step.sharding)
        return Variables(restored["params"], restored[STATE], step_array)

    def mismatches(self, step: int, abstract: Params) -> list[str]:
        """What the parameters of a checkpoint, which are not read, lack or have other than those of `abstract`.

        Raises:
            StorageError: it is damaged.
        """
        return shape_mismatches(stored(self.path(step), "params", self._others(step)), to_state_dict(abstract))

    def _restored(self, step: int, **trees: Any) -> dict[str, Any]:
        return restored_items(self._checkpointer, self.path(step), trees, self._others(step))

    def _others(self, step: int) -> list[str]:
        """The names of those before it, which could be taken instead."""
        return [self.path(other).name for other in self.steps() if other < step]

    def _seal(self) -> None:
        write_manifest(self._saving.with_name(f"{self._saving.name}{_TEMPORARY}"))

    def _delete(self, step: int) -> None:
        self.skip(step)  # the first process takes its time, and the others would still see it
        if is_main_process():
            self._deleter.delete(self.path(step))

    def _unwritable(self, error: Exception) -> StorageError:
        self.sweep()
        saving = self._saving.with_suffix("")
        self._metas = {step: meta for step, meta in self._metas.items() if f"checkpoint-{step}" != saving.name}
        return unwritable(saving, error, [self.path(step).name for step in self.steps()])


def _training(state: TrainState) -> dict[str, Any]:
    """What only training needs of a state, apart from the step, which the name of a checkpoint says."""
    return {"opt_state": state.opt_state, "skipped": state.skipped, "streak": state.streak}
