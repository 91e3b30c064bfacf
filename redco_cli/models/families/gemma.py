"""Gemma 1 to 3 (text): scaled embeddings; from Gemma 2 on norms on both sides of attention and MLP, and windows.

Norm scales are stored less one. In Gemma 3 the layers with a window have rotary positions of their own.
"""

from __future__ import annotations

from dataclasses import replace

from redco_cli.models.decoder.config import Rope
from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import (
    ATTENTION_NAMES,
    MLP_NAMES,
    TINY,
    attention_bias,
    layer_windows,
    llama_like,
    llama_names,
)
from redco_cli.models.families.shared.settings import Settings, named

SANDWICH_NAMES = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def _gemma(s: Settings) -> Options:
    options = llama_like(s)
    scale = options["hidden_size"] ** 0.5
    return options | attention_bias(s) | {"norm": "rms_plus_one", "embedding_scale": scale}


def _gemma2(s: Settings) -> Options:
    options = _gemma(s)
    return (
        options
        | layer_windows(s, options["layers"])
        | {
            "norm_place": "sandwich",
            "activation": s("hidden_activation"),
            "attention_scale": s.positive("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": s.maybe_positive("attn_logit_softcapping"),
            "logits_softcap": s.maybe_positive("final_logit_softcapping"),
        }
    )


def _gemma3(s: Settings) -> Options:
    s.only("use_bidirectional_attention", False, instead="a token sees only what is before it")
    s.only("attn_logit_softcapping", instead="transformers does not apply it either")
    options = _gemma2(s)
    everywhere = options["ropes"][0]
    nearby = Rope(theta=s.positive("rope_local_base_freq"), dims=everywhere.dims)
    kinds = tuple(0 if window is None else 1 for window in options["windows"])
    return options | {"ropes": (everywhere, nearby), "layer_ropes": kinds, "qk_norm": "head"}


_TINY = {**TINY, "head_dim": 8}
_TINY_WINDOWS = {**_TINY, "sliding_window": 4, "query_pre_attn_scalar": 5}

_WITHIN = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
)
"""In checkpoints with images: as published, and as transformers has it in memory since 4.52."""

FAMILIES = (
    Family(
        model_type="gemma",
        read=_gemma,
        names=llama_names(),
        example=_TINY,
        variants=({"hidden_act": "gelu", "tie_word_embeddings": False},),
    ),
    Family(
        model_type="gemma2",
        read=_gemma2,
        names=llama_names(ATTENTION_NAMES, SANDWICH_NAMES, MLP_NAMES),
        example={**_TINY_WINDOWS, "num_hidden_layers": 3},
        variants=(
            {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
            {"attention_bias": True, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        ),
    ),
    Family(
        model_type="gemma3_text",
        read=_gemma3,
        irrelevant=named("sliding_window_pattern _sliding_window_pattern"),
        names=replace(llama_names(ATTENTION_NAMES, SANDWICH_NAMES, MLP_NAMES), within=_WITHIN),
        part_of={"gemma3": "text_config"},
        example={**_TINY_WINDOWS, "sliding_window_pattern": 2},
        variants=(
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 50.0},
            {"final_logit_softcapping": 3.0},
        ),
    ),
)
