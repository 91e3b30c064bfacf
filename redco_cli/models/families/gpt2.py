"""GPT-2: learned positions, and kernels stored [in, out] with queries, keys and values in one."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Names, Options, in_layers, qkv_by_kind
from redco_cli.models.families.shared.gpt import TINY, gpt_dropouts, gpt_sizes
from redco_cli.models.families.shared.settings import Settings, named

NAMES = Names(
    modules={
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        **in_layers(
            "transformer.h",
            {
                "attention/o": "attn.c_proj",
                "attention_norm": "ln_1",
                "mlp_norm": "ln_2",
                "mlp/up": "mlp.c_fc",
                "mlp/down": "mlp.c_proj",
            },
        ),
    },
    base="transformer",
    fused={"transformer.h.{layer}.attn.c_attn": qkv_by_kind},
    out_last=True,
)


def _gpt2(s: Settings) -> Options:
    options = gpt_sizes(s, "n_embd", "n_layer", "n_head")
    s.only("add_cross_attention", False, instead="it has no encoder to look at")
    scales = tuple(1.0 / (index + 1) for index in range(options["layers"]))
    return (
        options
        | gpt_dropouts(s)
        | {
            "mlp_width": s.size("n_inner", 4 * options["hidden_size"]),
            "norm_eps": s.number("layer_norm_epsilon"),
            "learned_positions": s.size("n_positions"),
            "activation": s("activation_function"),
            "attention_scale": options["attention_scale"] if s("scale_attn_weights") else 1.0,
            "layer_scales": scales if s("scale_attn_by_inverse_layer_idx") else (),
            "scaled_output_init": True,
        }
    )


FAMILIES = (
    Family(
        model_type="gpt2",
        read=_gpt2,
        irrelevant=named(
            "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
            "summary_last_dropout hidden_dropout reorder_and_upcast_attn"
        ),
        names=NAMES,
        example=TINY,
        variants=(
            {"scale_attn_by_inverse_layer_idx": True},
            {"scale_attn_weights": False, "n_inner": 20, "activation_function": "relu"},
            {"tie_word_embeddings": False},
        ),
        flax_honours="add_cross_attention",
    ),
)
