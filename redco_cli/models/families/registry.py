"""Every family of this folder, found by looking.

A module here that is no family would be read as one: what families share lies in `shared`. Imports no JAX.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.families.shared import transformers5
from redco_cli.models.families.shared.family import Family, Names


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


def text_part(hf_config: Any) -> Any:
    """The config of the language model in a model with images or sound, where the decoder covers it.

    Args:
        hf_config: a transformers config; unchanged.

    Returns:
        The nested config, with the tokens, labels and quantisation that the whole names; any other config as it is.
    """
    key = next((one.part_of[kind] for one in families().values() if (kind := hf_config.model_type) in one.part_of), "")
    if not key:
        return hf_config
    part = copy.deepcopy(getattr(hf_config, key))
    for name in ("bos_token_id", "eos_token_id", "quantization_config", "id2label", "label2id", "problem_type"):
        if getattr(hf_config, name, None) is not None:
            setattr(part, name, getattr(hf_config, name))
    others = [one for one in hf_config.architectures or () if not one.endswith("ForConditionalGeneration")]
    part.architectures = others or None
    return part


def names_of(config: DecoderConfig) -> Names:
    """What the tensors of a decoder are called in a checkpoint of its family."""
    names = families()[config.family].names
    return names(config) if callable(names) else names


def in_old_keys(hf_config: Any, *, where: Callable[[str], str]) -> Any:
    """A config of a covered type with its ropes in the keys of transformers 4, which transformers 5 reads too.

    Args:
        hf_config: a transformers config; unchanged.
        where: a setting's name to its place, for errors.

    Raises:
        ModelError: `rope_parameters` hold what these keys cannot say, or contradict them.
    """
    return transformers5.in_old_keys(hf_config, families()[hf_config.model_type].rope_keys, where=where)
