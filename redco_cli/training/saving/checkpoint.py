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
plugin, and `outer`, the arrays of a `run_fn`. Neither the random keys nor the
position in other data are among them: both follow from the seed and the step. The model that an adapter is trained for
is in none of them either: see `files.base`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import orbax.checkpoint as ocp

from redco_cli.console import warn
from redco_cli.errors import StorageError
from redco_cli.models.several import MAIN, without
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import shown
from redco_cli.runtime.peers.multihost import current_connection, is_main_process, process_allgather
from redco_cli.training.precision.loss_scale import values_of
from redco_cli.training.saving.files.base import BASE, digest_in
from redco_cli.training.saving.files.deletion import UNFINISHED, DirectoryDeleter, set_aside
from redco_cli.training.saving.files.integrity import find_damage, write_manifest
from redco_cli.training.saving.files.items import STATE
from redco_cli.training.saving.files.orbax_errors import is_missing, mute_orbax, unwritable
from redco_cli.training.saving.files.state_dict import to_state_dict
from redco_cli.training.saving.meta import Meta
from redco_cli.training.saving.outer_state import SavedOuterState
from redco_cli.training.saving.owner import check_owner, is_owned
from redco_cli.training.saving.saved import NEW, OUTER, SavedCheckpoints, training_of
from redco_cli.training.state import TrainState


class Checkpoints(SavedCheckpoints):
    """The checkpoints of one output directory, and more of them: written, kept, deleted.

    Attributes:
        position: of a step, what `Meta.data` says in its checkpoint.
        branch_point: the newest checkpoint up to this step stays besides; None for none.
    """

    def __init__(
        self, directory: Path, keep: int, mode: Literal["min", "max"], constants: Collection[str] = ()
    ) -> None:
        """Touches no disk yet.

        Args:
            directory: the output directory; absolute.
            keep: how many of the newest stay; the best stays besides.
            mode: whether the best metric is the smallest or the largest.
            constants: names of models that are never updated: their parameters are neither written nor read.
        """
        mute_orbax()
        # The callback comes when every file is written, in the thread that renames the directory after it. Directories
        # are made before: where one cannot be, those who would write into it wait for minutes.
        how = ocp.options.AsyncOptions(post_finalization_callback=self._seal, create_directories_asynchronously=False)
        of_items = ocp.CompositeOptions(async_options=how)
        handler = ocp.CompositeCheckpointHandler("params", "training", "meta", STATE, OUTER, composite_options=of_items)
        super().__init__(directory, mode, constants, ocp.AsyncCheckpointer(handler, async_options=how))
        self.position: Callable[[int], Mapping[str, Any] | None] = lambda _step: None
        self.branch_point: int | None = None
        self._base: str | None = None
        self._keep = keep
        self._saving, self._is_closing = directory, False
        self._deleter = DirectoryDeleter(UNFINISHED)

    def set_aside(self) -> None:
        """Renames what is skipped, to `checkpoint-<step>.damaged`: the step can be saved again, and nothing is lost.

        Raises:
            StorageError: it cannot be renamed.
        """
        check_owner(self.directory)
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
        check_owner(self.directory)
        path, values = self.path(meta.step), None if outer is None else outer.values
        meta = dataclasses.replace(meta, data=self.position(meta.step), outer=values)
        meta = dataclasses.replace(meta, skipped=int(state.skipped), loss_scale=values_of(state.loss_scale))
        if self._is_saved(meta.step):
            if not replace:
                return
            self.wait()
            process_allgather("replaced checkpoint")
            path = path.with_name(f"checkpoint-{meta.step}{NEW}")
        self._write_base(state.params)
        items = {
            "params": without(state.params, self._constants),
            "training": training_of(state),
            STATE: state.plugin_state,
        }
        arrays = {name: to_state_dict(tree) for name, tree in items.items()} | {OUTER: outer.arrays if outer else {}}
        if self._write(path, arrays, meta.__dict__):
            self._metas[meta.step] = meta

    def keep_base(self, params: Params, digest: str | None) -> None:
        """Starts writing the model that an adapter is trained for to `base/`, unless it is there; another is set aside.

        It is on disk before any checkpoint that needs it, since a save waits for the one before.

        Args:
            params: of all models, on the devices.
            digest: of that model; None for a run that keeps none.

        Raises:
            StorageError: it cannot be written.
        """
        self._base = digest
        self._write_base(params)

    def _write_base(self, params: Params) -> None:
        path = self.directory / BASE
        if self._base is None or process_allgather("base", self._has_base(path))[0]:
            return
        if is_main_process() and path.exists():
            set_aside(path, f"{BASE}.replaced")
        process_allgather("base set aside")
        self._write(path, {"params": to_state_dict(params[MAIN])}, {"digest": self._base})
        self._has_whole_base = True

    def _has_base(self, path: Path) -> bool:
        """Whether it is there; its bytes are looked at once."""
        return digest_in(path) == self._base and (self._has_whole_base or find_damage(path) is None)

    def _write(self, path: Path, arrays: Mapping[str, Any], described: Mapping[str, Any]) -> bool:
        """Whether it has begun."""
        written = {name: ocp.args.StandardSave(dict(tree)) for name, tree in arrays.items() if tree}
        self.wait()
        self._saving = path
        with self._explaining():
            self._checkpointer.save(path, args=ocp.args.Composite(meta=ocp.args.JsonSave(described), **written))
            return True
        return False

    def wait(self) -> None:
        """Waits until everything is on disk, then begins to delete what is not kept.

        Raises:
            StorageError: the last save, or a deletion, failed.
        """
        with self._explaining():
            self._checkpointer.wait_until_finished()
        self._deleter.collect(wait=False)
        check_owner(self.directory)
        if is_main_process():
            self._deleter.settle(self.directory, NEW)
        steps, until = self.steps(), self.branch_point
        branch = [step for step in steps if until is not None and step <= until]
        kept = {*steps[-self._keep :], *branch[-1:], self.best()}
        for step in sorted({*steps} - kept):
            self._delete(step)

    def sweep(self) -> None:
        """Ends what killed and failed saves left behind: replacements get their name, the rest is deleted.

        In a directory that another run has taken over, nothing is touched.
        """
        if is_main_process() and is_owned(self.directory):
            self._deleter.settle(self.directory, NEW)
            for pattern in ("checkpoint-*", BASE):
                self._deleter.sweep(self.directory, pattern)

    def close(self) -> None:
        """Waits as `wait` does, and for the deletions, and ends the threads."""
        self._is_closing = True
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            self._deleter.close()
            self.sweep()

    def _is_saved(self, step: int) -> bool:
        """Whether a step is saved, also where it is only being written; not if somebody has deleted it since."""
        if step not in self._metas:
            return self.path(step).exists()
        self.wait()
        is_there: bool = process_allgather("saved", self.path(step).exists())[0]
        if not is_there:
            self._metas.pop(step, None)
        return is_there

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says what a save that fails in it means, and forgets one whose directory somebody deleted."""
        try:
            yield
        except (OSError, ValueError) as error:
            check_owner(self.directory)
            if self._is_closing or not self._is_deleted(error):
                raise self._unwritable(error) from error
            warn(f"{shown(self._saving)} was deleted while it was written; the next one is written when it is due")
            self._forget_saving()

    def _is_deleted(self, error: Exception) -> bool:
        """Whether somebody has deleted what was being written: several processes may not know it alike, and end."""
        unfinished = self._saving.with_name(f"{self._saving.name}{UNFINISHED}")
        is_base = self._saving.name == BASE  # without which no checkpoint can be used
        return current_connection() is None and is_missing(error) and not unfinished.exists() and not is_base

    def _forget_saving(self) -> Path:
        """What was being written is not there; its path, once it would have been."""
        saving = self._saving.with_suffix("")
        self._metas = {step: meta for step, meta in self._metas.items() if f"checkpoint-{step}" != saving.name}
        return saving

    def _seal(self) -> None:
        check_owner(self.directory)
        write_manifest(self._saving.with_name(f"{self._saving.name}{UNFINISHED}"))

    def _delete(self, step: int) -> None:
        self.skip(step)  # the first process takes its time, and the others would still see it
        if is_main_process():
            self._deleter.delete(self.path(step))

    def _unwritable(self, error: Exception) -> StorageError:
        self.sweep()
        return unwritable(self._forget_saving(), error, [self.path(step).name for step in self.steps()])
