"""Falcon: one key head for all, or groups of them; norms and positions of three generations."""

from __future__ import annotations

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.families.shared.family import Family, Names, Options, in_layers, qkv_by_group
from redco_cli.models.families.shared.gpt import BLOOM_LAYER_NAMES, BLOOM_QKV, BLOOM_TOP_NAMES, gpt_sizes
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings, named

_TWO_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def names(config: DecoderConfig) -> Names:
    """Norms are called after what shares them."""
    layer = BLOOM_LAYER_NAMES | (_TWO_NORMS if config.parallel == "two_norms" else {})
    return Names(BLOOM_TOP_NAMES | in_layers("transformer.h", layer), "transformer", {BLOOM_QKV: qkv_by_group})


def _layout(s: Settings) -> Options:
    """How many key and value heads there are, and which norms lead to attention and MLP."""
    new, parallel, norms = s("new_decoder_architecture"), s("parallel_attn"), s("num_ln_in_parallel_attn")
    one = s("multi_query")
    if new and not parallel:
        s.refuse("parallel_attn", "new_decoder_architecture without parallel_attn is no Falcon", "correct the config")
    if norms == 2 and not new:
        s.refuse("num_ln_in_parallel_attn", "two norms belong to new_decoder_architecture", "correct the config")
    heads = s.size("num_attention_heads")
    kv_heads = 1 if one and not new else s.size("num_kv_heads", heads)
    if not new and not one and kv_heads != heads:
        s.refuse("num_kv_heads", f"without multi_query there are {heads} of them, not {kv_heads}", "correct the config")
    if heads % kv_heads:
        s.refuse("num_kv_heads", f"{kv_heads} key and value heads do not divide {heads} heads", "correct the config")
    if not parallel:
        return {"kv_heads": kv_heads, "parallel": "no"}
    return {"kv_heads": kv_heads, "parallel": "two_norms" if new and norms != 1 else "one_norm"}


def _falcon(s: Settings) -> Options:
    options = gpt_sizes(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
    for key in ("hidden_dropout", "attention_dropout"):
        s.only(key, 0.0, instead="Falcon drops other things than the other families")
    bias = bool(s("bias"))
    positions: Options = {"alibi": True, "alibi_rounded": True}
    if not s("alibi"):
        positions = {"ropes": (read_rope(s, options["head_dim"]),), "layer_ropes": (0,) * options["layers"]}
    return (
        options
        | _layout(s)
        | positions
        | {
            "mlp_width": s.size("ffn_hidden_size"),
            "norm_eps": s.number("layer_norm_epsilon"),
            "activation": s("activation"),
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": bias,
        }
    )


FAMILIES = (
    Family(
        model_type="falcon",
        restarts_separate=False,
        read=_falcon,
        irrelevant=named("rope_theta rope_scaling num_kv_heads n_embed"),
        names=names,
        example={
            "vocab_size": 64,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "ffn_hidden_size": 32,
        },
        variants=(
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 12},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False},
            {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
        ),
    ),
)
