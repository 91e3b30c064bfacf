"""Settings that a Flax class ignores or computes otherwise than PyTorch: refused by name instead of run wrongly.

`REFUSALS` is the whole knowledge, one line per setting, each measured against PyTorch (and measured again by
tests/models/test_refusals.py). A setting is refused only where its value differs from what the class computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.flax.keys import refuse_unproven
from redco_cli.models.flax.proven import CAUSAL, COMPOSED


@dataclass(frozen=True)
class Refusal:
    """A setting that some Flax classes do not follow.

    Attributes:
        model_types: which.
        key: the setting.
        honoured: whether the class computes what this value means, from the config and the value.
        instead: what the class does whatever the value.
        tasks: the tasks concerned; empty for all.
    """

    model_types: frozenset[str]
    key: str
    honoured: Callable[[Any, Any], bool]
    instead: str
    tasks: frozenset[str] = frozenset()


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _only(*values: Any) -> Callable[[Any, Any], bool]:
    return lambda _config, value: value in values


def _given(_config: Any, value: Any) -> bool:
    return value is not None


def _as_hidden_act(config: Any, value: Any) -> bool:
    return value is None or value == config.hidden_act


def _divides_evenly(config: Any, value: Any) -> bool:
    return value is None or value == config.hidden_size // config.num_attention_heads


def _plain_rope(_config: Any, value: Any) -> bool:
    return not value or value.get("rope_type", value.get("type")) == "default"


_BERT_LIKE = _types("bert roberta roberta-prelayernorm xlm-roberta electra albert big_bird")
_ROTARY = _types("llama mistral gemma")

_GPT2 = _types("gpt2 gpt-sw3")
_LLAMA = _types("llama mistral")
_LM = frozenset({"masked_lm", "causal_lm"})

REFUSALS = (
    Refusal(_LLAMA | {"gemma"}, "rope_theta", _only(10000, None), "its Flax class always computes with 10000"),
    Refusal(_LLAMA, "rope_scaling", _plain_rope, "its Flax class does not scale positions"),
    Refusal(_LLAMA, "tie_word_embeddings", _only(False), "its Flax class has a head of its own"),
    Refusal(_LLAMA, "head_dim", _divides_evenly, "its Flax class takes hidden_size / num_attention_heads"),
    Refusal(_types("llama"), "mlp_bias", _only(False), "its Flax class has no biases there"),
    Refusal(_types("mistral"), "sliding_window", _given, "its Flax class then lets a token see only itself"),
    Refusal(_types("gemma"), "hidden_activation", _as_hidden_act, "PyTorch takes hidden_act, its Flax class this one"),
    Refusal(_types("xglm"), "pad_token_id", _only(1, None), "its Flax class always leaves out position 1"),
    Refusal(_types("gptj"), "tie_word_embeddings", _only(False), "its Flax class has a head of its own"),
    Refusal(_GPT2, "scale_attn_weights", _only(True), "its Flax class always scales"),
    Refusal(_GPT2, "scale_attn_by_inverse_layer_idx", _only(False), "its Flax class does not scale by layer"),
    Refusal(_BERT_LIKE, "position_embedding_type", _only("absolute"), "its Flax class has absolute positions"),
    Refusal(_types("big_bird"), "use_bias", _only(True), "its Flax class always has these biases"),
    Refusal(_types("electra"), "hidden_act", _only("gelu"), "its Flax class uses it in the head too", _LM),
    Refusal(_types("distilbert"), "sinusoidal_pos_embds", _only(False), "its Flax class computes other positions"),
    Refusal(_types("dinov2"), "layerscale_value", _only(1.0), "its Flax class applies it to loaded weights again"),
    Refusal(_types("marian"), "share_encoder_decoder_embeddings", _only(True), "its Flax class has one embedding"),
    Refusal(_types("whisper"), "tie_word_embeddings", _only(True), "its Flax class knows no head of its own"),
    Refusal(_types("opt"), "enable_bias", _only(True), "its Flax class always has biases"),
    Refusal(_types("opt"), "layer_norm_elementwise_affine", _only(True), "its Flax class always has scales and biases"),
    Refusal(_types("wav2vec2"), "layer_norm_eps", _only(1e-5), "its Flax class uses it in the convolutions too"),
    Refusal(_types("resnet"), "layer_type", _only("bottleneck"), "its Flax class builds basic layers otherwise"),
    Refusal(_types("resnet"), "downsample_in_bottleneck", _only(False), "its Flax class strides elsewhere"),
)

_GENERIC = {
    "pruned_heads": "heads are not pruned",
    "quantization_config": "quantised weights are not read",
    "rope_parameters": "its Flax class does not read them",
}
_WRONG_PARTS = {
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "xlm-roberta"), "positions are counted from 0 there"),
    **dict.fromkeys(("electra", "big_bird"), "token types are missing there"),
}
"""Model types that the Flax classes are known to run wrongly as part of another model."""
_FIRST_PARTS = ("encoder", "vision_config")
_TOGETHER = frozenset({"is_decoder", "add_cross_attention"})
"""Settings that the decoder of a pair must have."""


def refuse_unsupported(config: Any, task: str, *, place: Callable[[str], str]) -> None:
    """Checks a config, and those nested in it, against what the Flax classes honour.

    Args:
        config: a transformers config.
        task: what it is for.
        place: dotted setting (`decoder.rope_theta`) to its place, for errors.

    Raises:
        ModelError: a setting, or a combination, that the Flax class is known to get wrong.
    """
    if config.model_type in COMPOSED:
        _refuse_parts(config, place)
    for prefix, part in _parts(config):
        _refuse_settings(part, task, prefix, place)
        refuse_unproven(part, prefix, _decides(part, task, prefix), place=place)
    if task == "causal_lm" and config.model_type in _BERT_LIKE and not config.is_decoder:
        raise ModelError(
            place("is_decoder"),
            f"{config.model_type} with is_decoder: false sees the tokens it should predict",
            "set is_decoder: true, or choose model.task masked_lm",
        )


def _decides(config: Any, task: str, prefix: str) -> Callable[[str], bool]:
    """Whether a line of `REFUSALS`, or what is asked of a pair, is about a setting of this config."""
    concerned = (one for one in REFUSALS if config.model_type in one.model_types and task in (one.tasks or {task}))
    keys = {one.key for one in concerned} | (_TOGETHER if prefix == "decoder." else set()) | set(_GENERIC)
    causal = task == "causal_lm" and config.model_type in CAUSAL and not prefix
    full = getattr(config, "attention_type", "original_full") == "original_full"  # no other is causal
    return lambda key: key in keys or (key == "is_decoder" and causal and full)


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The config and the configs nested in it, each with the dotted prefix of its settings."""
    yield "", config
    for name in config.sub_configs:
        yield f"{name}.", getattr(config, name)


def _refuse_settings(config: Any, task: str, prefix: str, place: Callable[[str], str]) -> None:
    for refusal in REFUSALS:
        concerned = config.model_type in refusal.model_types and (not refusal.tasks or task in refusal.tasks)
        value = getattr(config, refusal.key, None) if concerned else None
        if concerned and hasattr(config, refusal.key) and not refusal.honoured(config, value):
            raise ModelError(
                place(f"{prefix}{refusal.key}"),
                f"{config.model_type} with {refusal.key}: {_shown(value)} would run wrongly: {refusal.instead}",
                "choose a model without this setting",
            )
    for key, reason in _GENERIC.items():
        if getattr(config, key, None):
            raise ModelError(place(f"{prefix}{key}"), f"{key} is set, but {reason}", "choose a model without it")


def _refuse_parts(config: Any, place: Callable[[str], str]) -> None:
    """Encoder-decoder pairs whose decoder would not see its encoder, and parts that only work alone."""
    for prefix, part in _parts(config):
        if part is not config and not _has_flax_class(part.model_type):
            raise ModelError(
                place(f"{prefix}model_type"),
                f"transformers has no Flax class for {part.model_type}, a part of this {config.model_type}",
                "choose another model",
            )
        proven = sorted({pair[prefix[:-1] not in _FIRST_PARTS] for pair in COMPOSED[config.model_type]})
        if part is not config and part.model_type not in proven:
            wrong = _WRONG_PARTS.get(part.model_type)
            verdict = "is not shown to run as in PyTorch" if wrong is None else f"would run wrongly: {wrong}"
            raise ModelError(
                place(f"{prefix}model_type"),
                f"{part.model_type} inside {config.model_type} {verdict}",
                f"choose a part of another model type: {', '.join(proven)}",
            )
    decoder = getattr(config, "decoder", None)
    for key in ("is_decoder", "add_cross_attention") if decoder is not None else ():
        if not getattr(decoder, key):
            raise ModelError(
                place(f"decoder.{key}"), f"{key} is false: the decoder would not follow its encoder", f"set {key}: true"
            )


def _has_flax_class(model_type: str) -> bool:
    from transformers.models.auto.modeling_flax_auto import FLAX_MODEL_MAPPING_NAMES

    return model_type in FLAX_MODEL_MAPPING_NAMES or model_type in ("clip_text_model", "clip_vision_model")


def _shown(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, dict)
        else str(value)
    )
