"""The two files of an adapter that PEFT wrote, `adapter_config.json` and `adapter_model.safetensors`, checked.

What diffusers wrote in one file is checked likewise: it has the same in it, in other words.
What is wrong with them is found here, with its place, before anything is made of them. Keys of the config that nobody
here knows are left alone, as PEFT leaves them. (Layout: peft 0.21, `utils/save_and_load.py`.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from redco_cli.adapters import diffusers
from redco_cli.errors import ModelError
from redco_cli.recipe.load import shown

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
_AGAIN = "correct it, or write the adapter again"
_MERGE = "merge it with PEFT, and load the result"


@dataclass(frozen=True)
class PeftFiles:
    """What the files hold.

    Attributes:
        config: of the adapter.
        modules: name of a PyTorch module to its factors `A` [r, in], `B` [out, r] and perhaps `magnitude` [out];
            `lookup`, empty, marks a table of which rows are looked up.
        rest: other tensors by name: those of modules that are saved whole. All are float32.
        place: of the tensors, for errors.
    """

    config: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Array]]
    rest: dict[str, Array]
    place: str

    def scale(self, name: str) -> float:
        """What the path of a module is multiplied by."""
        rank, alpha = len(self.modules[name]["A"]), float(self.config["lora_alpha"])
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                alpha = float(value)
                break
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def config_file(directory: Path) -> Path | None:
    """The file in a directory that says what its adapter is, PEFT's or else diffusers'; None where neither is."""
    files = (directory / CONFIG, directory / diffusers.FILE)
    return next((file for file in files if file.is_file()), None)


def read_files(directory: Path) -> PeftFiles:
    """The files in a directory.

    Raises:
        ModelError: they are missing, damaged, contradict each other, or are of a kind that is not read.
    """
    said = config_file(directory) or directory / CONFIG
    weights = directory / (WEIGHTS if said.name == CONFIG else said.name)
    try:
        config, tensors = (
            (json.loads(said.read_text(encoding="utf-8")), load_file(weights))
            if said.name == CONFIG
            else diffusers.read_lora(said)
        )
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        remedy = (
            f"give a directory with {CONFIG} and {WEIGHTS}, as PEFT and redco export --adapter write them, or for a "
            f"U-Net with {diffusers.FILE}, as diffusers does"
        )
        raise ModelError(shown(directory), f"holds no adapter that can be read: {error}", remedy) from error
    _check_kind(config, shown(said))
    _check_numbers(config, shown(said))
    modules: dict[str, dict[str, Array]] = {}
    rest = {}
    for name, stored in tensors.items():
        array = np.asarray(stored, np.float32)
        if not np.isfinite(array).all():
            raise ModelError(shown(weights), f"{name} is not finite", "take an earlier one")
        suffix = next((one for one in sorted(_KINDS, key=len, reverse=True) if name.endswith(one)), None)
        if suffix is None:
            rest[name.removeprefix(PREFIX)] = array
            continue
        found = modules.setdefault(name.removeprefix(PREFIX).removesuffix(suffix), {})
        is_pixel = array.ndim == 4 and array.shape[2:] == (1, 1)  # of a convolution that is a matrix over channels
        found[_KINDS[suffix]] = array[:, :, 0, 0] if is_pixel and _KINDS[suffix] in "AB" else array
        if suffix.startswith(".lora_embedding"):
            found["lookup"] = np.zeros(0)
    for name, found in modules.items():
        _check_factors(name, found, shown(weights))
    return PeftFiles(config, modules, rest, shown(weights))


def _check_kind(config: Any, place: str) -> None:
    """Refuses what is no LoRA, and what changes more than its own weights."""
    known: Mapping[str, Any] = config if isinstance(config, dict) else {}
    kind, strange = known.get("peft_type"), [name for name in _UNREAD if known.get(name)]
    began = str(known.get("init_lora_weights", "")).lower()
    if began.startswith(_OTHER_BASE):
        strange.append(f"init_lora_weights {began}, which changes the model itself,")
    if kind != "LORA" or strange or known.get("bias", "none") != "none":
        what = f"peft_type {kind}" if kind != "LORA" else ", ".join(strange) or f"bias {known['bias']}"
        raise ModelError(place, f"{what} is not read", _MERGE)


def _check_numbers(config: Mapping[str, Any], place: str) -> None:
    """Refuses ranks and alphas that are none."""
    patterns = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, values in patterns.items():
        if not isinstance(values, dict):
            raise ModelError(place, f"{name} is {values!r:.40}, which is no mapping", _AGAIN)
        for pattern in values:
            try:
                re.compile(pattern)
            except re.error as error:
                problem = f"{name} has {pattern!r}, which is no regular expression: {error}"
                raise ModelError(place, problem, _AGAIN) from None
    numbers = {name: config.get(name) for name in ("r", "lora_alpha")}
    numbers |= {f"{name} of {pattern}": one for name, values in patterns.items() for pattern, one in values.items()}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(place, f"{name} is {value!r:.40}, which is no positive number", _AGAIN)


def _check_factors(name: str, found: Mapping[str, Array], place: str) -> None:
    """Refuses factors that do not belong together."""
    if "A" not in found or "B" not in found:
        raise ModelError(place, f"{name} has lora_A or lora_B alone", _AGAIN)
    for kind in ("A", "B"):
        if found[kind].ndim != 2:
            problem = f"lora_{kind} of {name} has the shape {list(found[kind].shape)}, and is no matrix"
            raise ModelError(place, problem, _MERGE)
    if len(found["A"]) != found["B"].shape[1] or not len(found["A"]):
        shapes = " and ".join(f"lora_{kind} {list(found[kind].shape)}" for kind in ("A", "B"))
        raise ModelError(place, f"{name} has {shapes}, which have no rank in common", _AGAIN)
    if "magnitude" in found and found["magnitude"].size != len(found["B"]):
        problem = f"{name} has {found['magnitude'].size} magnitudes for {len(found['B'])} outputs"
        raise ModelError(place, problem, _AGAIN)
