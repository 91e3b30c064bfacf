"""From the examples of a split to the rows that a loss reads: encoded once, cut, and packed where that can be.

A plugin without an `encode_fn` reads the examples themselves.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from redco_cli.console import CountProgress, note, warn
from redco_cli.data.encoded.encode import LEFT_OUT, encoded_once
from redco_cli.data.encoded.parallel import Others
from redco_cli.data.encoded.rows import IDS, LABELS, Row, Rows, longer_note
from redco_cli.data.encoded.store import Encoded
from redco_cli.data.encoded.windows import RowStream
from redco_cli.data.examples import is_indexed
from redco_cli.data.mixture import Mixture
from redco_cli.data.reader import Rows as Read
from redco_cli.errors import DataError, ExampleError, PluginError, RecipeError
from redco_cli.models.config.tokenizer import admit_tokenizer
from redco_cli.plugin.calls import call_encode
from redco_cli.plugin.code.digests import encoding_code
from redco_cli.plugin.contract import IGNORED_LABEL, Context, Example
from redco_cli.plugin.encoder import Encoder
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.redaction import holds_secrets
from redco_cli.recipe.schema import Recipe
from redco_cli.row_notes import NOTHING_REMEDY, WITHOUT_LOSS, RowCounts, note_rows, noting
from redco_cli.runtime.cache import cache_directory
from redco_cli.runtime.cores import processes_at_once
from redco_cli.runtime.peers.multihost import is_main_process, process_allgather
from redco_cli.version import __version__

_TOLD = 2000
"""Examples from which on the progress of encoding is shown."""
_MOST, _MEMORY = 32, 2**30
"""Processes that encode beside this one at most, since it reads and writes for all; bytes that each of them takes."""


def refuse_unencoded(
    recipe: Recipe, plugin: LoadedPlugin, models: Mapping[str, Any], where: Callable[[str], str]
) -> None:
    """Refuses what a recipe says of lengths where nobody knows them.

    Args:
        recipe: its `data` section.
        plugin: with or without an `encode_fn`.
        models: all of the run.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: naming the key, and what is in its way.
    """
    data = recipe.data
    if plugin.encode_fn is None:
        remedy = "leave it out, or define encode_fn(ctx, example) in the plugin"
        for key, asked in (("packing", data.packing is True), ("overflow", data.overflow != "truncate")):
            if asked:
                problem = f"{getattr(data, key)} given, but {plugin.file} has no encode_fn, and pads and cuts by itself"
                raise RecipeError(where(f"data.{key}"), problem, remedy)
        return
    if data.packing is True and not _packs(models):
        problem = "true given, but a model takes no segment_ids: texts in a row would see each other"
        raise RecipeError(where("data.packing"), problem, "leave it out; the decoders of redco pack")


def rows_of(plugin: LoadedPlugin, ctx: Context, examples: Any, where: str, *, kept: bool = True) -> Any:
    """The rows that a loss reads.

    Args:
        plugin: with or without an `encode_fn`.
        ctx: for the stage; with the model, which decides whether texts share rows.
        examples: of a split.
        where: the place of the split, for what is said of its texts.
        kept: whether what is encoded is kept on disk.

    Returns:
        The examples themselves where the plugin has no `encode_fn`; and where they are streamed and each text is a row,
        which is encoded with its batch.

    Raises:
        DataError, PluginError: an example cannot be encoded, or there is nothing to learn.
        StorageError: the disk is full.
    """
    if plugin.encode_fn is None or examples is None:
        return examples
    data, place = ctx.recipe.data, f"{plugin.file}: encode_fn"
    packed = data.packing is not False and _packs(ctx.models)
    if not is_indexed(examples):
        is_windowed = packed or data.overflow != "truncate"
        return _row_stream(plugin, ctx, examples, place, where, packed=packed) if is_windowed else examples
    kept_at = _kept_at(plugin, ctx, examples) if kept else None
    every = process_allgather("encoded data is kept", [kept_at is not None, platform.node()])
    in_turn = all(is_kept for is_kept, _ in every)
    beside = 1 if in_turn else [host for _, host in every].count(platform.node())
    others = Others(min(processes_at_once(_MEMORY) // beside, _MOST), note, lambda text: warn(f"{place}: {text}"))
    if in_turn and not is_main_process():
        process_allgather("encoded")  # on a disk that they share, others read what the first has written
    with CountProgress(f"encoding {ctx.stage} data", len(examples)) as progress:

        def done(count: int, total: int) -> None:
            if total >= _TOLD:
                progress.update(count)

        encoded = encoded_once(
            Encoder(plugin, ctx, admit_tokenizer),
            examples,
            measure=IDS,
            where=place,
            kept_at=kept_at,
            done=done,
            others=others,
        )
    if in_turn and is_main_process():
        process_allgather("encoded")
    rows = _rows(ctx, encoded, place, packed=packed)
    _check_agreed(rows, place)
    if packed:
        _check_positions(rows, ctx.models, where)
    counts = RowCounts(len(encoded), rows.notes())
    if not len(rows):
        raise DataError(where, f"nothing is left of it: {counts.line()}", NOTHING_REMEDY)
    if kept and ctx.stage == "train" and (problem := counts.nothing_to_learn()):
        raise DataError(where, problem, NOTHING_REMEDY)
    if kept and (line := counts.line()):
        note(f"{where}: {line}")
    return rows


def _rows(ctx: Context, encoded: Encoded, place: str, *, packed: bool) -> Rows:
    if packed:
        _check_aligned(encoded, place)
    data = ctx.recipe.data
    return Rows(encoded, data.max_length, data.overflow, packed=packed, ignored=IGNORED_LABEL)


def _row_stream(
    plugin: LoadedPlugin, ctx: Context, examples: Any, place: str, where: str, *, packed: bool
) -> RowStream:
    """The rows of a stream; every process makes all of them, and takes its share of each batch."""
    ctx = replace(ctx, tokenizer=copy.deepcopy(ctx.tokenizer))  # for a thread of its own
    data = ctx.recipe.data

    def pack(encoded: Encoded) -> Rows:
        rows = _rows(ctx, encoded, place, packed=packed)
        if packed:
            _check_positions(rows, ctx.models, where)
        return rows

    stream = RowStream(
        examples,
        Encoder(plugin, ctx, admit_tokenizer),
        pack,
        window=data.shuffle_buffer,
        seed=ctx.recipe.seed if data.shuffle else None,
        where=place,
        name=where,
    )
    _check_agreed(stream.first, place)
    return stream


def _packs(models: Mapping[str, Any]) -> bool:
    return all(getattr(model, "packs", False) for model in models.values())


def refuse_unseen_segments(plugin: LoadedPlugin, rows: Any, calls: Sequence[bool]) -> None:
    """Refuses a loss that reads rows of several texts, and tells no model where one ends.

    Args:
        plugin: its loss was traced.
        rows: what that reads.
        calls: of each call of a model in it, whether it was given `segment_ids`.

    Raises:
        PluginError: none was.
    """
    rows = rows.first if isinstance(rows, RowStream) else rows
    if isinstance(rows, Rows) and rows.is_packed and not any(calls):
        problem = "several texts share a row, but no call of the model has segment_ids: they would see each other"
        remedy = "pass on all arrays: ctx.model.next_token_loss(params, **batch, ...); or set data.packing: false"
        raise PluginError(f"{plugin.file}: loss_fn", problem, remedy)


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


def _check_agreed(rows: Rows, where: str) -> None:
    """Refuses rows that are not the same on all processes, each of which reads its share of them."""
    for process, digest in enumerate(digests := process_allgather("encoded rows", rows.digest)):
        if digest != digests[0]:
            problem = f"process {process} made other tokens of the data than process 0"
            remedy = (
                "give all processes the same data, tokenizer and versions, and let encode_fn draw no random numbers"
            )
            raise PluginError(where, problem, remedy)


def _check_positions(rows: Rows, models: Mapping[str, Any], where: str) -> None:
    """Refuses texts that are longer than a model has positions for, which a row itself may be."""
    limits = [model.decoder.learned_positions for model in models.values()]
    limit = min((one for one in limits if one), default=rows.longest)
    if rows.longest > limit:
        problem = f"has texts of {rows.longest} tokens, but the model has positions for {limit}"
        raise DataError(where, problem, f"set data.max_length: {limit}, or cut them with data.packing: false")


def _check_aligned(encoded: Any, where: str) -> None:
    for name, offsets in encoded.offsets.items():
        if not np.array_equal(offsets, encoded.offsets[IDS]):
            problem = f"{name} is not as long as {IDS}, so that texts cannot share a row"
            raise PluginError(where, problem, "return fields of one length, or set data.packing: false")


def _kept_at(plugin: LoadedPlugin, ctx: Context, examples: Sequence[Example]) -> Path | None:
    """Where these examples are kept, encoded by this plugin with this tokenizer; None where that cannot be told."""
    data, code = _identity_of(examples), encoding_code(plugin)
    if data is None or not code or holds_secrets(ctx.recipe.plugin.options):  # the digest would not know these
        return None
    recipe = ctx.recipe.model_dump(mode="json", include={"data": {"max_length"}, "model": True, "plugin": True})
    document = [_versions(), data, ctx.stage, recipe, code, _identity_of_tokenizer(ctx.tokenizer)]
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    return cache_directory().parent / "encoded" / digest.hexdigest()[:32]


def _versions() -> list[str]:
    return [__version__, *(importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2"))]


def _identity_of(examples: Sequence[Example]) -> str | None:
    """What `datasets` makes of the files and all that was done to them; None for a plugin's own examples."""
    if isinstance(examples, Mixture):
        parts = [_identity_of(part.examples) for part in examples.parts]
        return None if None in parts else f"{parts} {examples.choice}"
    return str(examples.dataset._fingerprint) if isinstance(examples, Read) else None


def _identity_of_tokenizer(processor: Any) -> Any:
    tokenizer = getattr(processor, "tokenizer", processor)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    templates = [str(getattr(one, "chat_template", None)) for one in (processor, tokenizer)]
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    if fast is not None:
        document = {**json.loads(fast.to_str()), "truncation": None, "padding": None}  # which calls leave behind
        return [kind, document, str(tokenizer.special_tokens_map), *templates]
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return [kind, sorted(vocabulary.items()), str(getattr(tokenizer, "special_tokens_map", None)), *templates]
