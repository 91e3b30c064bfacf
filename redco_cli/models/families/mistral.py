"""Mistral: Llama with one sliding window for all layers. Mixtral: with experts for MLPs."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import (
    ATTENTION_NAMES,
    PRE_NORM_NAMES,
    ROUTER_LOSS,
    TINY,
    experts,
    llama_like,
    llama_names,
    one_window,
)
from redco_cli.models.families.shared.settings import Settings

MIXTRAL_EXPERT_NAMES = {
    "experts/router": "block_sparse_moe.gate",
    "experts/gate": "block_sparse_moe.experts.{expert}.w1",
    "experts/up": "block_sparse_moe.experts.{expert}.w3",
    "experts/down": "block_sparse_moe.experts.{expert}.w2",
}


def _mistral(s: Settings) -> Options:
    options = llama_like(s)
    return options | one_window(s, options["layers"])


def _mixtral(s: Settings) -> Options:
    return _mistral(s) | experts(s, "num_local_experts", "intermediate_size", normalise=True)


FAMILIES = (
    Family(
        model_type="mistral",
        read=_mistral,
        names=llama_names(),
        example={**TINY, "sliding_window": 4},
        variants=({"sliding_window": None, "head_dim": 8}, {"rope_theta": 500.0}),
    ),
    Family(
        model_type="mixtral",
        read=_mixtral,
        irrelevant=ROUTER_LOSS,
        names=llama_names(ATTENTION_NAMES, PRE_NORM_NAMES, MIXTRAL_EXPERT_NAMES),
        example={**TINY, "num_local_experts": 4},
        variants=({"sliding_window": 5, "num_experts_per_tok": 1},),
    ),
)
