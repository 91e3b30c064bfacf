"""Hugging Face configs with LayerNorm as decoder configs: GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, StarCoder2."""

from __future__ import annotations

from typing import Any

from redco_cli.models.decoder.config import Rope
from redco_cli.models.families.shared.llama import Options, Reader, one_window, sizes
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings, named


def _gpt_sizes(s: Settings, hidden: str, layers: str, heads: str) -> Options:
    """Sizes of the families with as many key as query heads, that name them in their own ways."""
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


def _gpt_drops(s: Settings) -> Options:
    return {
        "embedding_dropout": s.number("embd_pdrop", 0.0),
        "attention_dropout": s.number("attn_pdrop", 0.0),
        "residual_dropout": s.number("resid_pdrop", 0.0),
    }


def _gpt2(s: Settings) -> Options:
    options = _gpt_sizes(s, "n_embd", "n_layer", "n_head")
    s.only("add_cross_attention", False, instead="it has no encoder to look at")
    scales = tuple(1.0 / (index + 1) for index in range(options["layers"]))
    return (
        options
        | _gpt_drops(s)
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


def _gptj(s: Settings) -> Options:
    options, turning = _gpt_sizes(s, "n_embd", "n_layer", "n_head"), s.size("rotary_dim")
    if turning % 2 or turning > options["head_dim"]:
        s.refuse("rotary_dim", f"{turning} of {options['head_dim']} dims cannot turn in pairs", "correct the config")
    return (
        options
        | _gpt_drops(s)
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


def _gpt_neox(s: Settings) -> Options:
    options = _gpt_sizes(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
    bias = bool(s("attention_bias"))
    dropout = s.number("hidden_dropout", 0.0)
    return options | {
        "mlp_width": s.size("intermediate_size"),
        "norm_eps": s.number("layer_norm_eps"),
        "parallel": "two_norms" if s("use_parallel_residual") else "no",
        "ropes": (read_rope(s, options["head_dim"]),),
        "layer_ropes": (0,) * options["layers"],
        "activation": s("hidden_act"),
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_dropout": dropout,
        "residual_dropout": dropout,
        "attention_dropout": s.number("attention_dropout", 0.0),
    }


def _opt(s: Settings) -> Options:
    options = _gpt_sizes(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
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


def _bloom(s: Settings) -> Options:
    options = _gpt_sizes(s, "hidden_size", "n_layer", "n_head")
    s.only("apply_residual_connection_post_layernorm", False, instead="residuals are taken before the norms")
    if s("pretraining_tp", 1) != 1:
        s.only("slow_but_exact", False, instead="biases are added, which transformers then leaves out")
    return options | {
        "mlp_width": 4 * options["hidden_size"],
        "norm_eps": s.number("layer_norm_epsilon"),
        "embedding_norm": True,
        "alibi": True,
        "activation": "gelu_new",
        "attention_dropout": s.number("attention_dropout", 0.0),
        "residual_dropout": s.number("hidden_dropout", 0.0),
    }


def _falcon_layout(s: Settings) -> Options:
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
    options = _gpt_sizes(s, "hidden_size", "num_hidden_layers", "num_attention_heads")
    for key in ("hidden_dropout", "attention_dropout"):
        s.only(key, 0.0, instead="Falcon drops other things than the other families")
    bias = bool(s("bias"))
    places: dict[str, Any] = {"alibi": True, "alibi_rounded": True}
    if not s("alibi"):
        places = {"ropes": (read_rope(s, options["head_dim"]),), "layer_ropes": (0,) * options["layers"]}
    return (
        options
        | _falcon_layout(s)
        | places
        | {
            "mlp_width": s.size("ffn_hidden_size"),
            "norm_eps": s.number("layer_norm_epsilon"),
            "activation": s("activation"),
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": bias,
        }
    )


def _starcoder2(s: Settings) -> Options:
    options = sizes(s)
    layers, bias = options["layers"], bool(s("use_bias"))
    return (
        options
        | one_window(s, layers)
        | {
            "mlp_width": s.size("intermediate_size"),
            "norm": "layer",
            "norm_eps": s.number("norm_epsilon"),
            "ropes": (read_rope(s, options["head_dim"]),),
            "layer_ropes": (0,) * layers,
            "activation": s("hidden_act"),
            "gated": False,
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": bias,
            "embedding_dropout": s.number("embedding_dropout", 0.0),
            "attention_dropout": s.number("attention_dropout", 0.0),
            "residual_dropout": s.number("residual_dropout", 0.0),
        }
    )


_SUMMARY = named("summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx")

CLASSIC = {
    "gpt2": Reader(_gpt2, _SUMMARY | {"reorder_and_upcast_attn"}),
    "gptj": Reader(_gptj, _SUMMARY | {"n_positions", "rotary", "scale_attn_weights"}),
    "gpt_neox": Reader(_gpt_neox, frozenset({"rotary_pct", "rotary_emb_base", "classifier_dropout"})),
    "opt": Reader(_opt, frozenset({"activation_dropout", "output_projection"})),
    "bloom": Reader(
        _bloom,
        named(
            "slow_but_exact seq_length offset_alibi masked_softmax_fusion bias_dropout_fusion skip_bias_add "
            "skip_bias_add_qkv attention_softmax_in_fp32 n_embed num_attention_heads"
        ),
    ),
    "falcon": Reader(_falcon, frozenset({"rope_theta", "rope_scaling", "num_kv_heads", "n_embed", "ff_factor"})),
    "starcoder2": Reader(
        _starcoder2,
        named("activation_function mlp_type norm_type attention_softmax_in_fp32 scale_attention_softmax_in_fp32"),
    ),
}
