"""gpt-oss: experts with biases and a clamped SwiGLU, attention that may look at nothing, windows in every other layer.

Published checkpoints have their experts in MXFP4, which is read as bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.families.shared.family import Family, Fused, Options
from redco_cli.models.families.shared.lineage import (
    ATTENTION_NAMES,
    PRE_NORM_NAMES,
    ROUTER_LOSS,
    TINY,
    attention_bias,
    experts,
    layer_windows,
    llama_like,
    llama_names,
)
from redco_cli.models.families.shared.settings import Settings, named

_EXPERT_NAMES = {
    "attention/sinks": "self_attn.sinks",
    "experts/router": "mlp.router",
    "experts/down": "mlp.experts.down_proj",
    "experts/down_bias": "mlp.experts.down_proj_bias",
}


def _gate_beside_up(c: DecoderConfig) -> Fused:
    """Of each output the gate, then the other projection."""
    assert c.experts is not None
    return Fused(("layers/experts/gate", "layers/experts/up"), c.experts.width, (1, 1), 1)


def _biases_beside(c: DecoderConfig) -> Fused:
    return replace(_gate_beside_up(c), modules=("layers/experts/gate_bias", "layers/experts/up_bias"))


_NAMES = replace(
    llama_names(
        ATTENTION_NAMES,
        PRE_NORM_NAMES,
        _EXPERT_NAMES,
        fused={"mlp.experts.gate_up_proj": _gate_beside_up, "mlp.experts.gate_up_proj_bias": _biases_beside},
    ),
    bare=named(
        """
        layers/attention/sinks layers/experts/gate layers/experts/up layers/experts/down
        layers/experts/gate_bias layers/experts/up_bias layers/experts/down_bias
        """
    ),
)


def _gpt_oss(s: Settings) -> Options:
    s.only("swiglu_limit", 7.0, instead="transformers clamps at 7 whatever it says")
    options = llama_like(s) | attention_bias(s) | {"attention_sinks": True}
    options |= layer_windows(s, options["layers"])
    chosen = experts(s, "num_local_experts", "intermediate_size", normalise=True)["experts"]
    return options | {"experts": replace(chosen, biases=True, clamped_at=7.0)}


FAMILIES = (
    Family(
        model_type="gpt_oss",
        read=_gpt_oss,
        irrelevant=ROUTER_LOSS,
        names=_NAMES,
        packed=frozenset({"mxfp4"}),
        example={
            **TINY,
            "head_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
        },
        variants=({"rope_scaling": None, "num_experts_per_tok": 1, "tie_word_embeddings": True},),
    ),
)
