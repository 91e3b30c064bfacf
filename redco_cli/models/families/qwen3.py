"""Qwen3: Llama with a norm on each head's queries and keys. Qwen3-MoE: with experts for MLPs."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import (
    ATTENTION_NAMES,
    MLP_NAMES,
    PRE_NORM_NAMES,
    QWEN_EXPERT_NAMES,
    ROUTER_LOSS,
    TINY,
    TINY_EXPERTS,
    WINDOW_SWITCHES,
    attention_bias,
    dense_among_experts,
    experts,
    layer_windows,
    llama_like,
    llama_names,
    one_window,
)
from redco_cli.models.families.shared.settings import Settings


def _qwen3(s: Settings) -> Options:
    options = llama_like(s)
    return options | layer_windows(s, options["layers"]) | attention_bias(s) | {"qk_norm": "head"}


def _qwen3_moe(s: Settings) -> Options:
    options = llama_like(s) | attention_bias(s) | {"qk_norm": "head"}
    options |= one_window(s, options["layers"])
    options |= experts(s, "num_experts", "moe_intermediate_size", normalise=bool(s("norm_topk_prob")))
    return dense_among_experts(s, options)


FAMILIES = (
    Family(
        model_type="qwen3",
        read=_qwen3,
        irrelevant=WINDOW_SWITCHES,
        names=llama_names(),
        example={**TINY, "head_dim": 8},
        variants=({"attention_bias": True},),
    ),
    Family(
        model_type="qwen3_moe",
        read=_qwen3_moe,
        irrelevant=ROUTER_LOSS | {"use_sliding_window"},
        names=llama_names(ATTENTION_NAMES, PRE_NORM_NAMES, MLP_NAMES, QWEN_EXPERT_NAMES),
        example={**TINY, **TINY_EXPERTS, "head_dim": 8},
        variants=(
            {
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "use_sliding_window": True,
                "sliding_window": 4,
            },
            {"mlp_only_layers": [0], "num_hidden_layers": 3},
        ),
        unnamed_settings={"head_dim": 128},
    ),
)
