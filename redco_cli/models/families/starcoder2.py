"""StarCoder2: LayerNorm and a plain MLP, with the sizes, positions and windows of Mistral."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import (
    ATTENTION_NAMES,
    PRE_NORM_NAMES,
    TINY,
    llama_names,
    one_window,
    sizes,
)
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings

PLAIN_MLP_NAMES = {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}


def _starcoder2(s: Settings) -> Options:
    options, bias = sizes(s), bool(s("use_bias"))
    return (
        options
        | one_window(s, options["layers"])
        | {
            "mlp_width": s.size("intermediate_size"),
            "norm": "layer",
            "norm_eps": s.number("norm_epsilon"),
            "ropes": (read_rope(s, options["head_dim"]),),
            "layer_ropes": (0,) * options["layers"],
            "activation": s("hidden_act"),
            "gated": False,
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": bias,
            "embedding_dropout": s.number("embedding_dropout", 0.0),
            "attention_dropout": s.number("attention_dropout", 0.0),
            "residual_dropout": s.number("residual_dropout", 0.0),
        }
    )


FAMILIES = (
    Family(
        model_type="starcoder2",
        read=_starcoder2,
        names=llama_names(ATTENTION_NAMES, PRE_NORM_NAMES, PLAIN_MLP_NAMES),
        example=TINY,
        variants=({"use_bias": False, "sliding_window": 3, "tie_word_embeddings": False},),
    ),
)
