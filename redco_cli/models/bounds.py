"""Token ids and positions that a model has no row for: an error on the host, where a compiled program computes NaN.

Values are looked at where there are any: in collated batches, and in calls outside of a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from redco_cli.errors import ExampleError, ModelError
from redco_cli.plugin.contract import IGNORED_LABEL

_TOKENS = {"input_ids": "encoder", "decoder_input_ids": "decoder", "labels": "decoder"}
"""Inputs that hold tokens, and labels that are tokens, with the part of a composite model that reads them."""
_BESIDE = {
    "input_ids": ("attention_mask", "position_ids", "segment_ids", "token_type_ids"),
    "inputs": ("attention_mask",),
    "decoder_input_ids": ("decoder_attention_mask", "decoder_position_ids"),
}
"""Inputs that hold tokens, or the samples of a sound, to those that say something of each of them."""
_OF_TOKENS = frozenset({"causal_lm", "masked_lm", "seq2seq", "vision_to_sequence", "speech_to_sequence"})
"""Tasks whose labels are tokens."""


@dataclass(frozen=True)
class Rows:
    """How many rows there are for the values of an input.

    Attributes:
        count: values go from 0 to one less.
        setting: which setting of the config says so.
        what: what a value is.
    """

    count: int
    setting: str
    what: str = "token"


def rows_of(config: Any, task: str, positions: int | None) -> dict[str, Rows]:
    """Name of an input, or of labels, to the rows that there are for its values.

    Args:
        config: the transformers config.
        task: of the model.
        positions: rows of its table of positions; None where it has none.
    """
    rows = {}
    for name, part in _TOKENS.items():
        inner = getattr(config, part, None) or getattr(config, "text_config", None) or config
        decoder = getattr(inner, "decoder_vocab_size", None) if part == "decoder" else None
        size = decoder or getattr(inner, "vocab_size", None)
        if isinstance(size, int) and (name != "labels" or task in _OF_TOKENS):
            rows[name] = Rows(size, "decoder_vocab_size" if decoder else "vocab_size")
    if positions:
        rows["position_ids"] = Rows(positions, "max_position_embeddings", "position")
    return rows


def rows_of_any(models: Iterable[Any]) -> dict[str, Rows]:
    """Name of an input to the most rows that one of several models has for its values.

    Which of them reads a batch only the plugin knows; a value beyond the rows of all of them is wrong for any.

    Args:
        models: of a run. A name that one of them does not bound is left out.
    """
    known = [getattr(model, "rows", {}) for model in models]
    names = set(known[0]).intersection(*known[1:]) if known else set()
    return {name: max((rows[name] for rows in known), key=lambda one: one.count) for name in sorted(names)}


def check_call(rows: Mapping[str, Rows], arguments: Mapping[str, Any], where: str) -> None:
    """Checks the inputs of a call, as far as they have values.

    Raises:
        ModelError: one of them is beyond the rows of the model.
    """
    for name, known in rows.items():
        found = _first_beyond(name, arguments.get(name), known)
        if found is not None:
            raise ModelError(where, *_described(name, found[1], known))


def check_masks(arguments: Mapping[str, Any], where: str) -> None:
    """Checks that masks and positions are as long as what they are of; shapes are known in a trace too.

    Raises:
        ModelError: one is not.
    """
    for main, others in _BESIDE.items():
        for name in others:
            of, array = arguments.get(main), arguments.get(name)
            if of is None or array is None:
                continue
            size, shape = np.shape(of), np.shape(array)
            if len(shape) != 2 or shape[1] != size[-1]:
                problem = f"{name} has shape {list(shape)}, but {main} {list(size)}"
                raise ModelError(where, problem, "give them the same shape")


def check_batch(rows: Mapping[str, Rows], batch: Mapping[str, Any]) -> None:
    """Checks a collated batch.

    Raises:
        ExampleError: a value is beyond the rows of the model; `row` says in which row of the batch.
    """
    for name, known in rows.items():
        found = _first_beyond(name, batch.get(name), known)
        if found is not None:
            raise ExampleError("collate_fn", *_described(name, found[1], known), row=found[0])


def _first_beyond(name: str, array: Any, known: Rows) -> tuple[int, int] | None:
    """Row and value of the first that is beyond; None for none, and where values are not at hand."""
    if array is None or isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    values = np.asarray(array)
    if values.dtype.kind not in "iu" or values.ndim < 2:
        return None
    beyond = values >= known.count
    if name != "labels":  # what is no label is at least written as a number below 0
        beyond |= values < 0
    if not beyond.any():
        return None
    place = tuple(int(index[0]) for index in np.nonzero(beyond))
    return place[0], int(values[place])


def _described(name: str, value: int, known: Rows) -> tuple[str, str]:
    problem = f"{name} has the {known.what} {value}, but the model has {known.count} ({known.setting})"
    if value == IGNORED_LABEL:
        return problem, f"{IGNORED_LABEL} marks labels that carry no loss; fill inputs with the padding id"
    if known.what == "position":
        return problem, "make sequences shorter: data.max_length; positions begin at 0"
    return problem, "take the tokenizer of the model, or add its tokens with model.added_tokens"
