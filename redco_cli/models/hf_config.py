"""From a Hugging Face config to a decoder's, for every family; what is not honoured is refused by name.

What nothing in transformers reads is a warning instead: see `known_keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.layers import ACTIVATIONS
from redco_cli.models.families.registry import families, family_of, in_old_keys
from redco_cli.models.families.shared.settings import Settings
from redco_cli.models.known_keys import warn_unread

_NEVER = {
    "quantization_config": "quantised weights are not read",
    "pruned_heads": "heads are not pruned",
    "is_encoder_decoder": "it has no encoder",
    "add_cross_attention": "it has no encoder to look at",
    "clip_qkv": "queries, keys and values are not clipped",
}
"""Settings that no family has, with what is computed instead."""


def _method(setting: Any) -> Any:
    """How weights are quantised: a mapping in `config.json` is one still, or an object of transformers."""
    return setting.get("quant_method") if isinstance(setting, dict) else getattr(setting, "quant_method", None)


def decoder_config(hf_config: Any, *, where: Callable[[str], str], task: str = "causal_lm") -> DecoderConfig:
    """Reads a transformers config.

    Args:
        hf_config: of a type that is covered.
        where: a setting's name to its place, for errors.
        task: which head; `causal_lm` or `sequence_classification`.

    Raises:
        ModelError: the type is not covered, or a setting is not honoured or makes no sense.
    """
    family = family_of(hf_config.model_type)
    if family is None:
        problem = f"{hf_config.model_type} is not covered by the decoder"
        raise ModelError(where("model_type"), problem, f"it covers: {', '.join(families())}")
    settings = Settings(in_old_keys(hf_config, where=where), where)
    for key, reason in _NEVER.items():
        if settings(key) and not (key == "quantization_config" and _method(settings(key)) in family.packed):
            settings.refuse(key, f"{key} is set, but {reason}")
    options = family.read(settings)
    kinds = settings.unread("layer_types")
    if isinstance(kinds, list) and set(map(str, kinds)) == {"full_attention"} and not any(options["windows"]):
        settings("layer_types")  # says what is so anyway
    ignored = settings.finish(family.irrelevant)
    if not isinstance(options["activation"], str) or options["activation"] not in ACTIVATIONS:
        settings.refuse(
            "hidden_act", f"there is no activation {options['activation']!r}", f"choose from: {', '.join(ACTIVATIONS)}"
        )
    warn_unread(where(ignored[0]) if ignored else "", family.model_type, ignored)
    if task == "sequence_classification":
        options |= {"num_labels": hf_config.num_labels, "text_padding_id": hf_config.pad_token_id}
    return DecoderConfig(**options, restarts_separate=family.restarts_separate)
