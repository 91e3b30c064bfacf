"""Settings that PyTorch's classes read and the Flax ones of the same model do not: refused by name where they are set.

`known_keys` knows which these are. What `refusals` decides by value is left to it; what remains here matters to other
heads than ours, is made into another setting by the config class, or is refused as soon as it is not as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.families.shared.settings import named
from redco_cli.models.known_keys import is_read, only_in_torch, warn_unread

_OTHER_HEADS = named(
    """
    add_fpn apply_layernorm auxiliary_channels auxiliary_concat_input auxiliary_loss_weight auxiliary_num_convs
    batch_norm_eps classifier_dropout classifier_proj_size contrastive_logits_temperature ctc_loss_reduction
    ctc_zero_infinity diversity_loss_weight encoder_stride hidden_dropout out_features out_indices pool_scales
    reshape_hidden_states segmentation_indices semantic_loss_ignore_index stage_names summary_activation
    summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
    tdnn_dilation tdnn_dim tdnn_kernel use_auxiliary_head use_weighted_layer_sum xvector_output_dim
    """
)
"""Read by heads, losses and backbones that no task here has."""
_MADE_INTO_OTHERS = named(
    "attention_types feed_forward_proj force_bos_token_to_be_generated forced_decoder_ids text_config_dict "
    "vision_config_dict"
)
"""Read by the config class, which makes settings of them that the Flax class does follow, or by generation."""
_NO_MATTER = named(
    "initializer_factor layerdrop n_embed original_max_position_embeddings pretraining_tp reorder_and_upcast_attn"
)
"""Of initial weights, other names of sizes, other ways to the same sums; `layerdrop` is refused in training."""
_NEEDS_SPEC_AUGMENT = "mask_"
"""How settings begin that matter with `apply_spec_augment` only."""


def refuse_unfollowed(config: Any, prefix: str, decided: Callable[[str], bool], *, place: Callable[[str], str]) -> None:
    """Checks one config, without those in it; warns of keys that nothing in transformers reads.

    Args:
        config: a transformers config.
        prefix: dotted, of its settings.
        decided: whether `refusals` decides about a setting of it.
        place: dotted setting to its place, for errors.

    Raises:
        ModelError: a setting that the Flax class does not read is not as usual.
    """
    usual, unread = _usual(config), []
    for key, value in config.to_dict().items():
        if key in config.sub_configs or value is None or value == usual.get(key):
            continue
        if not is_read(config.model_type, key):
            unread.append(f"{prefix}{key}")
        elif key in only_in_torch(config.model_type) and value and not decided(key) and _matters(config, key, value):
            raise ModelError(
                place(f"{prefix}{key}"),
                f"{config.model_type} with {key}: {value} would run wrongly: its Flax class does not read it",
                "choose a model without this setting",
            )
    warn_unread(place(unread[0]) if unread else "", config.model_type, unread)


def _usual(config: Any) -> dict[str, Any]:
    """What the config class says by default; of a composite, which has no defaults, what every config says."""
    from transformers import PretrainedConfig

    usual: dict[str, Any] = (PretrainedConfig if config.has_no_defaults_at_init else type(config))().to_dict()
    return usual


def _matters(config: Any, key: str, value: Any) -> bool:
    if key in _OTHER_HEADS or key in _MADE_INTO_OTHERS or key in _NO_MATTER:
        return False
    if config.has_no_defaults_at_init:
        return False  # what the classes of a composite read is its parts', which are checked by themselves
    if key == "embedding_size":  # others only ask whether it is there
        return bool(config.model_type == "roformer" and value != config.hidden_size)
    if key == "partial_rotary_factor":
        return bool(value != 1)
    if key.startswith(_NEEDS_SPEC_AUGMENT):
        return bool(config.apply_spec_augment)
    return True
