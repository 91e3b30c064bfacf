"""The one file of an adapter that diffusers wrote, `pytorch_lora_weights.safetensors`, in the words of PEFT.

    unet.down_blocks.0.attentions.0. ... .attn1.to_q.lora_A.weight      by `save_lora_weights`; `lora_B` likewise
    unet. ... .attn1.to_q.lora.down.weight                              by the scripts of its examples; `up` is B
    unet. ... .attn1.processor.to_q_lora.down.weight                    by scripts older than PEFT
    down_blocks. ... .attn1.to_q.lora_A.weight                          by `save_lora_adapter` of a U-Net alone

PEFT's config is in the header; where there is none, alpha is the rank. (Layout: diffusers 0.39, `loaders/peft.py` and
`utils/state_dict_utils.py`.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16, in which many adapters are saved)
import numpy as np
from safetensors import safe_open

from redco_cli.errors import ModelError
from redco_cli.recipe.load import shown

FILE, METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"
OF_UNET = "unet."
"""What the names of tensors, and of settings, begin with in a file for a whole pipeline."""
Array = np.ndarray[Any, Any]
_KOHYA = ("lora_unet_", "lora_te")
_SAVE_AGAIN = 'load it into a pipeline of diffusers, and save it: pipe.unet.save_lora_adapter("DIR")'


def read_lora(file: Path) -> tuple[Any, dict[str, Array]]:
    """PEFT's config of an adapter, not checked yet, and its tensors by PEFT's names without a prefix.

    Tensors that are not of a U-Net keep their names.

    Args:
        file: of diffusers.

    Raises:
        ModelError: it is one of kohya's scripts, or says nothing of its scales and they cannot be told.
        OSError, ValueError, SafetensorError: it cannot be read.
    """
    with safe_open(file, "numpy") as opened:
        header = opened.metadata() or {}
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no mapping)
    if any(name.startswith(_KOHYA) for name in stored):
        raise ModelError(shown(file), "it has the names of kohya's scripts, which are not read", _SAVE_AGAIN)
    prefix = OF_UNET if any(name.startswith(OF_UNET) for name in stored) else ""
    tensors = {_of_peft(name.removeprefix(prefix)): array for name, array in stored.items()}
    if METADATA not in header:
        return _usual_config(tensors, file), tensors
    said = json.loads(header[METADATA])
    if isinstance(said, dict):
        said = {key.removeprefix(prefix): value for key, value in said.items() if key.startswith(prefix)}
        said = {"peft_type": "LORA", **said}
    return said, tensors


def _of_peft(name: str) -> str:
    """The name that PEFT has for a tensor.

    >>> _of_peft("mid_block.attn1.processor.to_out_lora.down.weight"), _of_peft("mid_block.attn1.to_q.lora.up.weight")
    ('mid_block.attn1.to_out.0.lora_A.weight', 'mid_block.attn1.to_q.lora_B.weight')
    """
    name = name.replace(".processor.", ".").replace(".to_out_lora.", ".to_out.0.lora.")
    name = re.sub(r"\.(to_[qkv])_lora\.", r".\1.lora.", name)
    return name.replace(".lora.down.", ".lora_A.").replace(".lora.up.", ".lora_B.")


def _usual_config(tensors: Mapping[str, Array], file: Path) -> dict[str, Any]:
    """What diffusers takes where a file says nothing."""
    ranks = {len(array) for name, array in tensors.items() if name.endswith(".lora_A.weight")}
    if len(ranks) != 1:
        known = f"ranks {', '.join(map(str, sorted(ranks)))}" if ranks else "no lora_A"
        problem = f"it has {known}, and no {METADATA} that tells their alphas"
        raise ModelError(shown(file), problem, _SAVE_AGAIN)
    (rank,) = ranks
    dora = any("lora_magnitude_vector" in name for name in tensors)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora}
