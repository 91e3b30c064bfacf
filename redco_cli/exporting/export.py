"""A trained model as a directory that others load, proved by loading it again.

It is made beside its place and moved there when it is whole and has given the same logits: what is at its place is
never half a model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from redco_cli.console import CountProgress
from redco_cli.errors import ModelError, StorageError
from redco_cli.exporting.check import difference_of
from redco_cli.exporting.files import write_config, write_generation_config, write_tokenizer, write_weights
from redco_cli.exporting.tensors import Model, Tensor, tensors_of
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.weights.files import COMPONENT_STEM, open_checkpoint, some, weights_file
from redco_cli.plugin.contract import Params
from redco_cli.runtime.disk import check_directory

SETS_AT_ONCE = 4
"""How many times an export may hold its parameters: those loaded again, and both rounded, besides."""
_OTHER_PLACE = "choose another directory"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        directory: where.
        files: in it, sorted.
        nbytes: of the tensors.
        difference: the largest between outputs of the model and of what was loaded from `directory`, both with
            parameters rounded to the type that was written.
    """

    directory: Path
    files: tuple[Path, ...]
    nbytes: int
    difference: float


def export_model(
    model: Model,
    params: Params,
    directory: Path,
    *,
    source: Path | None = None,
    began_there: bool = True,
    tokenizer: Any = None,
    dtype: str | None = None,
) -> Exported:
    """Writes a model as PyTorch's transformers would, in safetensors, and compares it with what is loaded from there.

    Parameters may be split over the devices of several processes: all of them call this, the first one writes, and
    all read what it wrote. Each tensor passes through the host alone; to compare logits, a second set of parameters is
    loaded beside `params`, split like it.

    Args:
        model: what `resolve_model` returned.
        params: its parameters.
        directory: a new or empty one.
        source: the directory that the config is from. Tensors are written in the type they have there (else in
            float32); the generation config and, without `tokenizer`, the tokenizer are copied from it.
        began_there: whether training began with the weights in `source`; else it needs to have none.
        tokenizer: a tokenizer or processor to save; None for the one in `source`, if any.
        dtype: `float32`, `bfloat16` or `float16` for all tensors.

    Raises:
        StorageError: the directory is not empty, or cannot be written.
        ModelError: the parameters are not those of the model, or not finite in this type, or loading gives another
            model.
    """
    directory = directory.absolute()
    began_there = began_there or (source is not None and weights_file(source) is not None)
    stored = open_checkpoint(source) if source is not None and began_there else None
    _check_params(model, params, directory)
    tensors = tensors_of(model, params, stored, dtype)

    def describe(partial: Path) -> None:
        write_config(model, tensors, partial)
        write_generation_config(model, source, partial)
        write_tokenizer(tokenizer, source, partial)

    stem = COMPONENT_STEM if isinstance(model, DiffusionModel) else "model"
    return write_whole(
        tensors, directory, "pt", describe, lambda made: difference_of(model, params, tensors, made), stem=stem
    )


def write_whole(
    tensors: Sequence[Tensor],
    directory: Path,
    names: Literal["pt", "flax"],
    describe: Callable[[Path], None],
    compare: Callable[[Path], float],
    stem: str = "model",
    header: Mapping[str, str] | None = None,
) -> Exported:
    """Makes a model beside its place, and moves it there when it is whole and proved.

    Args:
        tensors: all of its own.
        directory: a new or empty one; absolute.
        names: whose names and layouts the tensors have.
        describe: writes the other files; the first process calls it.
        compare: raises where what was made is not the model, else says how far it is from it. All processes call it.
        stem: how the names of files of tensors begin.
        header: more to say at the beginning of each of them.

    Raises:
        StorageError: the directory is not empty, or cannot be written.
    """
    partial = directory.parent / f".{directory.name}.partial"
    writing = jax.process_index() == 0
    _together(_prepare(directory, partial, tensors) if writing else None, directory)
    try:
        with CountProgress("writing", len(tensors), unit="tensors") as progress:
            failure = write_weights(tensors, partial if writing else None, progress.update, names, stem, header)
        if writing and failure is None:
            failure = _failure_of(lambda: describe(partial))
        _together(failure, directory)
        difference = compare(partial)
        _together(_failure_of(lambda: partial.rename(directory)) if writing else None, directory)
    finally:
        if writing:
            shutil.rmtree(partial, ignore_errors=True)
    files = tuple(sorted(file for file in directory.rglob("*") if file.is_file()))
    return Exported(directory, files, sum(tensor.nbytes for tensor in tensors), difference)


def check_place(directory: Path) -> None:
    """Refuses a directory that `export_model` would refuse to write to, as far as can be told without writing.

    Args:
        directory: absolute.

    Raises:
        StorageError: it is not empty, or could not be made.
    """
    check_directory(directory, str(directory), _OTHER_PLACE)
    try:
        is_empty = not (directory.is_dir() and any(directory.iterdir()))
    except OSError as error:
        raise StorageError(str(directory), f"cannot be read: {error.strerror}", _OTHER_PLACE) from error
    if not is_empty:
        raise StorageError(str(directory), "the directory is not empty", _OTHER_PLACE)


def _check_params(model: Model, params: Params, directory: Path) -> None:
    wanted = {path: leaf.shape for path, leaf in flatten_dict(model.abstract, sep="/").items()}
    given = {path: leaf.shape for path, leaf in flatten_dict(params, sep="/").items()}
    wrong = [path for path in sorted(wanted.keys() | given.keys()) if wanted.get(path) != given.get(path)]
    if wrong:
        raise ModelError(
            str(directory),
            f"{len(wrong)} parameters are not those of the model: {some(wrong)}",
            "export the parameters of this model, with adapters merged into them",
        )


def _prepare(directory: Path, partial: Path, tensors: Sequence[Tensor]) -> Exception | None:
    """Makes the directory that is written to; returns why that cannot be."""
    try:
        check_place(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir()
        needed, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(partial).free
        if needed > free:
            partial.rmdir()
            problem = f"{needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB are free"
            return StorageError(str(directory), problem, "free some space, or choose another directory")
    except (StorageError, OSError) as error:
        return error
    return None


def _failure_of(write: Callable[[], Any]) -> OSError | None:
    """Why something cannot be written; None when it is."""
    try:
        write()
    except OSError as error:
        return error
    return None


def _together(failure: Exception | None, directory: Path) -> None:
    """Ends every process when the one that writes could not.

    Raises:
        StorageError: it could not.
    """
    failed = failure is not None
    if jax.process_count() > 1:
        failed = bool(np.any(multihost_utils.process_allgather(np.asarray(failed))))
    if isinstance(failure, StorageError):
        raise failure
    if failed:
        reason = f": {getattr(failure, 'strerror', None) or failure}" if failure is not None else " by process 0"
        raise StorageError(str(directory), f"cannot be written{reason}", _OTHER_PLACE) from failure
