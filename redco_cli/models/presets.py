"""Models of well-known sizes by name: their configs, to plan for a model that is neither on disk nor reachable.

`presets.json` holds, for each name, the hub id whose `config.json` it mirrors, the task, the published number of
parameters, and the config. It is data: tests/models/test_presets.py builds every config with PyTorch and counts.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("presets.json")
_VARIANT = re.compile(r"(-(hf|it|pt|base|chat|instruct|v\d+(\.\d+)*|(un)?cased))+$")
"""What hub ids append to the name of a size."""


@dataclass(frozen=True)
class Preset:
    """A model without its weights.

    Attributes:
        name: such as `llama-3.1-8b`.
        hub: the hub id that it mirrors.
        task: as `model.task` of a recipe.
        parameters: how many the paper or the model's hub page counts. It may leave out a padded vocabulary or a task
            head, so the model built from `config` may differ by less than 1 %.
        seq_length: tokens in a training example when nothing else is said: what the model was trained with, at most
            8192. Of an encoder-decoder on each side; of speech, the decoder's; of images, patches and class token.
        config: the Hugging Face config, with `model_type` and `architectures`, or that of diffusers, with
            `_class_name`; the caller's own copy.
    """

    name: str
    hub: str
    task: str
    parameters: int
    seq_length: int
    config: Mapping[str, Any]


def preset(name: str) -> Preset | None:
    """The preset of this name or hub id, in any case of letters; None when there is none.

    >>> preset("gpt2-xl").parameters, preset("openai-community/gpt2-XL").name, preset("gpt2-xxl")
    (1557611200, 'gpt2-xl', None)
    """
    found = _spellings().get(name.lower())
    return None if found is None else Preset(name=found, **copy.deepcopy(_table()[found]))


def preset_names() -> tuple[str, ...]:
    """Every preset, families together and sizes rising."""
    return tuple(_table())


def close_presets(name: str) -> tuple[str, ...]:
    """Preset names that `name` may have meant: up to three alike, the closest first, or else all of its family.

    >>> close_presets("meta-llama/Llama3.1_8B-Instruct")[0], close_presets("mixtral"), close_presets("else")
    ('llama-3.1-8b', ('mixtral-8x7b',), ())
    """
    last = _VARIANT.sub("", name.lower().rpartition("/")[2].replace("_", "-"))
    family = tuple(known for known in preset_names() if known.partition("-")[0] == last.partition("-")[0])
    return tuple(difflib.get_close_matches(last, preset_names(), n=3, cutoff=0.8)) or family


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return table


@functools.cache
def _spellings() -> dict[str, str]:
    """Names and hub ids in small letters, to names."""
    table = _table()
    return {values["hub"].lower(): name for name, values in table.items()} | {name: name for name in table}
