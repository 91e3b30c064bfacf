"""Checkpoints of covered families as parameters of the decoder, and back: a table with a row for each kind of tensor.

A row names the tensors of all layers and experts at once and says how one of them becomes the slices of our stacked
parameters that it holds. Nothing is read before it is asked for, so a loader can fill its shards tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.decoder import Decoder, abstract_params
from redco_cli.models.decoder.runs import layer_runs
from redco_cli.models.families.registry import names_of
from redco_cli.models.families.shared.family import Fused

Array = np.ndarray[Any, Any]
Path = tuple[str, ...]
_SUFFIXES = {"bias": "bias", "head_bias": "bias"}
_KERNELS = frozenset({"kernel", "head", "score", "gate", "up", "down"})
_NO_PARAMETER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|attention\.(bias|masked_bias))$")


@dataclass(frozen=True)
class Row:
    """The tensors of one name in every layer.

    Attributes:
        name: of the tensors, with `{layer}` and `{expert}` where there are several.
        paths: our parameters that a tensor holds slices of.
        counts: how many layers and experts, as far as the name has them: the leading dims of our parameters.
        shapes: of the slices.
        transposed: whether a kernel is stored [out, in].
        fused: how several slices make up the tensor; None where there is one.
        first: number of the first layer.
    """

    name: str
    paths: tuple[Path, ...]
    counts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    transposed: bool
    fused: Fused | None
    first: int = 0

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The index of each tensor's slices among the leading dims, with the tensor's name."""
        for index in product(*map(range, self.counts)):
            yield index, self.tensor(index)

    def tensor(self, index: tuple[int, ...]) -> str:
        """The name of the tensor whose slices are at `index` of the leading dims."""
        layer, *expert = (self.first + index[0], *index[1:]) if index else (0,)
        return self.name.format(layer=layer, expert=expert[0] if expert else 0)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        if self.fused is None:
            return self.shapes[0][::-1] if self.transposed else self.shapes[0]
        inputs, outputs = self.shapes[0][:-1], sum(shape[-1] for shape in self.shapes)
        return (outputs, *inputs) if self.transposed else (*inputs, outputs)

    def take_apart(self, tensor: Array) -> tuple[Array, ...]:
        """The slices that a stored tensor holds, one for each path; views where possible."""
        if self.fused is None:
            return (tensor.T if self.transposed else tensor,)
        return tuple(part.T for part in _cut(tensor if self.transposed else tensor.T, self.fused))

    def put_together(self, slices: tuple[Array, ...]) -> Array:
        """The stored tensor of these slices; undoes `take_apart`."""
        if self.fused is None:
            return np.ascontiguousarray(slices[0].T if self.transposed else slices[0])
        out_first = _join(tuple(part.T for part in slices), self.fused)
        return np.ascontiguousarray(out_first if self.transposed else out_first.T)


@cache
def tensor_table(config: DecoderConfig) -> tuple[Row, ...]:
    """A row for each kind of tensor that a checkpoint of this model has; together they fill every parameter once."""
    names = names_of(config)
    ours = flatten_dict(abstract_params(Decoder(config)))
    fused = {part: (theirs, make(config)) for theirs, make in names.fused.items() for part in make(config).modules}
    runs = {run.name: run for run in layer_runs(config)}
    rows: dict[tuple[str, str], Row] = {}
    for path, leaf in ours.items():
        run, stack = runs.get(path[0]), path[0]
        usual = ("layers", *path[1:]) if run else path
        leaf_name = path[-1:] if path[-1] in ("kernel", "bias", "scale") else ()
        module = "/".join(usual[: len(usual) - len(leaf_name)])
        theirs, fusion = fused.get(module, (None, None))
        suffix = "" if module in names.bare else f".{_SUFFIXES.get(path[-1], 'weight')}"
        name = f"{theirs or names.module(module)}{suffix}"
        leading = ("{layer}" in name) + ("{expert}" in name)
        inner = [] if fusion is None else [part.split("/")[1:] for part in fusion.modules]
        members = tuple((stack, *part, *leaf_name) for part in inner) or (path,)
        rows[name, stack if run else ""] = Row(
            name=name,
            paths=members,
            counts=leaf.shape[:leading],
            shapes=tuple(ours[member].shape[leading:] for member in members),
            transposed=path[-1] in _KERNELS and not (names.out_last and run) and module not in names.bare,
            fused=fusion,
            first=run.first if run else 0,
        )
    return tuple(rows.values())


def ignored(config: DecoderConfig, name: str) -> bool:
    """Whether a stored tensor without a row is no loss: a buffer, or the head of a model that ties it."""
    names = names_of(config)
    is_head = "head" in names.modules and name in names.spellings(f"{names.modules['head']}.weight")
    return bool(_NO_PARAMETER.search(name)) or (config.tied and is_head)


def to_params(hf_state: Mapping[str, Array], config: DecoderConfig) -> dict[str, Any]:
    """The parameters of the decoder from the tensors of a checkpoint, in their stored type.

    Args:
        hf_state: tensor name to array; names may lack the prefix of the base model.
        config: of the decoder.

    Raises:
        ModelError: a tensor is missing, or has another shape than the config says.
    """
    names = names_of(config)
    filled: dict[Path, Array] = {}
    for row in tensor_table(config):
        for index, name in row.tensors():
            stored = next((hf_state[one] for one in names.spellings(name) if one in hf_state), None)
            if stored is None or stored.shape != row.stored_shape:
                found = "is missing" if stored is None else f"has shape {list(stored.shape)}"
                raise ModelError(
                    name,
                    f"the tensor {found}; it should be {list(row.stored_shape)}",
                    "choose weights that fit the config",
                )
            for path, shape, part in zip(row.paths, row.shapes, row.take_apart(stored), strict=True):
                if path not in filled:
                    filled[path] = np.empty(row.counts + shape, part.dtype)
                filled[path][index] = part
    params: dict[str, Any] = unflatten_dict(filled)
    return params


def to_hf(params: Any, config: DecoderConfig) -> dict[str, Array]:
    """The tensors of a checkpoint from parameters of the decoder, by their full names; undoes `to_params`."""
    flat = {path: np.asarray(leaf) for path, leaf in flatten_dict(jax.device_get(params)).items()}
    return {
        name: row.put_together(tuple(flat[path][index] for path in row.paths))
        for row in tensor_table(config)
        for index, name in row.tensors()
    }


def _cut(tensor: Array, fused: Fused) -> tuple[Array, ...]:
    """The parts of a fused tensor [out, ...], each [out of the part, ...]."""
    blocks = tensor.reshape(fused.groups, sum(fused.counts), fused.width, *tensor.shape[1:])
    starts = np.cumsum((0, *fused.counts))
    return tuple(blocks[:, start:end].reshape(-1, *tensor.shape[1:]) for start, end in pairwise(starts))


def _join(parts: tuple[Array, ...], fused: Fused) -> Array:
    blocks = [
        part.reshape(fused.groups, count, fused.width, *part.shape[1:])
        for part, count in zip(parts, fused.counts, strict=True)
    ]
    return np.concatenate(blocks, axis=1).reshape(-1, *parts[0].shape[1:])
