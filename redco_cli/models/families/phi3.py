"""Phi-3: Llama with fused projections, and rotary positions of some dims that change with the length of a text."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options, RopeKeys, gate_then_up, qkv_by_kind
from redco_cli.models.families.shared.lineage import TINY, TINY_IDS, llama_like, llama_names, one_window
from redco_cli.models.families.shared.settings import Settings


def _phi3(s: Settings) -> Options:
    options = llama_like(s, partial_rope=True)
    return (
        options
        | one_window(s, options["layers"])
        | {"residual_dropout": s.number("resid_pdrop"), "rereads_long_texts": True}
    )


_LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}

FAMILIES = (
    Family(
        model_type="phi3",
        read=_phi3,
        names=llama_names(fused={"self_attn.qkv_proj": qkv_by_kind, "mlp.gate_up_proj": gate_then_up}),
        rope_keys=RopeKeys(kind="type"),
        example={**TINY, **TINY_IDS},
        variants=(
            {"partial_rotary_factor": 0.5, "sliding_window": 4, "hidden_size": 48},
            {"original_max_position_embeddings": 8, "rope_scaling": _LONGROPE},
            {"original_max_position_embeddings": 32, "rope_scaling": _LONGROPE},
        ),
    ),
)
