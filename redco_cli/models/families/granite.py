"""Granite: Llama with a factor on embeddings, residual branches, attention scores and logits."""

from __future__ import annotations

from redco_cli.models.families.llama import read_llama
from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import TINY, llama_names
from redco_cli.models.families.shared.settings import Settings


def _granite(s: Settings) -> Options:
    return read_llama(s) | {
        "embedding_scale": s.number("embedding_multiplier"),
        "residual_scale": s.number("residual_multiplier"),
        "attention_scale": s.number("attention_multiplier"),
        "logits_scale": 1.0 / s.positive("logits_scaling"),
    }


FAMILIES = (
    Family(
        model_type="granite",
        read=_granite,
        names=llama_names(),
        example={**TINY, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
        variants=({"logits_scaling": 2.0, "attention_bias": True, "mlp_bias": True},),
    ),
)
