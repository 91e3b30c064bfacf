"""Reads an adapter that PEFT wrote: `adapter_config.json` and `adapter_model.safetensors`.

Its factors are those of PyTorch's modules. A module that holds several of our weights (queries, keys and values in one)
gives each of them the same A and its own part of B. Layers whose ranks differ are filled up with zeros, which stay
zero; layers without an adapter have zeros alone. (Layout: peft 0.21.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.model import Adapter, model_uses
from redco_cli.adapters.uses import Use
from redco_cli.errors import ModelError
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.own_module import ModuleModel
from redco_cli.models.weights.table import Row, tensor_table
from redco_cli.plugin.contract import Params
from redco_cli.recipe.sections.adapter import AdapterSection

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Array = np.ndarray[Any, Any]
_KINDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_UNREAD = (
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
)
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin that change the weights beside the adapter."""
_NAMED = 5
_TABLE = ".base_layer.weight"


@dataclass(frozen=True)
class _Part:
    """The adapter of one of our weights in one layer: A [in, r], B [r, out], magnitude [out] or None, and its scale."""

    a: Array
    b: Array
    magnitude: Array | None
    scale: float


def is_peft(directory: Path) -> bool:
    """Whether a directory holds an adapter of PEFT."""
    return (directory / CONFIG).is_file()


def read_peft(directory: Path, model: Any) -> tuple[Adapter, Params]:
    """An adapter for a model, and its parameters as numpy arrays.

    Args:
        directory: of PEFT's files.
        model: a named one; its parameters stay unread.

    Raises:
        ModelError: it is none, is damaged, is of a kind that is not read, or does not fit the model.
    """
    config, modules, rest = _read(directory)
    places, wholes = _places(model), _whole_parameters(model)
    tables = [name for name in rest if name.endswith(_TABLE) and _known(name.removesuffix(_TABLE), places)]
    for name in tables:  # PEFT saves an adapted embedding beside its adapter, as it may have been resized
        row, _, _ = places[_known(name.removesuffix(_TABLE), places) or ""]
        if row is not None and rest.pop(name).shape != row.stored_shape:
            problem = f"its {name} has another shape than that of the model: the vocabulary was resized"
            raise ModelError(str(directory), problem, "merge it with PEFT, and load the result")
    names = [name for name in modules if _known(name, places) is None] + [name for name in rest if name not in wholes]
    if names:
        more = ", ..." if len(names) > _NAMED else ""
        problem = f"it holds {', '.join(names[:_NAMED])}{more}, which this model has not, or which is not read for it"
        raise ModelError(str(directory), problem, "give the model that it was trained for; or merge it with PEFT first")
    parts: dict[str, dict[tuple[int, ...], _Part]] = {}
    for name, tensors in modules.items():
        row, paths, index = places[_known(name, places) or name]
        for path, part in zip(paths, _parts(row, tensors, _scale(name, tensors, config), directory), strict=True):
            parts.setdefault(path, {})[index] = part
    uses = model_uses(model)
    adapters: dict[str, LowRank] = {}
    flat: dict[str, Array] = {}
    for path, by_index in parts.items():
        use = next((one for one in uses.get(path, ()) if isinstance(one, Use)), None)
        if use is None:
            raise ModelError(str(directory), f"it adapts {path}, which no product uses", "merge it with PEFT first")
        adapters[path], arrays = _stacked(by_index, use, directory)
        flat |= {f"{path}/{kind}": array for kind, array in arrays.items()}
    saved = {}
    for name, array in rest.items():
        path, order = wholes[name]
        saved[path] = array if order is None else array.transpose(np.argsort(order))
    flat |= {f"{path}/whole": array for path, array in saved.items()}
    dora = bool(config.get("use_dora"))
    section = AdapterSection(
        type="dora" if dora else "lora",
        rank=max((how.rank for how in adapters.values()), default=1),
        rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
    )
    chosen = {path: next(one for one in uses[path] if isinstance(one, Use)) for path in adapters}
    return Adapter(section, model.abstract, chosen, adapters, tuple(saved)), unflatten_dict(flat, sep="/")


def merged_with(directory: Path, model: Any, params: Params) -> Params:
    """The parameters of a model merged with an adapter that PEFT wrote, where they live.

    Raises:
        ModelError: as `read_peft`; or the model is a plugin's own.
    """
    if isinstance(model, ModuleModel):
        raise ModelError(str(directory), "PEFT knows no modules of a plugin", "load the run itself")
    adapter, own = read_peft(directory, model)
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.jit(adapter.merged, out_shardings=places)(params, own)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Array]], dict[str, Array]]:
    """The config, the tensors of each module by kind, and those of modules that are saved whole."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        remedy = f"give a directory with {CONFIG} and {WEIGHTS}, as PEFT and redco export --adapter write them"
        raise ModelError(str(directory), f"holds no adapter that can be read: {error}", remedy) from error
    kind = config.get("peft_type") if isinstance(config, Mapping) else None
    strange = [name for name in _UNREAD if isinstance(config, Mapping) and config.get(name)]
    began = str(config.get("init_lora_weights", "")).lower() if isinstance(config, Mapping) else ""
    if began.startswith(_OTHER_BASE):
        strange.append(f"init_lora_weights {began}, which changes the model itself,")
    if kind != "LORA" or strange or config.get("bias", "none") != "none":
        what = f"peft_type {kind}" if kind != "LORA" else ", ".join(strange) or f"bias {config['bias']}"
        raise ModelError(str(directory / CONFIG), f"{what} is not read", "merge it with PEFT, and load the result")
    modules: dict[str, dict[str, Array]] = {}
    rest = {}
    for name, array in tensors.items():
        suffix = next((one for one in sorted(_KINDS, key=len, reverse=True) if name.endswith(one)), None)
        if suffix is None:
            rest[name.removeprefix(PREFIX)] = np.asarray(array, np.float32)
        else:
            module = name.removeprefix(PREFIX).removesuffix(suffix)
            found = modules.setdefault(module, {})
            found[_KINDS[suffix]] = np.asarray(array, np.float32)
            if suffix.startswith(".lora_embedding"):
                found["lookup"] = np.zeros(0)
    return dict(config), modules, rest


Place = tuple[Row | None, tuple[str, ...], tuple[int, ...]]
"""A row of the decoder's table, None for a Flax class; our weights that a module holds; and which layer of them."""


def _places(model: Any) -> dict[str, Place]:
    """Name of a PyTorch module to where its weight is kept."""
    if isinstance(model, DecoderModel):
        return {
            name.removesuffix(".weight"): (row, tuple("/".join(path) for path in row.paths), index)
            for row in tensor_table(model.decoder)
            for index, name in row.tensors()
            if name.endswith(".weight")
        }
    flat = flatten_dict(model.abstract)
    return {
        torch_name(path, 2)[0].removesuffix(".weight"): (None, ("/".join(path),), ())
        for path, leaf in flat.items()
        if len(leaf.shape) == 2
    }


def _whole_parameters(model: Any) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """PyTorch's name of each parameter of a Flax class to its path, and the order of its dims there."""
    if isinstance(model, DecoderModel):
        return {}
    found = {}
    for path, leaf in flatten_dict(model.abstract).items():
        name, order = torch_name(path, len(leaf.shape))
        found[name] = ("/".join(path), order)
    return found


def _known(name: str, places: Mapping[str, Place]) -> str | None:
    """The full name of a module; one of a model without its head lacks the first word."""
    return name if name in places else next((one for one in places if one.partition(".")[2] == name), None)


def _scale(name: str, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> float:
    rank = tensors["A"].shape[0] if "A" in tensors else config["r"]
    patterns = config.get("alpha_pattern") or {}
    alpha = next(
        (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), config["lora_alpha"]
    )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _parts(row: Row | None, tensors: Mapping[str, Array], scale: float, directory: Path) -> list[_Part]:
    """The adapters of our weights that a module holds."""
    if "A" not in tensors or "B" not in tensors:
        raise ModelError(str(directory / WEIGHTS), "a module has lora_A or lora_B alone", "write the adapter again")
    a, magnitude = tensors["A"].T, tensors.get("magnitude")
    if "lookup" in tensors or row is None:
        return [_Part(a, tensors["B"].T, magnitude, scale)]
    ups = _apart(row, tensors["B"])
    magnitudes = [None] * len(ups) if magnitude is None else [one[0] for one in _apart(row, magnitude.reshape(-1, 1))]
    return [_Part(a, up, one, scale) for up, one in zip(ups, magnitudes, strict=True)]


def _apart(row: Row, out_first: Array) -> tuple[Array, ...]:
    """[out of all, r] as the slices [r, out] that it holds."""
    return row.take_apart(out_first if row.transposed else out_first.T)


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
        raise ModelError(str(directory), problem, "merge it with PEFT, and load the result")
    for index, part in by_index.items():
        own = part.a.shape[1]
        if part.a.shape[0] != use.inputs or part.b.shape[-1] != use.outputs:
            problem = f"A {list(part.a.T.shape)} and B {list(part.b.T.shape)} do not fit {use.inputs} to {use.outputs}"
            raise ModelError(str(directory / WEIGHTS), problem, "give the model that it was trained for")
        arrays["A"][index][:, :own] = part.a
        arrays["B"][index][:own] = part.b * (part.scale / scale)
        if part.magnitude is not None:
            arrays["magnitude"][index] = part.magnitude
    return LowRank(rank, scale), arrays
