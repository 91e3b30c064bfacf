"""Qwen2 and 2.5: Llama with biases on queries, keys and values. Qwen2-MoE: experts, and one that all tokens go to."""

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
    dense_among_experts,
    experts,
    layer_windows,
    llama_like,
    llama_names,
    one_window,
)
from redco_cli.models.families.shared.settings import Settings

SHARED_EXPERT_NAMES = {
    "experts/shared/gate": "mlp.shared_expert.gate_proj",
    "experts/shared/up": "mlp.shared_expert.up_proj",
    "experts/shared/down": "mlp.shared_expert.down_proj",
    "experts/shared_router": "mlp.shared_expert_gate",
}


def _qwen2(s: Settings) -> Options:
    options = llama_like(s)
    return options | layer_windows(s, options["layers"]) | {"qkv_bias": True}


def _qwen2_moe(s: Settings) -> Options:
    options, shared = llama_like(s), s.size("shared_expert_intermediate_size")
    normalise = bool(s("norm_topk_prob"))
    options |= one_window(s, options["layers"]) | {"qkv_bias": bool(s("qkv_bias"))}
    options |= experts(s, "num_experts", "moe_intermediate_size", normalise=normalise, shared_width=shared)
    return dense_among_experts(s, options)


FAMILIES = (
    Family(
        model_type="qwen2",
        read=_qwen2,
        irrelevant=WINDOW_SWITCHES,
        names=llama_names(),
        example=TINY,
        variants=(
            {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
            {"tie_word_embeddings": True},
        ),
    ),
    Family(
        model_type="qwen2_moe",
        restarts_separate=False,
        read=_qwen2_moe,
        irrelevant=WINDOW_SWITCHES | ROUTER_LOSS,
        names=llama_names(ATTENTION_NAMES, PRE_NORM_NAMES, MLP_NAMES, QWEN_EXPERT_NAMES, SHARED_EXPERT_NAMES),
        example={**TINY, **TINY_EXPERTS, "shared_expert_intermediate_size": 20},
        variants=(
            {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2},
            {"mlp_only_layers": [1], "num_hidden_layers": 3},
        ),
    ),
)
