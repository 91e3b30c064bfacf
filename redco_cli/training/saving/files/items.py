"""The items of one checkpoint, read: what they hold, and their arrays born where they are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from redco_cli.models.several import MAIN
from redco_cli.training.saving.files.deletion import CheckpointDeletedError, is_gone
from redco_cli.training.saving.files.orbax_errors import of_another_model, unreadable
from redco_cli.training.saving.files.state_dict import from_state_dict, shape_mismatches, to_state_dict

STATE = "state"
"""The item with the state of a plugin, where it keeps some."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError)
"""What orbax and the libraries below it raise for files that are cut off, missing, or hold something else."""


@contextlib.contextmanager
def readable(path: Path, others: Sequence[str]) -> Iterator[None]:
    """Turns what reading a checkpoint raises into an error that names it.

    Args:
        path: its directory.
        others: names of checkpoints that could be taken instead.

    Raises:
        StorageError: it is damaged.
        CheckpointDeletedError: it is not there any more.
    """
    try:
        yield
    except _DAMAGE as error:
        if is_gone(path):
            raise CheckpointDeletedError.at(path) from error
        raise unreadable(path, error, others) from error


def stored(path: Path, item: str, others: Sequence[str]) -> Any:
    """What is in an item of a checkpoint: shapes and types, as nested dicts.

    Raises:
        StorageError: it is damaged.
    """
    if item == STATE and not (path / item).is_dir():
        return {}
    with readable(path, others):
        return ocp.StandardCheckpointHandler().metadata(path / item).tree


def part_named(stored_tree: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> str | None:
    """Which part of the parameters of a run are those of a model; None for all of them, of a run with one model.

    Args:
        stored_tree: of the run, as `stored` returns it.
        wanted: parameters of one model.
        name: of the model.
    """
    if stored_tree.keys() == wanted.keys():
        return None
    return next((part for part in (name, MAIN) if part in stored_tree), None)


def restored_part(path: Path, item: str, part: tuple[str, ...], tree: Any, others: Sequence[str]) -> Any:
    """One part of an item of a checkpoint, by its keys, as `restored_items`; nothing else of it is read."""
    wanted = unflatten_dict({part: to_state_dict(tree)})
    there = unflatten_dict({part: reduce(getitem, part, stored(path, item, others))})
    if wrong := shape_mismatches(there, wanted):
        raise of_another_model(path, wrong)
    with readable(path, others), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        places = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=places, partial_restore=True)
        return from_state_dict(reduce(getitem, part, reader.restore(path / item, args=args)), tree)


def restored_items(
    checkpointer: ocp.AsyncCheckpointer, path: Path, trees: Mapping[str, Any], others: Sequence[str]
) -> dict[str, Any]:
    """Items of a checkpoint, with the structure of what is wanted, born on its shardings.

    Args:
        checkpointer: reads them.
        path: the directory of the checkpoint.
        trees: name of an item to a tree of `jax.ShapeDtypeStruct`s with shardings, or of numpy arrays.
        others: names of checkpoints that could be taken instead.

    Raises:
        StorageError: it is damaged, or holds something else.
    """
    items = {name: to_state_dict(tree) for name, tree in trees.items()}
    wrong = [
        f"{name} {one}" for name, item in items.items() for one in shape_mismatches(stored(path, name, others), item)
    ]
    if wrong:
        raise of_another_model(path, wrong)
    with readable(path, others):
        args = {name: ocp.args.StandardRestore(tree) for name, tree in items.items() if tree}
        restored = checkpointer.restore(path, args=ocp.args.Composite(**args))
    return {name: from_state_dict(restored[name] if items[name] else {}, tree) for name, tree in trees.items()}
