"""What the families before Llama share: LayerNorm with biases, a plain MLP, as many key as query heads."""

from __future__ import annotations

from redco_cli.models.families.shared.family import HfConfig, Options
from redco_cli.models.families.shared.settings import Settings

TINY: HfConfig = {"vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64}
"""Sizes for an example in the keys of GPT-2 and GPT-J."""
BLOOM_TOP_NAMES = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
"""BLOOM's and Falcon's."""
BLOOM_LAYER_NAMES = {
    "attention/o": "self_attention.dense",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}
BLOOM_QKV = "transformer.h.{layer}.self_attention.query_key_value"


def gpt_sizes(s: Settings, hidden: str, layers: str, heads: str) -> Options:
    """Sizes under the names that a family gives them, the tie, and biases everywhere."""
    width, count, depth = s.size(hidden), s.size(heads), s.size(layers)
    if width % count:
        s.refuse(heads, f"{count} heads do not divide the hidden size {width}", "correct the config")
    return {
        "family": s.family,
        "vocab_size": s.size("vocab_size"),
        "hidden_size": width,
        "embedding_size": width,
        "layers": depth,
        "heads": count,
        "kv_heads": count,
        "head_dim": width // count,
        "windows": (None,) * depth,
        "attention_scale": (width // count) ** -0.5,
        "initializer_range": s.number("initializer_range", 0.02),
        "tied": bool(s("tie_word_embeddings", False)),
        "norm": "layer",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


def gpt_dropouts(s: Settings) -> Options:
    """Dropout under the names of GPT-2 and GPT-J."""
    return {
        "embedding_dropout": s.number("embd_pdrop", 0.0),
        "attention_dropout": s.number("attn_pdrop", 0.0),
        "residual_dropout": s.number("resid_pdrop", 0.0),
    }
