"""Which tensors of a checkpoint of diffusers fill which parameters of a U-Net or an autoencoder."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.diffusion.naming import Entry, entries
from redco_cli.models.weights.files import Array, Checkpoint
from redco_cli.models.weights.fit import Fit, ParamPath
from redco_cli.models.weights.shards import Box, Source


def fit_component(model: DiffusionModel, checkpoint: Checkpoint) -> Fit:
    """Finds the tensors of each parameter; nothing may be missing."""
    sources: dict[ParamPath, Source] = {}
    missing: list[str] = []
    wrong: list[str] = []
    known: set[str] = set()
    for entry, name in named_entries(model, checkpoint):
        known.add(name)
        if name not in checkpoint.shapes:
            missing.append(name)
        elif not entry.fits(checkpoint.shapes[name]):
            wrong.append(f"{name} {list(checkpoint.shapes[name])} instead of {list(entry.stored_shape)}")
        else:
            sources |= {path: _source(checkpoint, name, entry, number) for number, path in enumerate(entry.paths)}
    extra = tuple(name for name in checkpoint.shapes if name not in known)
    return Fit(sources, missing=tuple(missing), wrong=tuple(wrong), extra=extra)


def named_entries(model: DiffusionModel, checkpoint: Checkpoint | None) -> list[tuple[Entry, str]]:
    """The tensors of a model with the names that a checkpoint has for them, or else diffusers'."""
    shapes = {path: leaf.shape for path, leaf in flatten_dict(model.abstract).items()}
    there = {} if checkpoint is None else checkpoint.shapes
    return [
        (entry, entry.old if entry.old is not None and entry.old in there else entry.name)
        for entry in entries(model.config, shapes)
    ]


def _source(checkpoint: Checkpoint, name: str, entry: Entry, number: int) -> Source:
    """The parameter with this number in a tensor; float32."""
    shape, order = entry.shapes[number], entry.order
    before = number * shape[order[0]]

    def read(box: Box) -> Array:
        first, *rest = (box[dim] for dim in order)
        part = checkpoint.read(name, (slice(before + first.start, before + first.stop), *rest))
        return part.reshape(part.shape[: len(order)])

    turned: Any = np.argsort(order)
    return Source(shape, jnp.float32, tuple(int(dim) for dim in turned), order, read)
