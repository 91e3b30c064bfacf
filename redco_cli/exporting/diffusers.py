"""An adapter of a U-Net as diffusers writes it: `pytorch_lora_weights.safetensors`.

Tensors have PEFT's names behind `unet.`; a convolution of one pixel has factors with two more dims of size 1. What
PEFT keeps in `adapter_config.json` is in the header of the file, as `lora_adapter_metadata`. (Layout: diffusers 0.39,
`StableDiffusionPipeline.save_lora_weights` and `loaders/lora_base.py`.)
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from redco_cli.adapters.diffusers import FILE, METADATA, OF_UNET
from redco_cli.adapters.model import Adapter
from redco_cli.errors import ModelError
from redco_cli.exporting.adapted_modules import Factors, Module, joined_factors, lora_config, module_of
from redco_cli.models.diffusion.model import UNetModel
from redco_cli.models.diffusion.naming import Entry
from redco_cli.models.weights.diffusion import named_entries
from redco_cli.models.weights.files import Array
from redco_cli.plugin.contract import Params

STEM = Path(FILE).stem
"""The name of the file without its ending."""
_MAGNITUDE = ".lora_magnitude_vector"


def lora_file(adapter: Adapter, own: Params, model: UNetModel) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors of the file by name, and what its header says. With several processes all must call it.

    Args:
        adapter: which weights are adapted.
        own: its parameters.
        model: the U-Net.

    Raises:
        ModelError: diffusers has no form for it.
    """
    if adapter.saved:
        problem = (
            f"{', '.join(adapter.saved)} would be trained itself, for which diffusers' file of an adapter has no place"
        )
        raise ModelError("adapter.modules_to_save", problem, "merge it: redco export without --adapter")
    factors = joined_factors(adapter, own)
    modules = [
        _module_of(adapter, factors, entry)
        for entry, _ in named_entries(model, None)
        if any("/".join(path) in adapter.adapters for path in entry.paths)
    ]
    tensors = {f"{OF_UNET}{one.name}{suffix}": array for one in modules for suffix, array in one.tensors.items()}
    # in full: the last word of `to_out.0` is that of modules without weights, too
    config = {**lora_config(adapter, modules), "target_modules": sorted(one.name for one in modules)}
    said = json.dumps({f"{OF_UNET}{key}": value for key, value in config.items()}, indent=2, sort_keys=True)
    return tensors, {METADATA: said}


def _module_of(adapter: Adapter, factors: Factors, entry: Entry) -> Module:
    paths = ["/".join(path) for path in entry.paths]
    module = module_of(adapter, factors, paths, (), entry.name.removesuffix(".weight"), partial(_out_first, entry))
    if not entry.pixelwise:
        return module
    tensors = {
        name: array[None, :, None, None] if name == _MAGNITUDE else array[:, :, None, None]
        for name, array in module.tensors.items()
    }
    return Module(module.name, module.rank, module.scale, tensors)


def _out_first(entry: Entry, place: int, part: Array) -> Array:
    """[r, out] of one of our weights where it stands in a tensor: [out of all, r], zero elsewhere."""
    rank, out = part.shape
    whole = np.zeros((len(entry.paths), out, rank), part.dtype)
    whole[place] = part.T
    return whole.reshape(-1, rank)
