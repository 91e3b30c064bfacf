"""How a checkpoint and a model go together, and what is said when they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redco_cli.errors import ModelError, Problem
from redco_cli.models.weights.files import Array, Checkpoint, Index, some
from redco_cli.models.weights.shards import PIECE_BYTES, Source, piece_shape

ParamPath = tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """How a checkpoint and a model go together.

    Attributes:
        sources: path of each parameter that the checkpoint has to where it is read from.
        missing: parameters, or tensors, that the checkpoint lacks.
        fresh: paths of a head that the checkpoint lacks as a whole.
        wrong: tensors of another shape, each with both shapes.
        extra: tensors that the model has no place for.
        unused: tensors of another head, by their stored name.
        copies: stored tensors that are second names of others: each must equal one of those.
    """

    sources: Mapping[ParamPath, Source]
    missing: tuple[str, ...] = ()
    fresh: tuple[ParamPath, ...] = ()
    wrong: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def check_fit(fit: Fit, directory: Path, *, may_lack_head: bool) -> None:
    """Reports every kind of misfit at once, a few names of each.

    Args:
        fit: of a checkpoint and a model.
        directory: of the checkpoint.
        may_lack_head: whether the parameters that are `fresh` will be initialised.

    Raises:
        ModelError: something is missing, misshapen or without a place.
    """
    lacking = [*fit.missing, *(() if may_lack_head else ("/".join(path) for path in fit.fresh))]
    kinds = (
        ("tensors of another shape than the config says", list(fit.wrong), "the checkpoint and config.json do not fit"),
        ("parameters that the checkpoint lacks", sorted(lacking), "choose a checkpoint for this model.task"),
        ("tensors that the model has no place for", list(fit.extra), "choose a checkpoint of this model type"),
    )
    problems = [
        Problem(str(directory), f"{len(names)} {kind}: {some(names)}", remedy) for kind, names, remedy in kinds if names
    ]
    if problems:
        raise ModelError.of(problems)


def check_copies(fit: Fit, checkpoint: Checkpoint, directory: Path) -> None:
    """Reads tensors that are stored twice, and refuses those that differ from what they should be a copy of.

    Raises:
        ModelError: naming both.
    """
    for second, firsts in fit.copies.items():
        if not any(_same(checkpoint, second, first) for first in firsts):
            raise ModelError(
                str(directory),
                f"{second} differs from {' and '.join(firsts)}, though the config says that they are one tensor",
                "set tie_word_embeddings: false in its config.json, or save the model again",
            )


def _same(checkpoint: Checkpoint, one: str, other: str) -> bool:
    shape = checkpoint.shapes[one]
    if checkpoint.shapes[other] != shape:
        return False
    step = piece_shape(shape, range(1), PIECE_BYTES // 4)[0]
    pieces = ((slice(first, min(first + step, shape[0])),) for first in range(0, shape[0], step))

    def part(name: str, piece: Index) -> Array:
        return checkpoint.read(name, piece).astype(np.float32)

    return all(np.array_equal(part(one, piece), part(other, piece)) for piece in pieces)
