"""The files of an exported model: weights written tensor by tensor, and what transformers and vLLM read beside them."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from redco_cli.exporting.tensors import Model, Tensor, usual_dtype
from redco_cli.exporting.tokenizer import save_byte_tokenizer
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.models.config.tasks import GENERATING, flax_class_names
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.families.registry import in_old_keys
from redco_cli.models.weights.files import DTYPES, INDEX_SUFFIX, Array

SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in one file, where a tensor is not larger."""
_CODES = {numpy: code for code, numpy in DTYPES.items()} | {"bool": "BOOL"}
WRITTEN = frozenset(_CODES)
"""The types of tensors that can be written, by numpy's names."""
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.spm",
    "normalizer.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "chat_template.*",
)
"""What a saved tokenizer or processor consists of; `additional_chat_templates` is a directory."""
_TEMPLATES = "additional_chat_templates"


def write_weights(
    tensors: Sequence[Tensor],
    directory: Path | None,
    told: Callable[[int], None],
    names: Literal["pt", "flax"],
    stem: str = "model",
    header: Mapping[str, str] | None = None,
) -> OSError | None:
    """Writes tensors as they are fetched.

    Args:
        tensors: with names of their own.
        directory: an empty one; None for a process that only takes part in fetching.
        told: called with the number of tensors fetched so far, after each.
        names: whose names and layouts they have.
        stem: how the names of files begin.
        header: more to say at the beginning of each file.

    Returns:
        Why it could not be written; all tensors have been fetched all the same, so that no process waits for this one.
    """
    failure = None
    files = _files(tensors, stem)
    counter = itertools.count(1)
    for name, members in files.items():
        fetched = _fetched(members, counter, told)
        try:
            if directory is not None and failure is None:
                _write_file(directory / name, members, fetched, {"format": names, **(header or {})})
        except OSError as error:
            failure = error
        for _ in fetched:  # what could not be written
            pass
    if directory is not None and failure is None and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {tensor.name: name for name, members in files.items() for tensor in members},
        }
        (directory / f"{stem}.safetensors{INDEX_SUFFIX}").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
    return failure


def _fetched(tensors: Sequence[Tensor], counter: Iterator[int], told: Callable[[int], None]) -> Iterator[Array]:
    for tensor in tensors:
        yield tensor.fetch()
        told(next(counter))


def _files(tensors: Sequence[Tensor], stem: str) -> dict[str, list[Tensor]]:
    """The name of each file, and what is in it."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": one for number, one in enumerate(shards, start=1)}


def _write_file(path: Path, tensors: Sequence[Tensor], values: Iterator[Array], said: Mapping[str, str]) -> None:
    """One safetensors file: the size of the header, the header, and the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": dict(said)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in values:
            file.write(array.reshape(-1).view(np.uint8).data)


def write_config(model: Model, tensors: Sequence[Tensor], directory: Path) -> None:
    """`config.json`, with the class that PyTorch loads it into and the type of the weights; of diffusers as it was."""
    if isinstance(model, DiffusionModel):
        text = json.dumps(dict(model.config.stored), indent=2, sort_keys=True)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
        return
    from transformers.models.auto.modeling_auto import (  # as a name of its package it would need torch
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    config = copy.deepcopy(model.config)
    if isinstance(model, DecoderModel):
        config = in_old_keys(config, where=lambda key: f"config: {key}")
        classifies = model.decoder.num_labels
        names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if classifies else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        architecture = names[config.model_type]
    else:
        architecture = flax_class_names(config.model_type)[model.task].removeprefix("Flax")
    config.architectures = [architecture]
    if hasattr(config, "quantization_config"):  # of weights that were unpacked when they were read
        del config.quantization_config
    config.dtype = usual_dtype(tensors)
    config.to_json_file(directory / "config.json")


def write_generation_config(model: Model, source: Path | None, directory: Path) -> None:
    """`generation_config.json` of a model that generates: that of `source` where it has one."""
    from transformers import GenerationConfig

    name = "generation_config.json"
    if model.task not in GENERATING:
        return
    if source is not None and (source / name).is_file():
        shutil.copyfile(source / name, directory / name)
    else:
        config = model.generation_config or GenerationConfig.from_model_config(model.config)
        config.to_json_file(directory / name)


def write_tokenizer(tokenizer: Any, source: Path | None, directory: Path) -> None:
    """The files of a tokenizer or processor: those in `source`, or what `tokenizer` itself saves."""
    if isinstance(tokenizer, ByteTokenizer):
        save_byte_tokenizer(directory)
    elif tokenizer is not None:
        tokenizer.save_pretrained(directory)
    elif source is not None:
        for file in {file for pattern in _TOKENIZER for file in source.glob(pattern) if file.is_file()}:
            shutil.copyfile(file, directory / file.name)
        if (source / _TEMPLATES).is_dir():
            shutil.copytree(source / _TEMPLATES, directory / _TEMPLATES)
