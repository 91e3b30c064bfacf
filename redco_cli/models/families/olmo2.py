"""OLMo 2: norms on what attention and MLP add instead of before them, and on queries and keys over all heads."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options, RopeKeys
from redco_cli.models.families.shared.lineage import (
    ATTENTION_NAMES,
    MLP_NAMES,
    TINY,
    attention_bias,
    llama_like,
    llama_names,
)
from redco_cli.models.families.shared.settings import Settings

OUTPUT_NORM_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def read_olmo2(s: Settings) -> Options:
    """One norm for the queries of all heads, and one for their keys."""
    return llama_like(s) | attention_bias(s) | {"norm_place": "output", "qk_norm": "all_heads"}


FAMILIES = (
    Family(
        model_type="olmo2",
        read=read_olmo2,
        names=llama_names(ATTENTION_NAMES, MLP_NAMES, OUTPUT_NORM_NAMES),
        rope_keys=RopeKeys(kind="type"),
        example=TINY,
        variants=({"attention_bias": True},),
    ),
)
