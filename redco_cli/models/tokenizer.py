"""The tokenizer or processor that belongs to a model: the built-in byte tokenizer, or what transformers loads for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models import byte_tokenizer
from redco_cli.models.byte_tokenizer import ByteTokenizer
from redco_cli.models.configs import local_directory
from redco_cli.recipe.schema import ModelSection

_LOADERS = {
    "image_classification": "AutoImageProcessor",
    "clip": "AutoProcessor",
    "vision_to_sequence": "AutoProcessor",
    "speech_to_sequence": "AutoProcessor",
}
"""Task to the class that loads what prepares its inputs; text is prepared by `AutoTokenizer`."""

_FILES = ("tokenizer*", "vocab*", "*.model", "preprocessor_config.json", "processor_config.json")
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def load_tokenizer(section: ModelSection, model: Any, *, where: Callable[[str], str]) -> Any:
    """The tokenizer of a recipe, or the processor where the model takes images or sound.

    Args:
        section: `model` of the recipe.
        model: the resolved model; None for a plugin's `build_model`.
        where: dotted recipe key to its place, for errors.

    Returns:
        A `ByteTokenizer`, or what transformers loads from `model.tokenizer` (or else from `model.name`); None when the
        recipe names neither, and for a directory without any tokenizer file. Code from a hub is never run.

    Raises:
        ModelError: it cannot be loaded, has more ids than the model, or other special ids than an inline config says.
    """
    name = section.tokenizer or section.name
    if name is None:
        return None
    key = "model.tokenizer" if section.tokenizer is not None else "model.name"
    if section.tokenizer == byte_tokenizer.NAME:
        tokenizer: Any = ByteTokenizer()
    else:
        directory = local_directory(name)
        if section.tokenizer is None and directory is not None and not _has_files(directory):
            return None
        task = model.task if model is not None and section.tokenizer is None else "text"
        revision = section.revision if section.tokenizer is None else None
        tokenizer = _load(_LOADERS.get(task, "AutoTokenizer"), directory or name, revision, where(key))
    if model is not None and model.config is not None:
        _check_fit(getattr(tokenizer, "tokenizer", tokenizer), model.config, section, where)
    return tokenizer


def _has_files(directory: Path) -> bool:
    return any(next(directory.glob(pattern), None) for pattern in _FILES)


def _load(loader: str, source: Path | str, revision: str | None, where: str) -> Any:
    import transformers

    try:
        return getattr(transformers, loader).from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        if not isinstance(source, Path) and source.startswith((".", "/", "~")):
            raise ModelError(where, f"there is no directory {source}", "check the path") from None
        raise ModelError(
            where,
            f"{loader} cannot load {source}: {' '.join(str(error).split())}",
            "check the name and the network, or set model.tokenizer to a hub id, a directory, or byte",
        ) from None


def _check_fit(tokenizer: Any, config: Any, section: ModelSection, where: Callable[[str], str]) -> None:
    """Every id must be a row of the embedding, and a model from scratch must end texts as its tokenizer does."""
    text_config = config.get_text_config(decoder=True)
    vocab_size = getattr(text_config, "vocab_size", None)
    if not hasattr(tokenizer, "encode") or vocab_size is None:
        return
    if len(tokenizer) > vocab_size:
        raise ModelError(
            where("model.config.vocab_size" if section.config is not None else "model.tokenizer"),
            f"the tokenizer has {len(tokenizer)} ids, but the model's vocab_size is {vocab_size}",
            f"set vocab_size: {len(tokenizer)}" if section.config is not None else "take the model's own tokenizer",
        )
    for name in _SPECIAL_IDS if section.config is not None else ():
        wanted, found = getattr(tokenizer, name, None), getattr(config, name, None)
        if found is not None and wanted is not None and found != wanted:
            raise ModelError(
                where(f"model.config.{name}"),
                f"{found} in the model's config, but the tokenizer's {name} is {wanted}",
                f"set {name}: {wanted}",
            )
