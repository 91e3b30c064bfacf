"""An adapter that PEFT or diffusers wrote, as one of our own: its factors are those of PyTorch's modules.

A module that holds several of our weights (queries, keys and values in one) gives each of them the same A and its own
part of B. Layers whose ranks differ are filled up with zeros, which stay zero; layers without an adapter have zeros
alone. A module that is trained itself is a tensor as the model has it. (Layout: peft 0.21.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.model import Adapter, model_uses
from redco_cli.adapters.stored import Array, PeftFiles, config_file, read_files
from redco_cli.adapters.uses import Use
from redco_cli.errors import ModelError
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import AutoencoderModel, UNetModel
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.own_module import ModuleModel
from redco_cli.models.weights.diffusion import named_entries
from redco_cli.models.weights.table import Row, ignored, tensor_table
from redco_cli.plugin.contract import Params
from redco_cli.recipe.load import shown
from redco_cli.recipe.sections.adapter import AdapterSection

_NAMED = 5
_TABLE = ".base_layer.weight"
_OTHER_MODEL = "give the model that it was trained for"
_MERGE = "merge it with PEFT first, and load the result"


@dataclass(frozen=True)
class _Part:
    """The adapter of one of our weights in one layer: A [in, r], B [r, out], magnitude [out] or None, and its scale."""

    a: Array
    b: Array
    magnitude: Array | None
    scale: float


@dataclass(frozen=True)
class _Place:
    """Where a tensor of PyTorch is kept.

    Attributes:
        row: of the decoder's table; None for a Flax class, and for a model of diffusers.
        paths: our parameters that it holds, or slices of them.
        index: which layer and expert of them.
        shape: as PyTorch stores it.
        out_first: whether PyTorch stores a matrix as [out, in].
        order: of those, the order of our dims there; None for ours.
    """

    row: Row | None
    paths: tuple[str, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    out_first: bool
    order: tuple[int, ...] | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """How many layers and experts there are."""
        return () if self.row is None else self.row.counts

    @property
    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs, of a weight that is a matrix."""
        first, second = self.shape[:2]
        return (first, second) if self.out_first else (second, first)

    def slices(self, tensor: Array) -> tuple[Array, ...]:
        """Our parts of a tensor."""
        if self.row is not None:
            return self.row.take_apart(tensor)
        if self.order is None:
            return (tensor,)
        parts, back = np.split(tensor, len(self.paths)), np.argsort(self.order)
        return tuple(part.reshape(part.shape[: len(back)]).transpose(back) for part in parts)

    def apart(self, out_first: Array) -> tuple[Array, ...]:
        """[out of all, r] as the slices [r, out] that it holds."""
        if self.row is None:
            return tuple(part.T for part in np.split(out_first, len(self.paths)))
        return self.row.take_apart(out_first if self.row.transposed else out_first.T)


def is_peft(directory: Path) -> bool:
    """Whether a directory holds an adapter of PEFT, in its own files or in that of diffusers."""
    return config_file(directory) is not None


def stores_inputs_first(model: Any) -> bool:
    """Whether PyTorch's class of a named model stores matrices as [in, out], in `Conv1D`: PEFT's `fan_in_fan_out`."""
    return bool(model.config.model_type == "gpt2")


def read_peft(directory: Path, model: Any) -> tuple[Adapter, Params]:
    """An adapter for a model, and its parameters as numpy arrays.

    Args:
        directory: of PEFT's files, or for a U-Net of diffusers'.
        model: a named one; its parameters stay unread.

    Raises:
        ModelError: it is none, is damaged, is of a kind that is not read, or does not fit the model.
    """
    if isinstance(model, ModuleModel):
        problem = "PEFT knows no modules of a plugin, which is what this model is"
        raise ModelError(shown(directory), problem, "name a run that trained the adapter, or load that run itself")
    if isinstance(model, AutoencoderModel):
        problem = f"adapters of a {model.config.model_type} are not read from PEFT's files"
        raise ModelError(shown(directory), problem, "name a run that trained the adapter")
    files, places, uses = read_files(directory), _places(model), model_uses(model)
    _drop_tables(files, places, directory)
    _drop_tied_head(files, model, directory)
    names = [name for name in files.modules if not _is_matrix(_known(f"{name}.weight", places), places)]
    names += [name for name in files.rest if name not in places]
    if names:
        more = ", ..." if len(names) > _NAMED else ""
        problem = f"it holds {', '.join(names[:_NAMED])}{more}, which this model has not, or which is not read for it"
        raise ModelError(shown(directory), problem, f"{_OTHER_MODEL}; or {_MERGE}")
    adapters, chosen, flat = _factors(files, places, uses, directory)
    saved = _whole(files, places, directory)
    for path in saved:
        if len(_ways(uses.get(path, ()))) > 1 and not files.config.get("ensure_weight_tying"):
            problem = f"it trains {path} for one of its uses, and this model ties it to another"
            raise ModelError(shown(directory), problem, "train it with ensure_weight_tying, or untie the model")
    flat |= {f"{path}/whole": array for path, array in saved.items()}
    section = AdapterSection(
        type="dora" if files.config.get("use_dora") else "lora",
        rank=max((how.rank for how in adapters.values()), default=1),
        rslora=bool(files.config.get("use_rslora")),
        dropout=float(files.config.get("lora_dropout") or 0.0),
    )
    layers = getattr(model, "stacked", {})
    return Adapter(section, model.abstract, chosen, adapters, tuple(saved), layers), unflatten_dict(flat, sep="/")


def merged_with(adapter: Adapter, own: Params, params: Params) -> Params:
    """The parameters of a model merged with those of its adapter, where they live."""
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.jit(adapter.merged, out_shardings=places)(params, own)


def _places(model: Any) -> dict[str, _Place]:
    """Name of a PyTorch tensor to where it is kept."""
    if isinstance(model, DecoderModel):
        return {
            name: _Place(row, tuple("/".join(path) for path in row.paths), index, row.stored_shape, row.transposed)
            for row in tensor_table(model.decoder)
            for index, name in row.tensors()
        }
    if isinstance(model, UNetModel):
        return {
            entry.name: _Place(None, tuple(map("/".join, entry.paths)), (), entry.stored_shape, True, entry.order)
            for entry, _ in named_entries(model, None)
        }
    found = {}
    for path, leaf in flatten_dict(model.abstract).items():
        name, order = torch_name(path, len(leaf.shape))
        shape = leaf.shape if order is None else tuple(leaf.shape[dim] for dim in order)
        out_first = order is not None and not stores_inputs_first(model)
        found[name] = _Place(None, ("/".join(path),), (), shape, out_first, order)
    return found


def _known(name: str, places: Mapping[str, _Place]) -> str | None:
    """The full name of a tensor; one of a model without its head lacks the first word."""
    return name if name in places else next((one for one in places if one.partition(".")[2] == name), None)


def _is_matrix(name: str | None, places: Mapping[str, _Place]) -> bool:
    return name is not None and places[name].shape[2:] in ((), (1, 1))


def _drop_tables(files: PeftFiles, places: Mapping[str, _Place], directory: Path) -> None:
    """PEFT saves an adapted embedding or head beside its adapter, as it may have been resized."""
    for name in [one for one in files.rest if one.endswith(_TABLE)]:
        known = _known(f"{name.removesuffix(_TABLE)}.weight", places)
        if known is not None and files.rest.pop(name).shape != places[known].shape:
            problem = f"its {name} has another shape than that of the model: the vocabulary was resized"
            raise ModelError(shown(directory), problem, _MERGE)


def _drop_tied_head(files: PeftFiles, model: Any, directory: Path) -> None:
    """A head that is tied to an embedding which is trained itself is saved twice."""
    if not isinstance(model, DecoderModel) or not model.decoder.tied:
        return
    for name in [one for one in files.rest if ignored(model.decoder, one)]:
        head = files.rest.pop(name)
        if not any(one.shape == head.shape and np.array_equal(one, head) for one in files.rest.values()):
            problem = f"it trains {name} apart from the embedding, and this model ties the two"
            raise ModelError(shown(directory), problem, "train it with ensure_weight_tying, or untie the model")


def _factors(
    files: PeftFiles, places: Mapping[str, _Place], uses: Mapping[str, Sequence[Use | str]], directory: Path
) -> tuple[dict[str, LowRank], dict[str, Use], dict[str, Array]]:
    """Which of our weights are adapted, how the model uses each, and their factors by path."""
    parts: dict[str, dict[tuple[int, ...], _Part]] = {}
    for name, tensors in files.modules.items():
        place = places[_known(f"{name}.weight", places) or ""]
        for path, part in zip(place.paths, _parts(name, place, tensors, files), strict=True):
            parts.setdefault(path, {})[place.index] = part
    adapters: dict[str, LowRank] = {}
    chosen: dict[str, Use] = {}
    flat: dict[str, Array] = {}
    for path, by_index in parts.items():
        ways = _ways(uses.get(path, ()))
        if len(ways) != 1:
            problem = f"it adapts {path}, which " + (
                "no product uses" if not ways else "this model uses in several ways"
            )
            raise ModelError(shown(directory), problem, "train with modules_to_save instead, or " + _MERGE)
        chosen[path] = ways[0]
        adapters[path], arrays = _stacked(by_index, ways[0], directory)
        flat |= {f"{path}/{kind}": array for kind, array in arrays.items()}
    return adapters, chosen, flat


def _ways(uses: Sequence[Use | str]) -> list[Use]:
    """Each way in which a weight is used, once."""
    return list({use.signature: use for use in uses if isinstance(use, Use)}.values())


def _whole(files: PeftFiles, places: Mapping[str, _Place], directory: Path) -> dict[str, Array]:
    """The parameters that are trained themselves, by path."""
    parts: dict[str, dict[tuple[int, ...], Array]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for name, tensor in files.rest.items():
        place = places[name]
        if tensor.shape != place.shape:
            problem = f"{name} has the shape {list(tensor.shape)}, and that of the model has {list(place.shape)}"
            raise ModelError(files.place, problem, _OTHER_MODEL)
        for path, part in zip(place.paths, place.slices(tensor), strict=True):
            parts.setdefault(path, {})[place.index] = part
            counts[path] = place.counts
    found = {}
    for path, by_index in parts.items():
        if len(by_index) < math.prod(counts[path]):
            problem = f"it trains {path} itself in some layers, and others would need a model that is not read here"
            raise ModelError(shown(directory), problem, _MERGE)
        whole = np.empty((*counts[path], *next(iter(by_index.values())).shape), np.float32)
        for index, part in by_index.items():
            whole[index] = part
        found[path] = whole
    return found


def _parts(name: str, place: _Place, tensors: Mapping[str, Array], files: PeftFiles) -> list[_Part]:
    """The adapters of our weights that a module holds."""
    a, b, magnitude, scale = tensors["A"], tensors["B"], tensors.get("magnitude"), files.scale(name)
    if (len(b), a.shape[1]) != place.matrix:
        out, into = place.matrix
        problem = f"A {list(a.shape)} and B {list(b.shape)} of {name} do not fit {into} to {out}"
        raise ModelError(files.place, problem, _OTHER_MODEL)
    if "lookup" in tensors:
        return [_Part(a.T, b.T, None if magnitude is None else magnitude.reshape(-1), scale)]
    ups = place.apart(b)
    magnitudes = [None] * len(ups) if magnitude is None else [one[0] for one in place.apart(magnitude.reshape(-1, 1))]
    return [_Part(a.T, up, one, scale) for up, one in zip(ups, magnitudes, strict=True)]


def _stacked(by_index: Mapping[tuple[int, ...], _Part], use: Use, directory: Path) -> tuple[LowRank, dict[str, Array]]:
    """The adapters of all layers in one."""
    first = next(iter(by_index.values()))
    rank, scale = max(part.a.shape[1] for part in by_index.values()), first.scale
    arrays = {
        "A": np.zeros((*use.stack, use.inputs, rank), np.float32),
        "B": np.zeros((*use.stack, rank, use.outputs), np.float32),
    }
    if first.magnitude is not None:
        arrays["magnitude"] = np.zeros((*use.stack, use.outputs), np.float32)
    if "magnitude" in arrays and len(by_index) < math.prod(use.stack):
        problem = "DoRA adapts some layers only, and others would need the magnitudes of a model that is not read here"
        raise ModelError(shown(directory), problem, _MERGE)
    for index, part in by_index.items():
        own = part.a.shape[1]
        arrays["A"][index][:, :own] = part.a
        arrays["B"][index][:own] = part.b * (part.scale / scale)
        if part.magnitude is not None:
            arrays["magnitude"][index] = part.magnitude
    return LowRank(rank, scale), arrays
