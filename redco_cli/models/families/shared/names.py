"""What the tensors of each family are called in a Hugging Face checkpoint, and how fused ones are cut.

The left side is a module or a parameter of the decoder, joined by `/`; the right side is the module that holds it in
transformers, with `{layer}` and `{expert}` for numbers. A fused module holds several of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from redco_cli.models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class Fused:
    """Several projections in one tensor, along its output dim: groups, then parts of each group, then a block.

    Attributes:
        modules: ours, in the order of the parts.
        groups: how often the parts repeat.
        counts: blocks of each part in one group.
        width: of a block.
    """

    modules: tuple[str, ...]
    groups: int
    counts: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Names:
    """A family's names.

    Attributes:
        modules: ours to theirs; modules that a model does not have are left out of its table.
        fused: theirs to how it is made of ours.
        base: the prefix that checkpoints of the bare model lack.
        out_last: whether kernels in layers are stored [in, out] like ours (GPT-2).
    """

    modules: Mapping[str, str]
    base: str
    fused: Mapping[str, Callable[[DecoderConfig], Fused]] = field(default_factory=dict)
    out_last: bool = False


_QKV = ("layers/attention/q", "layers/attention/k", "layers/attention/v")


def _in_layers(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"layers/{ours}": f"{prefix}.{{layer}}.{theirs}" for ours, theirs in names.items()}


def _qkv_by_head(c: DecoderConfig) -> Fused:
    """Each head's query, key and value after one another."""
    return Fused(_QKV, c.heads, (1, 1, 1), c.head_dim)


def _qkv_by_kind(c: DecoderConfig) -> Fused:
    """All queries, then all keys, then all values."""
    return Fused(_QKV, 1, (c.heads, c.kv_heads, c.kv_heads), c.head_dim)


def _qkv_by_group(c: DecoderConfig) -> Fused:
    """For each key head the queries that share it, then the key, then the value."""
    return Fused(_QKV, c.kv_heads, (c.heads // c.kv_heads, 1, 1), c.head_dim)


def _gate_up(c: DecoderConfig) -> Fused:
    return Fused(("layers/mlp/gate", "layers/mlp/up"), 1, (1, 1), c.mlp_width)


_TOP = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_ATTENTION = {
    "attention/q": "self_attn.q_proj",
    "attention/k": "self_attn.k_proj",
    "attention/v": "self_attn.v_proj",
    "attention/o": "self_attn.o_proj",
    "attention/q_norm": "self_attn.q_norm",
    "attention/k_norm": "self_attn.k_norm",
}
_PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GATED = {"mlp/gate": "mlp.gate_proj", "mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _PRE_NORMS | _GATED


def _llama(layer: Mapping[str, str] = _LLAMA) -> Names:
    return Names(_TOP | _in_layers("model.layers", layer), "model")


_SANDWICH = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    "experts/router": "block_sparse_moe.gate",
    "experts/gate": "block_sparse_moe.experts.{expert}.w1",
    "experts/up": "block_sparse_moe.experts.{expert}.w3",
    "experts/down": "block_sparse_moe.experts.{expert}.w2",
}
_QWEN_MOE = {
    "experts/router": "mlp.gate",
    "experts/gate": "mlp.experts.{expert}.gate_proj",
    "experts/up": "mlp.experts.{expert}.up_proj",
    "experts/down": "mlp.experts.{expert}.down_proj",
    "experts/shared/gate": "mlp.shared_expert.gate_proj",
    "experts/shared/up": "mlp.shared_expert.up_proj",
    "experts/shared/down": "mlp.shared_expert.down_proj",
    "experts/shared_router": "mlp.shared_expert_gate",
}
_PHI3 = Names(
    _llama().modules,
    "model",
    {"model.layers.{layer}.self_attn.qkv_proj": _qkv_by_kind, "model.layers.{layer}.mlp.gate_up_proj": _gate_up},
)
_GPT2 = Names(
    {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        **_in_layers(
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
    "transformer",
    {"transformer.h.{layer}.attn.c_attn": _qkv_by_kind},
    out_last=True,
)
_GPTJ = Names(
    {
        "embedding": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "head_bias": "lm_head",
        **_in_layers(
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
    "transformer",
)
_GPT_NEOX = Names(
    {
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        **_in_layers(
            "gpt_neox.layers",
            {
                "attention/o": "attention.dense",
                **_PRE_NORMS,
                "mlp/up": "mlp.dense_h_to_4h",
                "mlp/down": "mlp.dense_4h_to_h",
            },
        ),
    },
    "gpt_neox",
    {"gpt_neox.layers.{layer}.attention.query_key_value": _qkv_by_head},
)
_OPT = Names(
    {
        "embedding": "model.decoder.embed_tokens",
        "position_embedding": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        **_in_layers(
            "model.decoder.layers",
            _ATTENTION
            | {
                "attention/o": "self_attn.out_proj",
                "attention_norm": "self_attn_layer_norm",
                "mlp_norm": "final_layer_norm",
                "mlp/up": "fc1",
                "mlp/down": "fc2",
            },
        ),
    },
    "model",
)
_BLOOM_LAYER = {
    "attention/o": "self_attention.dense",
    **_PRE_NORMS,
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}
_BLOOM_TOP = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_BLOOM_QKV = "transformer.h.{layer}.self_attention.query_key_value"
_STARCODER2 = _ATTENTION | _PRE_NORMS | {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
_NAMES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite"), _llama()),
    **dict.fromkeys(("gemma2", "gemma3_text"), _llama(_ATTENTION | _SANDWICH | _GATED)),
    "olmo2": _llama(
        _ATTENTION
        | _GATED
        | {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
    ),
    "mixtral": _llama(_ATTENTION | _PRE_NORMS | _MIXTRAL),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _llama(_ATTENTION | _PRE_NORMS | _QWEN_MOE)),
    "starcoder2": _llama(_STARCODER2),
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "gpt_neox": _GPT_NEOX,
    "opt": _OPT,
    "bloom": Names(_BLOOM_TOP | _in_layers("transformer.h", _BLOOM_LAYER), "transformer", {_BLOOM_QKV: _qkv_by_head}),
}


def names_of(config: DecoderConfig) -> Names:
    """The names of a decoder's family; Falcon's norms are called after what shares them."""
    if config.family != "falcon":
        return _NAMES[config.family]
    norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if config.parallel == "two_norms" else {}
    layer = _in_layers("transformer.h", _BLOOM_LAYER | norms)
    return Names(_BLOOM_TOP | layer, "transformer", {_BLOOM_QKV: _qkv_by_group})
