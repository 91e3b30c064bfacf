"""BLOOM: ALiBi instead of positions, a norm right after the embedding."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Names, Options, in_layers, qkv_by_head
from redco_cli.models.families.shared.gpt import BLOOM_LAYER_NAMES, BLOOM_QKV, BLOOM_TOP_NAMES, gpt_sizes
from redco_cli.models.families.shared.settings import Settings, named


def _bloom(s: Settings) -> Options:
    options = gpt_sizes(s, "hidden_size", "n_layer", "n_head")
    s.only("apply_residual_connection_post_layernorm", False, instead="residuals are taken before the norms")
    if s("pretraining_tp", 1) != 1:
        s.only("slow_but_exact", False, instead="biases are added, which transformers then leaves out")
    return options | {
        "mlp_width": 4 * options["hidden_size"],
        "norm_eps": s.number("layer_norm_epsilon"),
        "embedding_norm": True,
        "alibi": True,
        "activation": "gelu_new",
        "attention_dropout": s.number("attention_dropout", 0.0),
        "residual_dropout": s.number("hidden_dropout", 0.0),
    }


FAMILIES = (
    Family(
        model_type="bloom",
        restarts_separate=False,
        read=_bloom,
        irrelevant=named("slow_but_exact n_embed"),
        names=Names(
            BLOOM_TOP_NAMES | in_layers("transformer.h", BLOOM_LAYER_NAMES), "transformer", {BLOOM_QKV: qkv_by_head}
        ),
        example={"vocab_size": 64, "hidden_size": 24, "n_layer": 2, "n_head": 6},
        variants=({"n_head": 4},),
        flax_honours="apply_residual_connection_post_layernorm",
    ),
)
