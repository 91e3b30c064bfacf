"""Reads a model's config: from a hub id, a local directory, or inline from the recipe. No weights are touched.

transformers takes any keyword for a config and keeps a misspelt one as an attribute that nothing reads. Here an inline
config is compared with what its model type knows, and a key or a kind of value that it does not know is refused: it is
a typo. A published config may hold keys that nothing reads; they are a warning, where the config is used.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redco_cli.errors import ModelError
from redco_cli.models.config import byte_tokenizer
from redco_cli.models.config.hub import tell_retries_once
from redco_cli.models.config.tasks import supported_model_types, unknown_model_type
from redco_cli.models.diffusion.reading import CLASS_NAME, read_component
from redco_cli.models.families.registry import family_of
from redco_cli.models.known_keys import any_rope_key, own_keys
from redco_cli.recipe.explain import did_you_mean
from redco_cli.recipe.schema import ModelSection

_CONFIG_FAULTS = (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError)
"""What a config class raises: a config.json, or an inline config, may hold anything."""
_KINDS = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (dict, "a mapping"))


def read_config(section: ModelSection, *, where: Callable[[str], str]) -> Any:
    """The config of a model: of transformers, or of diffusers one of `models.diffusion.config`.

    Args:
        section: `model` of the recipe.
        where: dotted recipe key to its place, for errors.

    Raises:
        ModelError: there is no such model, its config cannot be read, or an inline config holds an unknown key.
    """
    if section.subfolder is not None and section.name is None:
        remedy = "set model.name to the pipeline that it is a folder of"
        raise ModelError(where("model.subfolder"), "given without model.name", remedy)
    if section.config is not None and CLASS_NAME in section.config:
        return read_component(section.config, place=lambda key: where(f"model.config.{key}"), inline=True)
    if section.config is not None:
        return _inline_config(section.config, section.tokenizer, where)
    if section.name is None:
        raise ModelError(
            where("model"), "no model is given", "set model.name or model.config, or write build_model in the plugin"
        )
    return _named_config(section, where)


def model_directory(section: ModelSection) -> Path | None:
    """The local directory with the files of a named model; None for one of the hub."""
    directory = local_directory(section.name or "")
    return directory if directory is None or section.subfolder is None else directory / section.subfolder


def local_directory(name: str) -> Path | None:
    """The directory that a model name stands for; None for a hub id."""
    path = Path(name).expanduser()
    return path if os.path.isdir(path) else None  # which, unlike Path.is_dir, bears a name that no file can have


def _named_config(section: ModelSection, where: Callable[[str], str]) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    assert section.name is not None
    name, directory = "/".join(filter(None, (section.name, section.subfolder))), model_directory(section)
    if directory is None and (section.name.startswith((".", "/", "~")) or section.name.count("/") > 1):
        raise ModelError(
            where("model.name"),
            f"there is no directory {section.name}",
            "give a directory with config.json, or a hub id such as openai-community/gpt2",
        )
    if directory is not None and not (directory / "config.json").is_file():
        raise ModelError(*_without_config(section, name, directory, where))
    tell_retries_once()
    _silence_unread_ropes()
    source = directory or section.name
    inside = {"revision": section.revision} | ({"subfolder": section.subfolder or ""} if directory is None else {})
    try:
        values, _ = PretrainedConfig.get_config_dict(source, **inside)
        if CLASS_NAME in values:
            values.pop("_commit_hash", None)  # of a download
            return read_component(values, place=lambda key: f"{where('model.name')}: {key}", inline=False)
        config = AutoConfig.from_pretrained(source, **inside, trust_remote_code=False)
    except _CONFIG_FAULTS as error:
        raise ModelError(where("model.name"), *_hub_problem(name, directory, error)) from None
    named = config.architectures
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        problem = f"the config.json of {name} has architectures {named!r}, which is no list of names"
        raise ModelError(where("model.name"), problem, "repair the file, or save the model again")
    return config


def _without_config(
    section: ModelSection, name: str, directory: Path, where: Callable[[str], str]
) -> tuple[str, str, str]:
    """Place, problem and remedy for a directory that is no model's: that of a pipeline has models below it."""
    if section.subfolder is not None and not directory.is_dir():
        return where("model.subfolder"), f"there is no directory {name}", "name one of the models of the pipeline"
    models = sorted(file.parent.name for file in directory.glob("*/config.json"))
    if (directory / "model_index.json").is_file() and models:
        problem = f"the directory {name} is a pipeline of several models"
        return where("model.name"), problem, f"set model.subfolder to one of them: {', '.join(models)}"
    problem = f"the directory {name} has no config.json"
    return where("model.name"), problem, "give the directory of a saved model"


class _NoUnreadRopes(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "Unrecognized keys in `rope_scaling`" not in record.getMessage()


def _silence_unread_ropes() -> None:
    """What transformers says each time that it reads a config, is said here once, with the place."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    if not any(isinstance(existing, _NoUnreadRopes) for existing in logger.filters):
        logger.addFilter(_NoUnreadRopes())


def _hub_problem(name: str, directory: Path | None, error: Exception) -> tuple[str, str]:
    """What went wrong with a named model, and the remedy."""
    text = " ".join(str(error).split())
    if "does not recognize this architecture" in text:
        types = ", ".join(supported_model_types())
        return (
            f"{name} is of a model type that transformers does not know",
            f"choose a model of one of the types: {types}",
        )
    if directory is not None:
        return f"the config.json of {name} cannot be used: {text}", "repair the file, or save the model again"
    if "trust_remote_code" in text:
        return (
            f"{name} needs code from the hub, which redco does not run",
            "choose a model that transformers itself knows",
        )
    if "gated" in text or "401" in text:
        return f"{name} is gated or private", "ask for access on its hub page, then log in with `hf auth login`"
    if "connect" in text or "offline" in text:
        return (
            f"{name} is no local directory, and the hub cannot be reached",
            "check the name and the network (and HF_HUB_OFFLINE), or give a local directory",
        )
    if "not a valid model identifier" in text or "Repo id" in text:
        return f"{name} is neither a local directory nor a model on the hub", "check the spelling"
    return f"the config of {name} cannot be read: {text}", "check the name and model.revision"


def _inline_config(given: Mapping[str, Any], tokenizer: str | None, where: Callable[[str], str]) -> Any:
    from transformers import CONFIG_MAPPING

    if "model_type" not in given:
        raise ModelError(
            where("model.config"), "an inline config needs model_type", "add it, such as model_type: llama"
        )
    model_type = given["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise unknown_model_type(model_type, where=where)
    config_class = CONFIG_MAPPING[model_type]
    _check_keys(config_class, given, "model.config", where)
    values = {key: copy.deepcopy(value) for key, value in given.items() if key != "model_type"}  # composites empty them
    if tokenizer == byte_tokenizer.NAME:
        values = _fit_bytes(config_class, values)
    try:
        return config_class(**values)
    except _CONFIG_FAULTS as error:
        raise ModelError(
            where("model.config"), f"{config_class.__name__} refuses these values: {error}", "correct the config"
        ) from None


def _check_keys(config_class: Any, given: Mapping[str, Any], key: str, where: Callable[[str], str]) -> None:
    """Refuses keys that the config class, or that of a nested config, does not know, and values of a wrong kind."""
    own, defaults = _known_keys(config_class)
    for name, value in given.items():
        if name not in own and name not in defaults:
            raise ModelError(
                where(f"{key}.{name}"),
                f"{config_class.model_type} has no such setting",
                did_you_mean(name, sorted(own)),
            )
        nested = _nested_class(config_class, name, value, f"{key}.{name}", where)
        if nested is not None and isinstance(value, dict):
            _check_keys(nested, value, f"{key}.{name}", where)
        elif name == "rope_scaling" and isinstance(value, dict):
            _check_rope_keys(value, f"{key}.{name}", where)
        else:
            _check_kind(value, defaults.get(name), f"{key}.{name}", where)


def _check_rope_keys(given: Mapping[str, Any], key: str, where: Callable[[str], str]) -> None:
    """Refuses keys that no kind of scaling has: whoever writes one by hand means another."""
    for name in given:
        if name not in any_rope_key():
            raise ModelError(
                where(f"{key}.{name}"),
                f"no type of rope_scaling has the setting {name}",
                did_you_mean(str(name), sorted(any_rope_key())),
            )


def _known_keys(config_class: Any) -> tuple[set[str], dict[str, Any]]:
    """The settings that a config class names or its models read, and every setting it has with its default."""
    from transformers import PretrainedConfig

    parameters = inspect.signature(config_class.__init__).parameters.values()
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    del named["self"]
    family = family_of(config_class.model_type)
    if family is not None:
        named.update(family.unnamed_settings)
    own = (
        set(named)
        | own_keys(config_class.model_type)
        | set(config_class.attribute_map)
        | set(config_class.sub_configs)
        | {"num_labels", "id2label"}
    )
    defaults = {**PretrainedConfig().to_dict(), "num_labels": 2, "torch_dtype": None, **named}
    return own | {"tie_word_embeddings"}, {
        **dict.fromkeys(own),
        **{k: v for k, v in defaults.items() if v is not inspect.Parameter.empty},
    }


def _nested_class(config_class: Any, name: str, value: Any, key: str, where: Callable[[str], str]) -> Any:
    """The config class of a nested config (`text_config`, `encoder`), None for an ordinary setting."""
    from transformers import CONFIG_MAPPING, AutoConfig

    nested = config_class.sub_configs.get(name)
    if nested is not AutoConfig:
        return nested
    model_type = value.get("model_type") if isinstance(value, dict) else None
    if model_type is None:
        raise ModelError(where(key), "a nested config needs model_type", "add it, such as model_type: bert")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            where(f"{key}.model_type"),
            f"{model_type!r} is no model type",
            unknown_model_type(model_type, where=where).problems[0].remedy,
        )
    return CONFIG_MAPPING[model_type]


def _check_kind(value: Any, default: Any, key: str, where: Callable[[str], str]) -> None:
    """Refuses text where a number belongs and the like; a list may stand for a number (image sizes)."""
    if value is None or isinstance(value, (list, tuple)) or default is None:
        return
    for kind, wanted in _KINDS:
        if isinstance(default, kind):
            fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not fits:
                raise ModelError(
                    where(key), f"{value!r} given, but {wanted} is expected", f"its default is {default!r}"
                )
            return


def _fit_bytes(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """What an inline config leaves open about its vocabulary, it takes from the byte tokenizer."""
    from transformers import CONFIG_MAPPING, AutoConfig

    nested = dict(values)
    for name, inner in config_class.sub_configs.items():
        if isinstance(values.get(name), dict):
            model_type = values[name].get("model_type")
            nested[name] = _fit_bytes(CONFIG_MAPPING[model_type] if inner is AutoConfig else inner, values[name])
    parameters = inspect.signature(config_class.__init__).parameters
    if "vocab_size" in parameters or config_class.sub_configs:
        filled = byte_tokenizer.CONFIG if "vocab_size" in parameters else byte_tokenizer.SPECIAL_IDS
        nested = {**filled, **nested}
    return nested
