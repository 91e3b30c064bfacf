"""From examples or rows to a batch: what was not encoded before is now, and cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from redco_cli.data.encoded.encode import LEFT_OUT
from redco_cli.data.encoded.rows import IDS, LABELS, Row, longer_note
from redco_cli.errors import ExampleError, PluginError
from redco_cli.models.bounds import check_batch, rows_of_any
from redco_cli.plugin.calls import call_collate, call_encode
from redco_cli.plugin.contract import IGNORED_LABEL, Context, Example
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.row_notes import WITHOUT_LOSS, note_rows, noting

Collate = Callable[..., Mapping[str, Any]]
"""(examples, step=None, length=None) to a batch: the plugin's `collate_fn`, told the steps done before a batch of
training, and what its rows are padded to: tokens, a function of the length of its longest row, or None for
`data.max_length`."""


def encoded_rows(plugin: LoadedPlugin, ctx: Context, examples: Sequence[Example]) -> list[Mapping[str, Any]]:
    """The examples of a batch as rows: those that were not encoded before are now, and cut; prompts keep their end.

    Raises:
        ExampleError, PluginError: an example cannot be encoded; `row` says which one.
    """
    rows: list[Mapping[str, Any] | None] = []
    for number, example in enumerate(examples):
        try:
            rows.append(example if isinstance(example, Row) else _encoded_now(plugin, ctx, example, number))
        except (ExampleError, PluginError) as error:
            error.row = number
            raise
    like = next((row for row in rows if row is not None), {IDS: (), LABELS: ()})
    empty = Row({name: np.zeros(0, np.asarray(field).dtype) for name, field in like.items()})
    return [empty if row is None else row for row in rows]


def bound_collate(plugin: LoadedPlugin, ctx: Context) -> Collate:
    """The plugin's `collate_fn`, which gets rows where there is an `encode_fn`; what it returns is not checked.

    It runs in a thread of its own, beside others that decode: a fast tokenizer must not be shared between them.
    """
    ctx = replace(ctx, tokenizer=copy.deepcopy(ctx.tokenizer))

    def collate(
        examples: Sequence[Example], step: int | None = None, length: int | Callable[[int], int] | None = None
    ) -> Mapping[str, Any]:
        if plugin.encode_fn is not None:
            examples = encoded_rows(plugin, ctx, examples)
        length = length(max(map(_length, examples))) if callable(length) else length
        told = replace(ctx, step=step, length=ctx.recipe.data.max_length if length is None else length)
        batch: Mapping[str, Any] = call_collate(plugin, told, examples)
        check_batch(rows_of_any(ctx.models.values() or [ctx.model]), batch)
        return batch

    return collate


def bound_measure(plugin: LoadedPlugin, ctx: Context) -> Callable[[Sequence[Example]], list[int]]:
    """Of examples, what the longest field of each needs, by a plugin with an `encode_fn`; in any thread, as above."""
    ctx = replace(ctx, tokenizer=copy.deepcopy(ctx.tokenizer))
    return lambda examples: [_length(row) for row in encoded_rows(plugin, ctx, examples)]


def _length(row: Mapping[str, Any]) -> int:
    return max(map(len, row.values()))


def _encoded_now(plugin: LoadedPlugin, ctx: Context, example: Example, number: int) -> Row | None:
    with noting() as noted:
        fields, length = call_encode(plugin, ctx, example), ctx.recipe.data.max_length
    for what in noted:
        note_rows(what, [number])
    if fields is None and ctx.stage == "predict":
        problem = "encode_fn leaves this example out, but each one has a prediction"
        raise ExampleError("encode_fn", problem, "return an empty list of input_ids, or leave it out of the data")
    if fields is None:  # of a stream, or of data that is only looked at
        note_rows(LEFT_OUT, [number])
        return None
    size = len(fields[IDS])
    if size > length:
        note_rows(longer_note(length, "truncate" if ctx.stage == "predict" else ctx.recipe.data.overflow), [number])
        kept = slice(size - length, None) if ctx.stage == "predict" else slice(length)
        fields = {name: field[kept] if len(field) == size else field for name, field in fields.items()}
    if LABELS in fields and (fields[LABELS][1:] == IGNORED_LABEL).all():
        note_rows(WITHOUT_LOSS, [number])
    return Row(fields)
