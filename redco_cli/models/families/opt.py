"""OPT: learned positions that count real tokens only, norms before or after; OPT-350m has a narrower embedding."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Names, Options, in_layers
from redco_cli.models.families.shared.gpt import gpt_sizes
from redco_cli.models.families.shared.settings import Settings

NAMES = Names(
    modules={
        "embedding": "model.decoder.embed_tokens",
        "position_embedding": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        **in_layers(
            "model.decoder.layers",
            {
                "attention/q": "self_attn.q_proj",
                "attention/k": "self_attn.k_proj",
                "attention/v": "self_attn.v_proj",
                "attention/o": "self_attn.out_proj",
                "attention_norm": "self_attn_layer_norm",
                "mlp_norm": "final_layer_norm",
                "mlp/up": "fc1",
                "mlp/down": "fc2",
            },
        ),
    },
    base="model",
)


def _opt(s: Settings) -> Options:
    options = gpt_sizes(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
    s.only("layer_norm_elementwise_affine", True, instead="norms have scales and biases")
    s.only("layerdrop", 0.0, instead="no layer is left out in training")
    first, bias, unfinished = (bool(s(k)) for k in ("do_layer_norm_before", "enable_bias", "_remove_final_layer_norm"))
    return options | {
        "padding_id": s.padding_id(options["vocab_size"]),
        "embedding_size": s.size("word_embed_proj_dim"),
        "mlp_width": s.size("ffn_dim"),
        "norm_eps": 1e-5,
        "norm_place": "pre" if first else "post",
        "final_norm": first and not unfinished,
        "learned_positions": s.size("max_position_embeddings"),
        "position_offset": 2,
        "positions_skip_padding": True,
        "activation": s("activation_function"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "attention_dropout": s.number("attention_dropout", 0.0),
        "residual_dropout": s.number("dropout", 0.0),
        "initializer_range": s.number("init_std", 0.02),
    }


FAMILIES = (
    Family(
        model_type="opt",
        restarts_separate=False,
        read=_opt,
        names=NAMES,
        example={
            "vocab_size": 64,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "ffn_dim": 32,
            "max_position_embeddings": 40,
        },
        variants=(
            {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
            {"enable_bias": False},
            {"_remove_final_layer_norm": True, "tie_word_embeddings": False},
            {"_remove_final_layer_norm": True, "do_layer_norm_before": False},
        ),
        flax_honours="layerdrop",
    ),
)
