"""Modules of PyTorch with their adapters, and what PEFT's `LoraConfig` says of them.

A module has the factors `lora_A` [r, in] and `lora_B` [out, r]. Where it holds several of our weights in one (queries,
keys and values), their factors stand side by side: it has as many rows of A as they have together.
(Layout: peft 0.21, `tuners/lora`.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redco_cli.adapters.merging import whole_path
from redco_cli.adapters.model import Adapter
from redco_cli.errors import ModelError
from redco_cli.exporting.tensors import fetched
from redco_cli.models.weights.files import Array
from redco_cli.plugin.contract import Params

Factors = Mapping[str, Mapping[str, Any]]
"""Path of a weight to the parameters of its adapter."""


@dataclass(frozen=True)
class Module:
    """A module of PyTorch with its adapter.

    Attributes:
        name: of the module.
        rank: rows of A.
        scale: by which its path is multiplied.
        tensors: by what stands behind the name of the module.
    """

    name: str
    rank: int
    scale: float
    tensors: dict[str, Array] = field(repr=False)


def joined_factors(adapter: Adapter, own: Params) -> Factors:
    """The factors of each path, with one A and one B, whatever it began with: PEFT adds them to weights as they were.

    Args:
        adapter: which weights are adapted.
        own: its parameters.
    """
    return {path: _joined(one) for path, one in adapter.factors(own).items()}


def _joined(factors: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: array for name, array in factors.items() if not name.startswith("initial_")}
    return {**kept, **dict(zip("AB", whole_path(factors), strict=True))} if "A" in factors else kept


def behind(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors by what stands behind the name of their module."""
    return {f".{name}": np.ascontiguousarray(array) for name, array in tensors.items()}


def module_of(
    adapter: Adapter,
    factors: Factors,
    paths: Sequence[str],
    index: tuple[int, ...],
    name: str,
    out_first: Callable[[int, Array], Array],
) -> Module:
    """The adapters of all weights that a module holds, as one. With several processes all must call it.

    Args:
        adapter: which weights are adapted; one of these at least.
        factors: of each path.
        paths: the weights in the module.
        index: which layer and expert of them.
        name: of the module.
        out_first: the place of a weight among `paths` and [r, out] of it to [out of all, r], zero but for that weight.

    Raises:
        ModelError: DoRA adapts some of the weights, and others have no magnitude.
    """
    adapted = [path for path in paths if path in adapter.adapters]
    scale = adapter.adapters[adapted[0]].scale
    downs, ups, magnitudes = [], [], []
    for place, path in enumerate(paths):
        if path not in adapter.adapters:
            continue
        own = {part: fetched(leaf, index, "float32") for part, leaf in factors[path].items()}
        downs.append(own["A"].T)
        ups.append(out_first(place, own["B"] * (adapter.adapters[path].scale / scale)))
        if "magnitude" in own:
            magnitudes.append(out_first(place, own["magnitude"][None])[:, 0])
    if magnitudes and len(adapted) < len(paths):
        left = ", ".join(path for path in paths if path not in adapted)
        problem = f"PyTorch has {', '.join(paths)} in one, and DoRA has a magnitude for each output, but not for {left}"
        raise ModelError("adapter.targets", problem, "adapt all of them, or merge: redco export --merge")
    tensors = {"lora_A.weight": np.concatenate(downs), "lora_B.weight": np.concatenate(ups, axis=1)}
    if magnitudes:
        tensors["lora_magnitude_vector"] = np.sum(magnitudes, axis=0)
    return Module(name, tensors["lora_A.weight"].shape[0], scale, behind(tensors))


def lora_config(adapter: Adapter, modules: Sequence[Module]) -> dict[str, Any]:
    """What a `LoraConfig` says of modules, but for which these are.

    Args:
        adapter: which weights are adapted.
        modules: that hold them.
    """
    section = adapter.section
    ranks, scales = Counter(one.rank for one in modules), Counter(one.scale for one in modules)
    rank, scale = (counted.most_common(1)[0][0] if counted else 1 for counted in (ranks, scales))

    def alpha(one: Module) -> float:
        return one.scale * (math.sqrt(one.rank) if section.rslora else one.rank)

    usual = scale * (math.sqrt(rank) if section.rslora else rank)
    return {
        "peft_type": "LORA",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(usual),
        "lora_dropout": section.dropout,
        "use_rslora": section.rslora,
        "use_dora": section.type == "dora",
        "bias": "none",
        "rank_pattern": {one.name: one.rank for one in modules if one.rank != rank},
        "alpha_pattern": {one.name: _plain(alpha(one)) for one in modules if not math.isclose(alpha(one), usual)},
        "init_lora_weights": True,
    }


def _plain(value: float) -> float | int:
    """A whole number where it is one."""
    return round(value) if math.isclose(value, round(value)) else value
