"""Hugging Face configs of the Llama lineage as the options of a decoder: RMS norms, rotary positions, a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redco_cli.models.decoder.config import ExpertsConfig, Rope
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings, named

Options = dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """How a family's config is read.

    Attributes:
        read: settings to the options of `DecoderConfig`.
        irrelevant: settings of this family that do not matter to the logits.
    """

    read: Callable[[Settings], Options]
    irrelevant: frozenset[str] = frozenset()


def sizes(s: Settings) -> Options:
    """Sizes under the names that most families give them, and the tie."""
    heads, hidden = s.size("num_attention_heads"), s.size("hidden_size")
    kv_heads = s.size("num_key_value_heads", heads)
    if heads % kv_heads:
        s.refuse("num_key_value_heads", f"{kv_heads} key and value heads do not divide {heads} heads", "correct it")
    head_dim = s.maybe_size("head_dim")
    if head_dim is None and hidden % heads:
        s.refuse("num_attention_heads", f"{heads} heads do not divide the hidden size {hidden}", "correct it")
    layers, vocab_size = s.size("num_hidden_layers"), s.size("vocab_size")
    return {
        "family": s.family,
        "vocab_size": vocab_size,
        "padding_id": s.padding_id(vocab_size),
        "hidden_size": hidden,
        "embedding_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "windows": (None,) * layers,
        "attention_scale": (head_dim or hidden // heads) ** -0.5,
        "initializer_range": s.number("initializer_range", 0.02),
        "tied": bool(s("tie_word_embeddings", False)),
    }


def llama_like(s: Settings) -> Options:
    """RMS norms before attention and a gated MLP, rotary positions in every layer."""
    options = sizes(s)
    return options | {
        "mlp_width": s.size("intermediate_size"),
        "norm": "rms",
        "norm_eps": s.number("rms_norm_eps"),
        "ropes": (read_rope(s, options["head_dim"]),),
        "layer_ropes": (0,) * options["layers"],
        "activation": s("hidden_act"),
        "attention_dropout": s.number("attention_dropout", 0.0),
    }


def _llama(s: Settings) -> Options:
    bias = bool(s("attention_bias"))
    return llama_like(s) | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(s("mlp_bias"))}


def one_window(s: Settings, layers: int) -> Options:
    """The same sliding window in every layer, or none."""
    return {"windows": (s.maybe_size("sliding_window"),) * layers}


def layer_windows(s: Settings, layers: int) -> Options:
    """A sliding window in the layers that `layer_types` names."""
    kinds = s.each("layer_types")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            s.refuse("layer_types", f"layer_types has {kind}, which nothing here computes")
    window = s.maybe_size("sliding_window")
    if len(kinds) != layers or (window is None and "sliding_attention" in kinds):
        s.refuse("layer_types", "layer_types do not fit num_hidden_layers or sliding_window", "correct the config")
    return {"windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


def _mistral(s: Settings) -> Options:
    options = llama_like(s)
    return options | one_window(s, options["layers"])


def _qwen2(s: Settings) -> Options:
    options = llama_like(s)
    return options | layer_windows(s, options["layers"]) | {"qkv_bias": True}


def _qwen3(s: Settings) -> Options:
    options, bias = llama_like(s), bool(s("attention_bias"))
    return options | layer_windows(s, options["layers"]) | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}


def _gemma(s: Settings) -> Options:
    options, bias = llama_like(s), bool(s("attention_bias"))
    return options | {
        "norm": "rms_plus_one",
        "embedding_scale": options["hidden_size"] ** 0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma2(s: Settings) -> Options:
    options = _gemma(s)
    return (
        options
        | layer_windows(s, options["layers"])
        | {
            "norm_place": "sandwich",
            "activation": s("hidden_activation"),
            "attention_scale": s.positive("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": s.maybe_positive("attn_logit_softcapping"),
            "logits_softcap": s.maybe_positive("final_logit_softcapping"),
        }
    )


def _gemma3(s: Settings) -> Options:
    s.only("use_bidirectional_attention", False, instead="a token sees only what is before it")
    s.only("attn_logit_softcapping", instead="transformers does not apply it either")
    options = _gemma2(s)
    everywhere = options["ropes"][0]
    nearby = Rope(theta=s.positive("rope_local_base_freq"), dims=everywhere.dims)
    kinds = tuple(0 if window is None else 1 for window in options["windows"])
    return options | {"ropes": (everywhere, nearby), "layer_ropes": kinds, "qk_norm": "head"}


def _experts(s: Settings, count: str, width: str, *, normalise: bool, shared_width: int = 0) -> Options:
    """Experts instead of the MLP in every layer."""
    s.only("output_router_logits", False, instead="the loss has no part for the router")
    s.only("router_jitter_noise", 0.0, instead="routing has no noise")
    s.only("decoder_sparse_step", 1, instead="every layer has experts")
    if s("mlp_only_layers"):
        s.refuse("mlp_only_layers", f"{s.family} with mlp_only_layers is not supported: every layer has experts")
    experts = ExpertsConfig(
        count=s.size(count),
        per_token=s.size("num_experts_per_tok"),
        width=s.size(width),
        normalise=normalise,
        shared_width=shared_width,
    )
    if experts.per_token > experts.count:
        s.refuse("num_experts_per_tok", f"there are only {experts.count} experts", "correct the config")
    return {"experts": experts}


def _mixtral(s: Settings) -> Options:
    return _mistral(s) | _experts(s, "num_local_experts", "intermediate_size", normalise=True)


def _qwen2_moe(s: Settings) -> Options:
    options = llama_like(s)
    shared = s.size("shared_expert_intermediate_size")
    return (
        options
        | one_window(s, options["layers"])
        | {"qkv_bias": bool(s("qkv_bias"))}
        | _experts(s, "num_experts", "moe_intermediate_size", normalise=bool(s("norm_topk_prob")), shared_width=shared)
    )


def _qwen3_moe(s: Settings) -> Options:
    options, bias = llama_like(s), bool(s("attention_bias"))
    return (
        options
        | one_window(s, options["layers"])
        | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}
        | _experts(s, "num_experts", "moe_intermediate_size", normalise=bool(s("norm_topk_prob")))
    )


def _no_rope(s: Settings, layers: int) -> tuple[int | None, ...]:
    """SmolLM3 lists for each layer whether it has rotary positions (1), whatever the name says."""
    turns = s.each("no_rope_layers")
    if len(turns) != layers:
        s.refuse("no_rope_layers", f"no_rope_layers has {len(turns)} entries for {layers} layers", "correct it")
    return tuple(0 if turn else None for turn in turns)


def _smollm3(s: Settings) -> Options:
    options = _llama(s)
    layers = options["layers"]
    return options | layer_windows(s, layers) | {"layer_ropes": _no_rope(s, layers)}


def _granite(s: Settings) -> Options:
    return _llama(s) | {
        "embedding_scale": s.number("embedding_multiplier"),
        "residual_scale": s.number("residual_multiplier"),
        "attention_scale": s.number("attention_multiplier"),
        "logits_scale": 1.0 / s.positive("logits_scaling"),
    }


def _olmo2(s: Settings) -> Options:
    bias = bool(s("attention_bias"))
    return llama_like(s) | {"norm_place": "output", "qk_norm": "all_heads", "qkv_bias": bias, "out_bias": bias}


def _phi3(s: Settings) -> Options:
    options = llama_like(s)
    return options | one_window(s, options["layers"]) | {"residual_dropout": s.number("resid_pdrop")}


_WINDOW_SWITCHES = frozenset({"use_sliding_window", "max_window_layers"})  # layer_types and sliding_window follow
_ROUTER_LOSS = frozenset({"router_aux_loss_coef"})  # only with output_router_logits

LLAMA_LINEAGE = {
    "llama": Reader(_llama, named("is_llama_config max_sequence_length activation")),
    "mistral": Reader(_mistral),
    "qwen2": Reader(_qwen2, _WINDOW_SWITCHES | {"use_mrope"}),
    "qwen3": Reader(_qwen3, _WINDOW_SWITCHES),
    "gemma": Reader(_gemma, frozenset({"hidden_activation"})),
    "gemma2": Reader(_gemma2, frozenset({"hidden_act", "cache_implementation"})),
    "gemma3_text": Reader(
        _gemma3, frozenset({"hidden_act", "cache_implementation", "sliding_window_pattern", "_sliding_window_pattern"})
    ),
    "mixtral": Reader(_mixtral, _ROUTER_LOSS),
    "qwen2_moe": Reader(_qwen2_moe, _WINDOW_SWITCHES | _ROUTER_LOSS | {"intermediate_size"}),
    "qwen3_moe": Reader(_qwen3_moe, _WINDOW_SWITCHES | _ROUTER_LOSS | {"intermediate_size"}),
    "smollm3": Reader(_smollm3, named("use_sliding_window no_rope_layer_interval max_window_layers")),
    "granite": Reader(_granite),
    "olmo2": Reader(_olmo2),
    "phi3": Reader(_phi3, named("embd_pdrop full_attn_mod interpolate_factor")),
}
