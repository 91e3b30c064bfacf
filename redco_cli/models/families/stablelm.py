"""StableLM: LayerNorm with a gated MLP, some dims of a head turn, attention and MLP in parallel by choice."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import TINY, llama_names, sizes
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings


def _stablelm(s: Settings) -> Options:
    options = sizes(s)
    s.only("qk_layernorm", False, instead="queries and keys have no norms of their own in each head")
    s.only("hidden_dropout", 0.0, instead="what attention adds would be dropped too")
    return options | {
        "mlp_width": s.size("intermediate_size"),
        "norm": "layer",
        "norm_eps": s.number("layer_norm_eps"),
        "parallel": "one_norm" if s("use_parallel_residual") else "no",
        "ropes": (read_rope(s, options["head_dim"], partial=True),),
        "layer_ropes": (0,) * options["layers"],
        "activation": s("hidden_act"),
        "qkv_bias": bool(s("use_qkv_bias")),
        "attention_dropout": s.number("attention_dropout", 0.0),
    }


FAMILIES = (
    Family(
        model_type="stablelm",
        restarts_separate=False,
        read=_stablelm,
        names=llama_names(),
        example={**TINY, "partial_rotary_factor": 0.5},
        variants=(
            {"use_parallel_residual": True, "use_qkv_bias": True, "rope_theta": 500.0},
            {"partial_rotary_factor": 1.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ),
)
