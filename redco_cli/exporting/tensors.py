"""The tensors that a checkpoint of a model has, under PyTorch's names, each fetched from its devices when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from redco_cli.errors import ModelError
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.diffusion.naming import Entry
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.weights.decoder import stored_names
from redco_cli.models.weights.diffusion import named_entries
from redco_cli.models.weights.files import Array, Checkpoint
from redco_cli.models.weights.flax import place_stored
from redco_cli.models.weights.table import Row, tensor_table
from redco_cli.plugin.contract import Params

Model = HfFlaxModel | DecoderModel | DiffusionModel
Path = tuple[str, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written.

    Attributes:
        name: PyTorch's; of a plugin's own model the path of the parameter.
        dtype: numpy's name of the type that it is written in.
        shape: of the tensor.
        fetch: its values, contiguous and of that type. With several processes all must call it, in the same order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def tensors_of(model: Model, params: Params, stored: Checkpoint | None, dtype: str | None) -> list[Tensor]:
    """Every tensor of a model; tied ones once.

    Args:
        model: the model.
        params: its parameters.
        stored: the checkpoint that it began as: each tensor is written in the type it has there, new ones in the most
            common of these. None for float32.
        dtype: one type for all instead.
    """
    flat = flatten_dict(params)
    if isinstance(model, DecoderModel):
        return _decoder_tensors(model, flat, stored, dtype)
    if isinstance(model, DiffusionModel):
        return _component_tensors(model, flat, stored, dtype)
    return _flax_tensors(model, flat, stored, dtype)


def parameter_tensors(params: Params, dtype: str | None) -> list[Tensor]:
    """Every parameter under its own path (`hidden/kernel`), as it lies in memory.

    Args:
        params: of any model.
        dtype: of those of floating point; None for that of each.
    """
    flat = flatten_dict(params, sep="/")
    return [_from_leaf(path, None, leaf, dtype or str(leaf.dtype)) for path, leaf in flat.items()]


def usual_dtype(tensors: Sequence[Tensor]) -> str:
    """The type that most tensors are written in."""
    return _usual([tensor.dtype for tensor in tensors])


def _decoder_tensors(
    model: DecoderModel, flat: Mapping[Path, Any], stored: Checkpoint | None, dtype: str | None
) -> list[Tensor]:
    names = {} if stored is None else stored_names(model.decoder, stored.shapes)
    types = _Types({} if stored is None else {full: stored.dtypes[name] for full, name in names.items()}, dtype)
    return [
        _from_row(row, index, name, flat, types.of(name))
        for row in tensor_table(model.decoder)
        for index, name in row.tensors()
    ]


def _component_tensors(
    model: DiffusionModel, flat: Mapping[Path, Any], stored: Checkpoint | None, dtype: str | None
) -> list[Tensor]:
    """Under the names that the checkpoint has, where it has old ones."""
    types = _Types({} if stored is None else stored.dtypes, dtype)
    return [_from_entry(entry, name, flat, types.of(name)) for entry, name in named_entries(model, stored)]


def _flax_tensors(
    model: HfFlaxModel, flat: Mapping[Path, Any], stored: Checkpoint | None, dtype: str | None
) -> list[Tensor]:
    names = {path: torch_name(path, len(leaf.shape)) for path, leaf in flat.items()}
    sources = {} if stored is None else place_stored(model, stored).sources
    types = _Types(
        {} if stored is None else {names[path][0]: stored.dtypes[name] for path, (name, _) in sources.items()}, dtype
    )
    tensors = [_from_leaf(*names[path], leaf, types.of(names[path][0])) for path, leaf in flat.items()]
    tensors += [_batch_count(path) for path in flat if path[0] == "batch_stats" and path[-1] == "mean"]
    for name in stored.shapes if stored is not None else ():
        constant = name.endswith("embed_positions.weight")
        pooler = ".pooler." in name and model.config.model_type == "big_bird"  # its PyTorch class always has one
        if stored is not None and (constant or pooler) and name not in {tensor.name for tensor in tensors}:
            tensors.append(Tensor(name, stored.dtypes[name], stored.shapes[name], partial(stored.read, name, ())))
    return tensors


@dataclass(frozen=True)
class _Types:
    """Which type a tensor is written in."""

    stored: Mapping[str, str]
    wanted: str | None

    def of(self, name: str) -> str:
        return self.wanted or self.stored.get(name) or _usual(list(self.stored.values()))


def _usual(dtypes: Sequence[str]) -> str:
    floating = [dtype for dtype in dtypes if jnp.issubdtype(jnp.dtype(dtype), jnp.floating)]
    return Counter(floating).most_common(1)[0][0] if floating else "float32"


def _from_row(row: Row, index: tuple[int, ...], name: str, flat: Mapping[Path, Any], dtype: str) -> Tensor:
    def fetch() -> Array:
        return _finite(row.put_together(tuple(fetched(flat[path], index, dtype) for path in row.paths)), name)

    return Tensor(name, dtype, row.stored_shape, fetch)


def _from_entry(entry: Entry, name: str, flat: Mapping[Path, Any], dtype: str) -> Tensor:
    def fetch() -> Array:
        parts = [fetched(flat[path], (), dtype).transpose(entry.order) for path in entry.paths]
        return _finite(np.concatenate(parts).reshape(entry.stored_shape), name)

    return Tensor(name, dtype, entry.stored_shape, fetch)


def _from_leaf(name: str, order: tuple[int, ...] | None, leaf: Any, dtype: str) -> Tensor:
    kept = dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else str(leaf.dtype)
    shape = leaf.shape if order is None else tuple(leaf.shape[dim] for dim in order)

    def fetch() -> Array:
        values = fetched(leaf, (), kept)
        return _finite(np.ascontiguousarray(values if order is None else values.transpose(order)), name)

    return Tensor(name, kept, shape, fetch)


def _batch_count(path: Path) -> Tensor:
    """What PyTorch keeps beside running averages: how many batches they are of; only ever read to train on."""
    name = ".".join((*path[1:-1], "num_batches_tracked"))
    return Tensor(name, "int64", (), lambda: np.zeros((), np.int64))


def fetched(leaf: Any, index: tuple[int, ...], dtype: str) -> Array:
    """An array, or the slice at `index` of its leading dims, from wherever its shards are, in another type."""
    part = _slice(leaf, np.asarray(index, np.int32)) if index else leaf
    if isinstance(part, jax.Array) and not part.is_fully_addressable:
        part = multihost_utils.process_allgather(part, tiled=True)
    with np.errstate(over="ignore"):  # `_finite` tells
        if not isinstance(part, jax.Array):
            return np.asarray(part).astype(jnp.dtype(dtype))
        values = np.empty(part.shape, jnp.dtype(dtype))
        for shard in part.addressable_shards:
            if shard.replica_id == 0:
                once = jnp.copy(shard.data)  # an array keeps what it has given to the host
                values[shard.index] = np.asarray(once)
    return values


@jax.jit
def _slice(leaf: jax.Array, index: jax.Array) -> jax.Array:
    for dim in range(index.shape[0]):
        leaf = jax.lax.dynamic_index_in_dim(leaf, index[dim], keepdims=False)
    return leaf


def _finite(values: Array, name: str) -> Array:
    if jnp.issubdtype(values.dtype, jnp.floating) and not np.isfinite(values).all():
        problem = f"holds values that are not finite in {values.dtype}"
        raise ModelError(name, problem, "export in float32, or from another checkpoint")
    return values
