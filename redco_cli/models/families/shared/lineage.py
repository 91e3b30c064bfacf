"""What most families since Llama share: RMS norms, rotary positions, a gated MLP, and what all that is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redco_cli.models.decoder.config import DecoderConfig, ExpertsConfig
from redco_cli.models.families.shared.family import Fused, HfConfig, Names, Options, in_layers
from redco_cli.models.families.shared.rope import read_rope
from redco_cli.models.families.shared.settings import Settings

ATTENTION_NAMES = {
    "attention/q": "self_attn.q_proj",
    "attention/k": "self_attn.k_proj",
    "attention/v": "self_attn.v_proj",
    "attention/o": "self_attn.o_proj",
    "attention/q_norm": "self_attn.q_norm",
    "attention/k_norm": "self_attn.k_norm",
}
PRE_NORM_NAMES = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
MLP_NAMES = {"mlp/gate": "mlp.gate_proj", "mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj"}
QWEN_EXPERT_NAMES = {
    "experts/router": "mlp.gate",
    "experts/gate": "mlp.experts.{expert}.gate_proj",
    "experts/up": "mlp.experts.{expert}.up_proj",
    "experts/down": "mlp.experts.{expert}.down_proj",
}
_TOP_NAMES = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

TINY: HfConfig = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
"""Sizes for an example."""
TINY_EXPERTS: HfConfig = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
TINY_IDS: HfConfig = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""For families whose usual ids are beyond a tiny vocabulary."""

WINDOW_SWITCHES = frozenset({"use_sliding_window", "max_window_layers"})
"""From which the config classes make `layer_types` and `sliding_window`."""
ROUTER_LOSS = frozenset({"router_aux_loss_coef"})
"""Matters with `output_router_logits` only, which is refused."""


def llama_names(
    *parts: Mapping[str, str], fused: Mapping[str, Callable[[DecoderConfig], Fused]] | None = None
) -> Names:
    """The names of a model whose modules outside of layers are called as Llama's.

    Args:
        parts: ours to theirs, within a layer; none for those of Llama.
        fused: theirs, within a layer, to how it is made of ours.
    """
    layer: dict[str, str] = {}
    for part in parts or (ATTENTION_NAMES, PRE_NORM_NAMES, MLP_NAMES):
        layer |= part
    places = {f"model.layers.{{layer}}.{theirs}": make for theirs, make in (fused or {}).items()}
    return Names(_TOP_NAMES | in_layers("model.layers", layer), "model", places)


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


def llama_like(s: Settings, *, partial_rope: bool = False) -> Options:
    """RMS norms before attention and a gated MLP, rotary positions in every layer.

    Args:
        s: the settings.
        partial_rope: whether `partial_rotary_factor` is followed.
    """
    options = sizes(s)
    return options | {
        "mlp_width": s.size("intermediate_size"),
        "norm": "rms",
        "norm_eps": s.number("rms_norm_eps"),
        "ropes": (read_rope(s, options["head_dim"], partial=partial_rope),),
        "layer_ropes": (0,) * options["layers"],
        "activation": s("hidden_act"),
        "attention_dropout": s.number("attention_dropout", 0.0),
    }


def attention_bias(s: Settings) -> Options:
    """One switch for the biases of all projections of attention."""
    bias = bool(s("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias}


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


def experts(s: Settings, count: str, width: str, *, normalise: bool, shared_width: int = 0) -> Options:
    """Experts instead of the MLP in every layer.

    Args:
        s: the settings.
        count: the setting that counts experts.
        width: the setting with the width of each.
        normalise: see `ExpertsConfig`; likewise `shared_width`.
        shared_width: of the expert that every token goes to.
    """
    s.only("output_router_logits", False, instead="the loss has no part for the router")
    s.only("router_jitter_noise", 0.0, instead="routing has no noise")
    config = ExpertsConfig(
        count=s.size(count),
        per_token=s.size("num_experts_per_tok"),
        width=s.size(width),
        normalise=normalise,
        shared_width=shared_width,
    )
    if config.per_token > config.count:
        s.refuse("num_experts_per_tok", f"there are only {config.count} experts", "correct the config")
    return {"experts": config}


def dense_among_experts(s: Settings, options: Options) -> Options:
    """Layers with an MLP among those with experts, as `mlp_only_layers` and `decoder_sparse_step` say.

    Args:
        s: the settings.
        options: with the number of layers, and experts.
    """
    layers, only, step = options["layers"], s("mlp_only_layers", []), s.size("decoder_sparse_step", 1)
    if not isinstance(only, list | tuple) or not all(isinstance(one, int) for one in only):
        s.refuse("mlp_only_layers", f"mlp_only_layers must be a list of layers, not {only!r}", "correct it")
    dense = tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)
    if len(dense) == layers:
        return options | {"experts": None}
    return options | {"dense_layers": dense}
