"""Every family of this folder, found by looking; and from a Hugging Face config to a decoder's.

A module here that is no family would be read as one: what families share lies in `shared`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.layers import ACTIVATIONS
from redco_cli.models.families.shared import transformers5
from redco_cli.models.families.shared.family import Family, Names
from redco_cli.models.families.shared.settings import Settings

_NEVER = {
    "quantization_config": "quantised weights are not read",
    "pruned_heads": "heads are not pruned",
    "is_encoder_decoder": "it has no encoder",
    "add_cross_attention": "it has no encoder to look at",
    "clip_qkv": "queries, keys and values are not clipped",
}
"""Settings that no family has, with what is computed instead."""


@functools.cache
def families() -> Mapping[str, Family]:
    """Model type to family, sorted."""
    return {name: family for name, (family, _) in _found().items()}


@functools.cache
def _found() -> dict[str, tuple[Family, str]]:
    """Model type to its family, and what the file says of itself."""
    found: dict[str, tuple[Family, str]] = {}
    for name in (one.name for one in pkgutil.iter_modules([str(Path(__file__).parent)]) if not one.ispkg):
        if name != "registry":
            module = importlib.import_module(f"{__package__}.{name}")
            summary = str(module.__doc__).splitlines()[0]
            found |= {family.model_type: (family, summary) for family in module.FAMILIES}
    return dict(sorted(found.items()))


def descriptions() -> dict[str, str]:
    """Model type to what its file says of itself in one sentence, of every family."""
    return {name: summary for name, (_, summary) in _found().items()}


def family_of(model_type: str) -> Family | None:
    """The family of a Hugging Face model type; None where the decoder does not cover it."""
    return families().get(model_type)


def names_of(config: DecoderConfig) -> Names:
    """What the tensors of a decoder are called in a checkpoint of its family."""
    names = families()[config.family].names
    return names(config) if callable(names) else names


def decoder_config(hf_config: Any, *, where: Callable[[str], str]) -> DecoderConfig:
    """Reads a transformers config.

    Args:
        hf_config: of a type that is covered.
        where: a setting's name to its place, for errors.

    Raises:
        ModelError: the type is not covered, or a setting is not honoured or makes no sense.
    """
    family = family_of(hf_config.model_type)
    if family is None:
        problem = f"{hf_config.model_type} is not covered by the decoder"
        raise ModelError(where("model_type"), problem, f"it covers: {', '.join(families())}")
    settings = Settings(in_old_keys(hf_config, where=where), where)
    for key, reason in _NEVER.items():
        if settings(key):
            settings.refuse(key, f"{key} is set, but {reason}")
    options = family.read(settings)
    kinds = settings.unread("layer_types")
    if isinstance(kinds, list) and set(map(str, kinds)) == {"full_attention"} and not any(options["windows"]):
        settings("layer_types")  # says what is so anyway
    settings.finish(family.irrelevant)
    if not isinstance(options["activation"], str) or options["activation"] not in ACTIVATIONS:
        settings.refuse(
            "hidden_act", f"there is no activation {options['activation']!r}", f"choose from: {', '.join(ACTIVATIONS)}"
        )
    return DecoderConfig(**options)


def in_old_keys(hf_config: Any, *, where: Callable[[str], str]) -> Any:
    """A config of a covered type with its ropes in the keys of transformers 4, which transformers 5 reads too.

    Args:
        hf_config: a transformers config; unchanged.
        where: a setting's name to its place, for errors.

    Raises:
        ModelError: `rope_parameters` hold what these keys cannot say, or contradict them.
    """
    return transformers5.in_old_keys(hf_config, families()[hf_config.model_type].rope_keys, where=where)
