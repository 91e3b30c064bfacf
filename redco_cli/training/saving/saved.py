"""Checkpoints that are there: which, what each says of itself, and their arrays."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from redco_cli.models.several import MAIN, without
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.runtime.peers.multihost import current_connection, process_allgather
from redco_cli.training.precision.loss_scale import FIRST, LossScale, saved_scale
from redco_cli.training.saving.files.base import restored_base
from redco_cli.training.saving.files.deletion import CheckpointDeletedError, is_gone
from redco_cli.training.saving.files.integrity import find_damage
from redco_cli.training.saving.files.items import STATE, part_named, readable, restored_items, restored_part, stored
from redco_cli.training.saving.files.state_dict import shape_mismatches, to_state_dict
from redco_cli.training.saving.meta import Meta, read_meta
from redco_cli.training.saving.outer_state import OuterState, from_saved
from redco_cli.training.state import TrainState, partition, paths

_NAME = re.compile(r"checkpoint-(\d+)(\.new)?")
NEW = ".new"
"""What the name of a checkpoint ends with that is to replace one of the same step."""
OUTER = "outer"
"""The item with the arrays of an outer loop, where it has any."""


class SavedCheckpoints:
    """The checkpoints of one output directory, as they are read.

    Attributes:
        directory: where they are.
    """

    def __init__(
        self, directory: Path, mode: Literal["min", "max"], constants: Collection[str], checkpointer: Any
    ) -> None:
        """Touches no disk yet.

        Args:
            directory: the output directory; absolute.
            mode: whether the best metric is the smallest or the largest.
            constants: names of models that are never updated: their parameters are in no checkpoint.
            checkpointer: orbax's.
        """
        self.directory = directory
        self._mode = mode
        self._constants = constants
        self._checkpointer: ocp.AsyncCheckpointer = checkpointer
        self._metas: dict[int, Meta] = {}
        self._skipped: set[int] = set()
        self._has_whole_base = False

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        new = self.directory / f"checkpoint-{step}{NEW}"
        return new if new.is_dir() else new.with_suffix("")

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints that are not skipped, ascending."""
        try:
            paths = list(self.directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (_NAME.fullmatch(path.name) for path in paths if path.is_dir())
        return sorted({int(match[1]) for match in names if match} - self._skipped)

    def damage(self, step: int, items: Collection[str] = ()) -> str | None:
        """What is wrong with the files of a checkpoint, or of some items, of which each process reads its share.

        Raises:
            CheckpointDeletedError: on all processes: it was deleted meanwhile.
        """
        others, path = current_connection(), self.path(step)
        share = slice(None) if others is None else slice(others.process, None, others.processes)
        found = find_damage(path, items, share) or _other_step(path, step)
        told = process_allgather("damage", (found, found is not None and is_gone(path)))
        if any(gone for _, gone in told):
            error = CheckpointDeletedError.at(path)
            error.on_all_processes = True
            raise error
        return next((problem for problem, _ in told if problem is not None), None)

    def skip(self, step: int) -> None:
        """Takes a checkpoint for one that is not there: it is damaged, or about to be deleted or moved."""
        self._skipped.add(step)
        self._metas.pop(step, None)

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
        sign, known = 1 if self._mode == "min" else -1, []
        for step in self.steps():
            with contextlib.suppress(CheckpointDeletedError):
                if (metric := self.meta(step).metric) is not None:
                    known.append((sign * metric, step))
        return [step for _, step in sorted(known)]

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a checkpoint, born on the shardings of `abstract`; without the constant models.

        Args:
            abstract: ShapeDtypeStructs with shardings; its split into trainable and frozen is the one returned.

        Raises:
            StorageError: it is damaged, or holds another model or optimizer than `abstract`.
        """
        trees = {
            "params": without(abstract.params, self._constants),
            "training": training_of(abstract),
            STATE: abstract.plugin_state,
        }
        restored = self._restored(step, **trees)
        trainable, rest = partition(restored["params"], frozenset(paths(abstract.frozen)))
        step_array = jax.device_put(jax.numpy.int32(step), abstract.step.sharding)
        scale = self._loss_scale(step, abstract)
        return TrainState(
            step_array, trainable, rest, plugin_state=restored[STATE], loss_scale=scale, **restored["training"]
        )

    def _loss_scale(self, step: int, abstract: TrainState) -> LossScale | None:
        """The one of a checkpoint; the first one where the run computed in another type until then."""
        if abstract.loss_scale is None:
            return None
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract.loss_scale)
        placed: LossScale = jax.device_put(saved_scale(self.meta(step).loss_scale or FIRST), places)
        return placed

    def restore_outer(self, step: int) -> OuterState:
        """What an outer loop has kept, arrays as numpy's.

        Raises:
            StorageError: it is damaged.
        """
        values, arrays = self.meta(step).outer, {}
        path, others = self.path(step), self._others(step)
        with readable(path, others):
            if (path / OUTER).is_dir():
                like = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in stored(path, OUTER, others).items()}
                arrays = self._restored(step, **{OUTER: like})[OUTER]
            return OuterState() if values is None else from_saved(values, arrays)

    def restore_params(self, step: int, abstract: Params, name: str = MAIN) -> Params:
        """The parameters of one model alone, born on the shardings of `abstract`.

        Args:
            step: of the checkpoint.
            abstract: ShapeDtypeStructs with shardings.
            name: of the model, where the run had several.

        Raises:
            StorageError: it is damaged, or holds another model.
        """
        path, others = self.path(step), self._others(step)
        part = part_named(stored(path, "params", others), abstract, name)
        if part is None:
            return self._restored(step, params=abstract)["params"]
        return restored_part(path, "params", (part,), abstract, others)

    def restore_variables(self, step: int, abstract: Variables) -> Variables:
        """Parameters and state of the plugin alone, born on the shardings of `abstract`; without the constant models.

        Raises:
            StorageError: it is damaged, or holds another model or another plugin's state.
        """
        restored = self._restored(step, params=without(abstract.params, self._constants), state=abstract.state)
        step_array = jax.device_put(jax.numpy.int32(step), abstract.step.sharding)
        return Variables(restored["params"], restored[STATE], step_array)

    def restore_base(self, abstract: Params) -> Params:
        """The model that an adapter is trained for, from `base/`, born on the shardings of `abstract`.

        Raises:
            StorageError: it is gone, damaged, or holds another model.
        """
        base = restored_base(self._checkpointer, self.directory, abstract)
        self._has_whole_base = True
        return base

    def state(self, step: int) -> Any:
        """What a plugin's state holds, as nested dicts of shapes and types; empty where it keeps none.

        Raises:
            StorageError: it is damaged.
        """
        return stored(self.path(step), STATE, self._others(step))

    def restore_state(self, step: int, part: tuple[str, ...], abstract: Any) -> Any:
        """A part of a plugin's state alone, by its keys, as numpy arrays like `abstract`.

        Raises:
            StorageError: it is damaged.
        """
        like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
        return restored_part(self.path(step), STATE, part, like, self._others(step))

    def mismatches(self, step: int, abstract: Params, name: str = MAIN) -> list[str]:
        """What the parameters of a model, which are not read, lack or have other than those of `abstract`.

        Raises:
            StorageError: it is damaged.
        """
        there = stored(self.path(step), "params", self._others(step))
        part = part_named(there, abstract, name)
        return shape_mismatches(there if part is None else there[part], to_state_dict(abstract))

    def _restored(self, step: int, **trees: Any) -> dict[str, Any]:
        return restored_items(self._checkpointer, self.path(step), trees, self._others(step))

    def _others(self, step: int) -> list[str]:
        """The names of those before it, which could be taken instead."""
        return [self.path(other).name for other in self.steps() if other < step]


def _other_step(path: Path, step: int) -> str | None:
    """What is wrong with a checkpoint that says of itself that it is of another step: somebody has renamed it."""
    try:
        said = json.loads((path / "meta" / "metadata").read_bytes())["step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # whoever needs what it says finds that out
    return None if said == step else f"it says that it is of step {said}"


def training_of(state: TrainState) -> dict[str, Any]:
    """What only training needs of a state, apart from the step, which the name of a checkpoint says."""
    return {"opt_state": state.opt_state, "skipped": state.skipped, "streak": state.streak}
