"""OLMo 3: OLMo 2 with a window in most layers; stretched rotary positions are for the layers without one."""

from __future__ import annotations

from redco_cli.models.decoder.config import Rope
from redco_cli.models.families.olmo2 import OUTPUT_NORM_NAMES, read_olmo2
from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import ATTENTION_NAMES, MLP_NAMES, TINY, layer_windows, llama_names
from redco_cli.models.families.shared.settings import Settings


def _olmo3(s: Settings) -> Options:
    options = read_olmo2(s)
    options |= layer_windows(s, options["layers"])
    (everywhere,) = options["ropes"]
    nearby = Rope(theta=everywhere.theta, dims=everywhere.dims)
    kinds = tuple(0 if window is None else 1 for window in options["windows"])
    return options | {"ropes": (everywhere, nearby), "layer_ropes": kinds}


FAMILIES = (
    Family(
        model_type="olmo3",
        read=_olmo3,
        names=llama_names(ATTENTION_NAMES, MLP_NAMES, OUTPUT_NORM_NAMES),
        example={
            **TINY,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2079441541679836,
                "original_max_position_embeddings": 8,
            },
        },
        variants=({"attention_bias": True, "rope_scaling": None, "rope_theta": 500.0},),
    ),
)
