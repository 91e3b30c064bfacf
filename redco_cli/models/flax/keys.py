"""A setting that is not as usual is followed where `proven` has it, and refused by its name where it has not.

What remains is known not to matter to any task here: `known_keys` says which keys PyTorch's classes read at all, and
what `refusals` decides by value is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.families.shared.settings import NO_MATTER, named
from redco_cli.models.flax.proven import COMPOSED, PROVEN
from redco_cli.models.known_keys import is_read, warn_unread

_MATTERS_HERE = named("attention_dropout classifier_dropout is_decoder max_position_embeddings")
"""What the decoder may pass over, and Flax classes may not."""
_OTHER_HEADS = named(
    """
    add_fpn apply_layernorm auxiliary_channels auxiliary_concat_input auxiliary_loss_weight auxiliary_num_convs
    batch_norm_eps classifier_proj_size codevector_dim contrastive_logits_temperature ctc_loss_reduction
    ctc_zero_infinity diversity_loss_weight encoder_stride feat_quantizer_dropout final_dropout num_codevector_groups
    num_codevectors_per_group num_negatives out_features out_indices pool_scales proj_codevector_dim
    reshape_hidden_states segmentation_indices semantic_loss_ignore_index stage_names summary_activation
    summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
    tdnn_dilation tdnn_dim tdnn_kernel use_auxiliary_head use_mask_token xvector_output_dim
    """
)
"""Read by heads, losses and backbones that no task here has."""
_MADE_INTO_OTHERS = named(
    "force_bos_token_to_be_generated forced_decoder_ids is_encoder_decoder text_config_dict vision_config_dict"
)
"""Read by the config class, which makes settings of them that are looked at themselves, or by generation."""
_NO_MATTER = named("initializer_factor logit_scale_init_value n_embed pretraining_tp reorder_and_upcast_attn")
"""Of initial weights, other names of sizes, other ways to the same sums."""
_IMMATERIAL = (NO_MATTER - _MATTERS_HERE) | _OTHER_HEADS | _MADE_INTO_OTHERS | _NO_MATTER
_BART_LIKE = dict.fromkeys(named("bart blenderbot blenderbot-small marian mbart pegasus"), named("num_hidden_layers"))
_T5_LIKE = dict.fromkeys(named("t5 mt5 longt5"), named("classifier_dropout max_position_embeddings"))
_ROTARY = dict.fromkeys(named("gemma llama mistral"), named("max_position_embeddings"))
_COMPOSITES = dict.fromkeys(COMPOSED, named("hidden_size tie_word_embeddings vocab_size"))
_IMMATERIAL_OF = {
    **_BART_LIKE,
    **_T5_LIKE,
    **_ROTARY,
    **_COMPOSITES,
    "beit": named("vocab_size"),
    "bloom": named("classifier_dropout"),
    "clip_text_model": named("projection_dim"),
    "clip_vision_model": named("projection_dim"),
    "gpt_neo": named("attention_layers classifier_dropout"),
    "gptj": named("n_positions"),
    "wav2vec2": named("vocab_size"),
    "whisper": named("num_hidden_layers"),
    "xglm": named("max_position_embeddings"),
}
"""Of heads that these types do not have here, or asked of others instead: `limits` looks at how long inputs are."""
_ANOTHER_SIZE = {
    "decoder_vocab_size": "vocab_size",
    "output_hidden_size": "hidden_size",
    "pooler_output_size": "hidden_size",
}
"""Settings to those that they must equal here."""
_NEEDS_SPEC_AUGMENT = "mask_"
"""How settings begin that matter with `apply_spec_augment` only."""


def refuse_unproven(config: Any, prefix: str, decided: Callable[[str], bool], *, place: Callable[[str], str]) -> None:
    """Checks one config, without those in it; warns of keys that nothing in transformers reads.

    Args:
        config: a transformers config.
        prefix: dotted, of its settings.
        decided: whether `refusals` decides about a setting of it.
        place: dotted setting to its place, for errors.

    Raises:
        ModelError: a setting is not as usual, and no test covers it.
    """
    usual, unread, immaterial = _usual(config), [], _IMMATERIAL | _IMMATERIAL_OF.get(config.model_type, frozenset())
    for key, value in config.to_dict().items():
        if key in config.sub_configs or value == usual.get(key):
            continue
        if not is_read(config.model_type, key):
            unread.append(f"{prefix}{key}")
            continue
        matters = (value or key in usual) and key not in immaterial and not decided(key)
        if matters and not is_proven(config.model_type, key, value, usual) and not _is_implied(config, key, value):
            raise _unproven(config.model_type, key, value, place(f"{prefix}{key}"))
    warn_unread(place(unread[0]) if unread else "", config.model_type, unread)


def is_proven(model_type: str, key: str, value: Any, usual: dict[str, Any]) -> bool:
    """Whether a case covers a value: any number where it covers one, texts and switches that it covers themselves.

    Args:
        model_type: of a config.
        key: the setting.
        value: not as usual.
        usual: what the settings are by default.
    """
    covered = _covered(model_type, key)
    return bool(covered) and _kinds(value) <= set().union(*map(_kinds, [*covered, usual.get(key)]))


def _covered(model_type: str, key: str) -> list[Any]:
    return [case.settings[key] for case in PROVEN.get(model_type, ()) if key in case.settings]


def _kinds(value: Any) -> set[Any]:
    """What is alike of values that a class treats alike."""
    if isinstance(value, list | tuple):
        return {("list", kind) for one in value for kind in _kinds(one)}
    if isinstance(value, dict):
        return {"mapping"}
    return {"number"} if isinstance(value, int | float) and not isinstance(value, bool) else {value}


def _usual(config: Any) -> dict[str, Any]:
    """What the config class says by default; of a composite, which has no defaults, what every config says."""
    from transformers import PretrainedConfig

    usual: dict[str, Any] = (PretrainedConfig if config.has_no_defaults_at_init else type(config))().to_dict()
    return usual


def _is_implied(config: Any, key: str, value: Any) -> bool:
    """Whether a setting says what others say too, or matters only with others that are switched off."""
    if key == "embedding_size":  # most only ask whether it is there
        return bool(config.model_type != "roformer" or value == config.hidden_size)
    if key == "num_feat_extract_layers":
        return bool(value == len(config.conv_dim))
    if key in _ANOTHER_SIZE:
        return bool(value == getattr(config, _ANOTHER_SIZE[key]))
    if key == "partial_rotary_factor":
        return bool(value == 1)
    if key.startswith("mask_feature_") and config.mask_feature_prob == 0:
        return True
    return key.startswith(_NEEDS_SPEC_AUGMENT) and not config.apply_spec_augment


def _unproven(model_type: str, key: str, value: Any, place: str) -> ModelError:
    covered = [one for one in _covered(model_type, key) if isinstance(one, str)]
    shown = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else value
    return ModelError(
        place,
        f"{model_type} with {key}: {shown} is not supported: no test shows that its Flax class computes it as PyTorch "
        "does",
        f"choose a model with another one: {', '.join(covered)}" if covered else "choose a model without this setting",
    )
