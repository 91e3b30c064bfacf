"""GPT-NeoX and Pythia: attention and MLP beside each other behind a norm each, each head's projections fused."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Names, Options, RopeKeys, in_layers, qkv_by_head
from redco_cli.models.families.shared.gpt import gpt_sizes
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings, named

NAMES = Names(
    modules={
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        **in_layers(
            "gpt_neox.layers",
            {
                "attention/o": "attention.dense",
                "attention_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
                "mlp/up": "mlp.dense_h_to_4h",
                "mlp/down": "mlp.dense_4h_to_h",
            },
        ),
    },
    base="gpt_neox",
    fused={"gpt_neox.layers.{layer}.attention.query_key_value": qkv_by_head},
)


def _gpt_neox(s: Settings) -> Options:
    options = gpt_sizes(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
    bias = bool(s("attention_bias"))
    dropout = s.number("hidden_dropout", 0.0)
    return options | {
        "mlp_width": s.size("intermediate_size"),
        "norm_eps": s.number("layer_norm_eps"),
        "parallel": "two_norms" if s("use_parallel_residual") else "no",
        "ropes": (read_rope(s, options["head_dim"], partial=True),),
        "layer_ropes": (0,) * options["layers"],
        "activation": s("hidden_act"),
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_dropout": dropout,
        "residual_dropout": dropout,
        "attention_dropout": s.number("attention_dropout", 0.0),
    }


FAMILIES = (
    Family(
        model_type="gpt_neox",
        read=_gpt_neox,
        irrelevant=named("rotary_pct rotary_emb_base"),
        names=NAMES,
        rope_keys=RopeKeys(aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}),
        example={
            "vocab_size": 64,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "intermediate_size": 32,
            "rotary_pct": 0.5,
        },
        variants=(
            {"use_parallel_residual": False, "rotary_emb_base": 300.0, "attention_bias": False},
            {"rotary_pct": 1.0, "tie_word_embeddings": True},
        ),
    ),
)
