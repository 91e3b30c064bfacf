"""Which tensors of a checkpoint fill which parameters of a Flax class, and what does not fit."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.flax.model import HfFlaxModel, build_model
from redco_cli.models.flax.naming import Placement, lacking_heads, place_tensors
from redco_cli.models.vocabulary import set_vocab_size, vocab_size_of
from redco_cli.models.weights.files import Array, Checkpoint
from redco_cli.models.weights.fit import Fit
from redco_cli.models.weights.shards import Box, Source


def fit_flax(model: HfFlaxModel, checkpoint: Checkpoint) -> Fit:
    """Finds the place of each tensor of a checkpoint; a head that lacks as a whole may be initialised."""
    abstract = flatten_dict(model.abstract)
    placement = place_stored(model, checkpoint)
    fresh = lacking_heads(placement, abstract, model.flax.base_model_prefix)
    wrong = []
    for path, (name, order) in placement.sources.items():
        stored = checkpoint.shapes[name]
        shape = stored if order is None else tuple(stored[dim] for dim in order)
        if shape != abstract[path].shape:
            wrong.append(f"{name} {list(stored)} for {'/'.join(path)} {list(abstract[path].shape)}")
    return Fit(
        sources={
            path: _source(checkpoint, name, order, abstract[path]) for path, (name, order) in placement.sources.items()
        },
        missing=tuple("/".join(path) for path in placement.missing if path not in fresh),
        fresh=fresh,
        wrong=tuple(wrong),
        extra=placement.extra,
        unused=placement.unused,
        copies=placement.copies,
    )


def flax_vocabulary(model: HfFlaxModel, checkpoint: Checkpoint) -> dict[str, int]:
    """The stored tensors with a row for each token of the vocabulary, each to the dim that counts them.

    They are those whose parameters change their shape with the vocabulary.

    Raises:
        ModelError: there are none.
    """
    abstract, placement = flatten_dict(model.abstract), place_stored(model, checkpoint)
    larger = flatten_dict(_with_one_token_more(model).abstract)
    found: dict[str, int] = {}
    for path, (name, order) in placement.sources.items():
        for dim, (one, other) in enumerate(zip(abstract[path].shape, larger[path].shape, strict=True)):
            if one != other:
                found[name] = dim if order is None else order[dim]
    if not found:
        problem = f"no parameter of {type(model.flax).__name__} grows with its vocabulary"
        raise ModelError(model.where, problem, "leave model.added_tokens out")
    shapes = {checkpoint.shapes[name] for name in found}
    seconds = [name for name in (*placement.copies, *placement.unused) if checkpoint.shapes[name] in shapes]
    return {**dict.fromkeys(seconds, 0), **found}


def _with_one_token_more(model: HfFlaxModel) -> HfFlaxModel:
    config = copy.deepcopy(model.config)
    set_vocab_size(config, (vocab_size_of(config) or 0) + 1)
    dtype = jnp.dtype(model.flax.dtype).name
    return build_model(config, model.task, dtype=dtype, generation_config=None, where=model.where)


def place_stored(model: HfFlaxModel, checkpoint: Checkpoint) -> Placement:
    """Where the tensors of a checkpoint belong in the model."""
    abstract = flatten_dict(model.abstract)
    tied = _tied_shape(model, abstract)
    return place_tensors(checkpoint.shapes, abstract, model.flax.base_model_prefix, tied_shape=tied)


def _tied_shape(model: HfFlaxModel, abstract: dict[tuple[str, ...], Any]) -> tuple[int, ...] | None:
    """The shape of the word embedding when the output layer is the same tensor."""
    text_config = model.config.get_text_config(decoder=True)
    vocab_size = getattr(text_config, "vocab_size", None)
    if vocab_size is None or not text_config.tie_word_embeddings:
        return None
    shapes = [leaf.shape for path, leaf in abstract.items() if path[-1] == "embedding" and leaf.shape[0] == vocab_size]
    return shapes[0] if shapes else None


def _source(checkpoint: Checkpoint, name: str, order: tuple[int, ...] | None, leaf: Any) -> Source:
    """A parameter that one tensor fills; float32 where it is a floating-point number."""
    dims = tuple(range(leaf.ndim)) if order is None else order
    stored = tuple(dims.index(dim) for dim in range(leaf.ndim))
    dtype = np.dtype(checkpoint.dtypes[name])
    dtype = np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def read(box: Box) -> Array:
        return checkpoint.read(name, tuple(box[dim] for dim in stored))

    return Source(leaf.shape, dtype, dims, stored, read)
