"""The tokenizer or processor that belongs to a model: the built-in byte tokenizer, or what transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from redco_cli.console import note
from redco_cli.errors import ModelError
from redco_cli.models.config import byte_tokenizer
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.models.config.chat_template import limit_templates
from redco_cli.models.config.read import local_directory, read_config
from redco_cli.models.config.tasks import choose_task, flax_class_names
from redco_cli.models.vocabulary import AddedTokens, set_vocab_size, vocab_size_of
from redco_cli.recipe.schema import ModelSection

_LOADERS = {
    "image_classification": "AutoImageProcessor",
    "clip": "AutoProcessor",
    "vision_to_sequence": "AutoProcessor",
    "speech_to_sequence": "AutoProcessor",
}
"""Task to the class that loads what prepares its inputs; text is prepared by `AutoTokenizer`."""

_PIPELINE_FOLDER = "tokenizer"
"""Where a pipeline of several models keeps the tokenizer of them all."""
_OF_LOADER = {"AutoImageProcessor": {"use_fast": False}}
"""Loader to what it is told besides: the fast image processors need torchvision."""
_FILES = ("tokenizer*", "vocab*", "*.model", "preprocessor_config.json", "processor_config.json")
_OTHER_TOKENIZER = "leave it out, or name a tokenizer of transformers in model.tokenizer"
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def load_tokenizer(section: ModelSection, *, where: Callable[[str], str]) -> Any:
    """The tokenizer of a recipe, or the processor where the model takes images or sound.

    Args:
        section: `model` of the recipe.
        where: dotted recipe key to its place, for errors.

    Returns:
        A `ByteTokenizer`, or what transformers loads from `model.tokenizer` (or else from `model.name`), with the chat
        template and the tokens that the recipe gives it; None when the recipe names neither, and for a directory
        without any tokenizer file; with `model.subfolder` that of the pipeline. Code from a hub is never run. Of a
        model that reads images and writes text it is a processor with a `tokenizer` and, where its files have one, an
        `image_processor`.

    Raises:
        ModelError: it cannot be loaded, has more ids than the model, other special ids than an inline config says, or
            cannot take what the recipe gives it.
    """
    tokenizer = _load_own(section, where)
    if section.chat_template is not None:
        _set_template(tokenizer, section, where)
    if section.added_tokens is not None:
        new = _add_tokens(tokenizer, section, where)
        if len(new) < len(section.added_tokens):
            count = len(section.added_tokens) - len(new)
            note(f"{where('model.added_tokens')}: the tokenizer has {count} of {len(section.added_tokens)} already")
    return tokenizer


def add_rows(config: Any, section: ModelSection, *, where: Callable[[str], str]) -> AddedTokens | None:
    """Gives the config of a model a vocabulary in which the added tokens of its recipe have rows.

    Args:
        config: of transformers; its `vocab_size` grows where it has to.
        section: `model` of the recipe.
        where: dotted recipe key to its place.

    Returns:
        Which rows they have; None where none is new.

    Raises:
        ModelError: the tokenizer cannot be loaded, or takes no tokens, or the model has no vocabulary.
    """
    if section.added_tokens is None:
        return None
    found = _add_tokens(_load_own(section, where), section, where)
    rows = vocab_size_of(config)
    if rows is None:
        problem = f"{config.model_type} has not one vocabulary that could grow"
        raise ModelError(where("model.added_tokens"), problem, "leave them out")
    if not found:
        return None
    if found.stop > rows:
        set_vocab_size(config, found.stop)
    return AddedTokens(found.start, found.stop, rows)


def _add_tokens(processor: Any, section: ModelSection, where: Callable[[str], str]) -> range:
    """Adds the tokens of a recipe, and returns the ids of those that are new."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if isinstance(tokenizer, ByteTokenizer) or not hasattr(tokenizer, "add_special_tokens"):
        kind = "there is no tokenizer" if tokenizer is None else "the tokenizer takes no more tokens"
        raise ModelError(where("model.added_tokens"), f"given, but {kind}", _OTHER_TOKENIZER)
    tokens, known = list(section.added_tokens or ()), tokenizer.get_vocab()
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_additional_special_tokens=False)
    vocabulary = tokenizer.get_vocab()
    if lost := [token for token in tokens if token not in vocabulary]:
        raise ModelError(where("model.added_tokens"), f"the tokenizer makes no token of {lost[0]!r}", _OTHER_TOKENIZER)
    new = sorted(vocabulary[token] for token in tokens if token not in known)
    return range(new[0], new[-1] + 1) if new else range(0)


def _set_template(processor: Any, section: ModelSection, where: Callable[[str], str]) -> None:
    """Gives a tokenizer, and the processor around it, the chat template of a recipe."""
    from transformers.utils import chat_template_utils

    place = where("model.chat_template")
    if isinstance(processor, ByteTokenizer) or not hasattr(processor, "apply_chat_template"):
        kind = "there is no tokenizer" if processor is None else "the tokenizer takes none"
        raise ModelError(place, f"given, but {kind}", _OTHER_TOKENIZER)
    for holder in {id(one): one for one in (processor, getattr(processor, "tokenizer", processor))}.values():
        holder.chat_template = section.chat_template
    limit_templates(processor, "model.chat_template", place)
    try:
        chat_template_utils._compile_jinja_template(section.chat_template)
    except (TemplateError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise ModelError(place, f"is no Jinja template: {line}{error}", "correct it") from None


def _load_own(section: ModelSection, where: Callable[[str], str]) -> Any:
    """The tokenizer as it was saved."""
    name = section.tokenizer or section.name
    if name is None:
        return None
    has_model = section.name is not None or section.config is not None
    config = read_config(section, where=where) if has_model else None
    if section.tokenizer == byte_tokenizer.NAME:
        tokenizer: Any = ByteTokenizer()
    elif section.tokenizer is not None:
        tokenizer = _load("AutoTokenizer", name, None, where("model.tokenizer"))
    else:
        directory, folder = local_directory(name), "" if section.subfolder is None else _PIPELINE_FOLDER
        if directory is not None and not _has_files(directory / folder):
            return None
        has_flax = bool(flax_class_names(read_config(section, where=where).model_type))
        task = choose_task(section.task, config, where=where) if has_flax else section.task
        loader = _LOADERS.get(task, "AutoTokenizer")
        tokenizer = _load(loader, name, section.revision, where("model.name"), folder)
        if task == "vision_to_sequence":
            tokenizer = _with_images(tokenizer, name, section.revision, where("model.name"))
    if config is not None:
        _check_fit(getattr(tokenizer, "tokenizer", tokenizer), config, section, where)
    return tokenizer


def admit_tokenizer(tokenizer: Any) -> None:
    """Limits the chat templates of a tokenizer that was loaded in another process, as `load_tokenizer` does here.

    Args:
        tokenizer: or processor, or None.
    """
    if tokenizer is not None and not isinstance(tokenizer, ByteTokenizer):
        limit_templates(tokenizer, str(getattr(tokenizer, "name_or_path", "a tokenizer")), "model.tokenizer")


def _has_files(directory: Path) -> bool:
    return any(next(directory.glob(pattern), None) for pattern in _FILES)


def _load(loader: str, name: str, revision: str | None, where: str, folder: str = "") -> Any:
    import transformers

    source = local_directory(name)
    if source is None and name.startswith((".", "/", "~")):
        raise ModelError(where, f"there is no directory {name}", "check the path")
    try:
        tokenizer = getattr(transformers, loader).from_pretrained(
            source or name,
            revision=revision or "main",
            subfolder=folder,
            trust_remote_code=False,
            **_OF_LOADER.get(loader, {}),
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            where,
            f"{loader} cannot load {name}: {' '.join(str(error).split())}",
            "check the name and the network, or set model.tokenizer to a hub id, a directory, or byte",
        ) from None
    limit_templates(tokenizer, name, where)
    return tokenizer


def _with_images(processor: Any, name: str, revision: str | None, where: str) -> Any:
    """A tokenizer together with the image processor that was saved beside it.

    `AutoProcessor` gives the tokenizer alone where no file names a class for both, as in `nlpconnect/vit-gpt2-*`.
    """
    from transformers import PreTrainedTokenizerBase, VisionTextDualEncoderProcessor
    from transformers.utils import cached_file

    file, source = "preprocessor_config.json", local_directory(name) or name
    if not isinstance(processor, PreTrainedTokenizerBase):
        return processor
    try:
        found = cached_file(source, file, revision=revision or "main", _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        problem = f"{file} of {name} cannot be loaded: {' '.join(str(error).split())}"
        raise ModelError(where, problem, "check the name and the network") from None
    if found is None:
        return processor
    return VisionTextDualEncoderProcessor(_load("AutoImageProcessor", name, revision, where), processor)


def _check_fit(tokenizer: Any, config: Any, section: ModelSection, where: Callable[[str], str]) -> None:
    """Every id must be a row of the embedding, and a model from scratch must end texts as its tokenizer does."""
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
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
