"""GPT-J: attention and MLP beside each other behind one norm, rotary positions of neighbouring dims."""

from __future__ import annotations

from redco_cli.models.decoder.config import Rope
from redco_cli.models.families.shared.family import Family, Names, Options, in_layers
from redco_cli.models.families.shared.gpt import TINY, gpt_dropouts, gpt_sizes
from redco_cli.models.families.shared.settings import Settings

NAMES = Names(
    modules={
        "embedding": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "head_bias": "lm_head",
        **in_layers(
            "transformer.h",
            {
                "attention/q": "attn.q_proj",
                "attention/k": "attn.k_proj",
                "attention/v": "attn.v_proj",
                "attention/o": "attn.out_proj",
                "attention_norm": "ln_1",
                "mlp/up": "mlp.fc_in",
                "mlp/down": "mlp.fc_out",
            },
        ),
    },
    base="transformer",
)


def _gptj(s: Settings) -> Options:
    options, turning = gpt_sizes(s, "n_embd", "n_layer", "n_head"), s.size("rotary_dim")
    if turning % 2 or turning > options["head_dim"]:
        s.refuse("rotary_dim", f"{turning} of {options['head_dim']} dims cannot turn in pairs", "correct the config")
    return (
        options
        | gpt_dropouts(s)
        | {
            "mlp_width": s.size("n_inner", 4 * options["hidden_size"]),
            "norm_eps": s.number("layer_norm_epsilon"),
            "parallel": "one_norm",
            "ropes": (Rope(theta=10000.0, dims=turning),),
            "layer_ropes": (0,) * options["layers"],
            "interleaved": True,
            "activation": s("activation_function"),
            "qkv_bias": False,
            "out_bias": False,
            "head_bias": True,
        }
    )


FAMILIES = (
    Family(
        model_type="gptj",
        restarts_separate=False,
        read=_gptj,
        irrelevant=frozenset({"n_positions"}),
        names=NAMES,
        example={**TINY, "rotary_dim": 2},
        variants=({"rotary_dim": 4}, {"tie_word_embeddings": True}),
    ),
)
