"""Which tensors of a checkpoint fill which parameters of the decoder, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.families.registry import names_of
from redco_cli.models.families.shared.family import CLASSIFIER
from redco_cli.models.weights.files import Array, Checkpoint, Index, some
from redco_cli.models.weights.fit import Fit, ParamPath
from redco_cli.models.weights.shards import Box, Source
from redco_cli.models.weights.table import Row, ignored, tensor_table


def fit_decoder(model: DecoderModel, checkpoint: Checkpoint) -> Fit:
    """Finds the tensors of a checkpoint in the model's table; their names may lack the prefix of the base model."""
    if checkpoint.names == "flax":
        problem = "the weights are in Flax's own format, which the decoder does not read"
        raise ModelError(model.where, problem, "set model.implementation: hf_flax, or convert them by `redco export`")
    config, shapes = model.decoder, checkpoint.shapes
    stored = stored_names(config, shapes)
    whole = [name for name in stored.values() if not checkpoint.dtypes[name].startswith(("float", "bfloat"))]
    if whole:
        problem = f"{len(whole)} tensors hold no floating-point numbers: {some(whole)}"
        raise ModelError(model.where, problem, "choose weights in bfloat16, float16 or float32")
    expected = {name: row.stored_shape for row in tensor_table(config) for _, name in row.tensors()}
    names = set(stored.values())
    rest = [name for name in shapes if name not in names and not ignored(config, name)]
    heads = tuple(name for name in rest if _beside_base(config, name, shapes))
    names_there = names_of(config)
    head, embedding = (f"{names_there.modules[module]}.weight" for module in ("head", "embedding"))
    ties = config.tied and not config.num_labels and embedding in stored
    copies = {one for one in names_there.spellings(head) if one in shapes and ties}
    score = f"{CLASSIFIER}.weight"
    is_fresh = bool(config.num_labels) and score not in stored
    return Fit(
        sources=_sources(model, checkpoint, stored),
        missing=tuple(full for full in expected if full not in stored and not (is_fresh and full == score)),
        fresh=((CLASSIFIER,),) if is_fresh else (),
        wrong=tuple(
            f"{name} {list(shapes[name])} instead of {list(expected[full])}"
            for full, name in stored.items()
            if shapes[name] != expected[full]
        ),
        extra=tuple(name for name in rest if name not in heads),
        unused=heads,
        copies=dict.fromkeys(copies, (stored[embedding],)),
    )


def decoder_vocabulary(model: DecoderModel, checkpoint: Checkpoint) -> dict[str, int]:
    """The stored tensors with a row for each token of the vocabulary, each to the dim that counts them."""
    names = names_of(model.decoder)
    full = [f"{names.modules[module]}.{kind}" for module in ("embedding", "head") for kind in ("weight", "bias")]
    known = {name for one in full for name in names.spellings(one)}
    return {name: 0 for name in checkpoint.shapes if name in known}


def stored_names(config: DecoderConfig, stored: Mapping[str, Any]) -> dict[str, str]:
    """The full name of each tensor that the decoder has and that is `stored`, to its name there."""
    names, found = names_of(config), {}
    for row in tensor_table(config):
        for _, full in row.tensors():
            name = next((one for one in names.spellings(full) if one in stored), None)
            if name is not None:
                found[full] = name
    return found


def _beside_base(config: DecoderConfig, name: str, stored: Mapping[str, Any]) -> bool:
    """Whether a tensor stands beside the base model: then it belongs to another head, or to a part for images."""
    names = names_of(config)
    base, head = f"{names.base}.", f"{CLASSIFIER if config.num_labels else names.modules['head']}."
    places = ({base: base, head: head}, *names.within)
    inner = next((one for one in reversed(places) if any(other.startswith(one[base]) for other in stored)), None)
    return inner is not None and not name.startswith(tuple(inner.values()))


def _sources(model: DecoderModel, checkpoint: Checkpoint, stored: Mapping[str, str]) -> dict[ParamPath, Source]:
    """A source for each parameter all of whose tensors are there."""

    @lru_cache(maxsize=1)  # shards that differ only along the fused dim share what is read
    def parts(row: Row, name: str, rows: tuple[tuple[int, int], ...]) -> tuple[Array, ...]:
        box = tuple(slice(*ends) for ends in rows)
        return row.take_apart(checkpoint.read(name, _stored_index(row, (*box, slice(None)))))

    def part(row: Row, position: int, name: str, box: Box) -> Array:
        """A box of one of the slices that a tensor holds."""
        if row.fused is None:
            return row.take_apart(checkpoint.read(name, _stored_index(row, box)))[0]
        *rows, columns = box
        return parts(row, name, tuple((one.start, one.stop) for one in rows))[position][..., columns]

    abstract = flatten_dict(model.abstract)
    return {
        path: _source(row, position, abstract[path], checkpoint, stored, part)
        for row in tensor_table(model.decoder)
        if all(full in stored for _, full in row.tensors())
        for position, path in enumerate(row.paths)
    }


def _source(
    row: Row, position: int, leaf: Any, checkpoint: Checkpoint, stored: Mapping[str, str], part: Callable[..., Array]
) -> Source:
    """One of the parameters that a row fills. Layers are cut first, then the dim along which tensors are written."""
    leading = len(row.counts)
    dims = tuple(range(leaf.ndim))
    order = (*dims[:leading], *(dims[leading:][::-1] if row.transposed else dims[leading:]))
    dtypes = {checkpoint.dtypes[stored[name]] for _, name in row.tensors()}
    dtype = np.dtype(dtypes.pop() if len(dtypes) == 1 else leaf.dtype)

    def read(box: Box) -> Array:
        values = np.empty([box[dim].stop - box[dim].start for dim in order], dtype)
        for at in np.ndindex(*values.shape[:leading]):
            index = tuple(offset + one.start for offset, one in zip(at, box[:leading], strict=True))
            found = part(row, position, stored[row.tensor(index)], box[leading:])
            values[at] = found.T if row.transposed else found
        return values

    return Source(leaf.shape, leaf.dtype, order, order if row.fused is None else dims, read)


def _stored_index(row: Row, box: Box) -> Index:
    """The slices of a stored tensor that hold a box of ours."""
    return box[::-1] if row.transposed else box
