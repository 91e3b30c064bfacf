"""Llama 1 to 3.2: RMS norms before attention and a gated MLP, rotary positions in every layer."""

from __future__ import annotations

from redco_cli.models.families.shared.family import Family, Options
from redco_cli.models.families.shared.lineage import TINY, attention_bias, llama_like, llama_names
from redco_cli.models.families.shared.settings import Settings


def read_llama(s: Settings) -> Options:
    """Biases by choice, in attention and MLP."""
    return llama_like(s) | attention_bias(s) | {"mlp_bias": bool(s("mlp_bias"))}


FAMILIES = (
    Family(
        model_type="llama",
        read=read_llama,
        names=llama_names(),
        example=TINY,
        variants=(
            {"rope_theta": 500.0, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
            {"tie_word_embeddings": True},
            {"num_key_value_heads": 1},
            {"hidden_act": "gelu_pytorch_tanh"},
        ),
    ),
)
