"""Building blocks for plugins: pure functions that most of them need. The built-in plugins use nothing else.

Shape letters: B batch, L length of a sequence, N length of an output, V vocabulary or number of classes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from redco_cli.errors import PluginError
from redco_cli.plugin.chat.masks import Masked as Masked
from redco_cli.plugin.chat.masks import TrainOn as TrainOn
from redco_cli.plugin.chat.masks import masked as masked
from redco_cli.plugin.chat.masks import prompt_ids as prompt_ids
from redco_cli.plugin.chat.shapes import Columns as Columns
from redco_cli.plugin.chat.shapes import Conversation as Conversation
from redco_cli.plugin.chat.shapes import Text as Text
from redco_cli.plugin.chat.shapes import recognise as recognise
from redco_cli.plugin.chat.shapes import refuse_conversation as refuse_conversation
from redco_cli.plugin.contract import IGNORED_LABEL, Batch, Context, Params
from redco_cli.plugin.guard import with_remedy
from redco_cli.plugin.pictures import image_grid as image_grid
from redco_cli.plugin.pictures import picture as picture
from redco_cli.plugin.rows import check_kind as check_kind
from redco_cli.plugin.rows import column as column
from redco_cli.plugin.rows import cut as cut
from redco_cli.plugin.rows import note_without_loss as note_without_loss
from redco_cli.plugin.scores.labels import class_scores as class_scores
from redco_cli.plugin.scores.labels import number_scores as number_scores
from redco_cli.plugin.scores.losses import next_token_loss as next_token_loss
from redco_cli.plugin.scores.losses import token_loss as token_loss
from redco_cli.plugin.scores.texts import exact_match as exact_match
from redco_cli.plugin.scores.texts import rouge as rouge
from redco_cli.recipe.shipped import shipped_plugins
from redco_cli.row_notes import note_rows as note_rows

Ints = NDArray[np.int32]


def pad(
    rows: Sequence[Sequence[int]],
    length: int,
    value: int,
    side: Literal["left", "right"] = "right",
    dtype: type[np.generic] = np.int32,
) -> tuple[Any, Ints]:
    """Rows of different lengths as one array of a fixed shape, so that a compiled step fits every batch.

    Args:
        rows: B lists of token ids or labels, none longer than `length`.
        length: L.
        value: what fills the rest, `tokenizer.pad_token_id` for ids, `IGNORED_LABEL` for labels.
        side: where it goes; models continue prompts that are padded on the left.
        dtype: of the padded rows.

    Returns:
        The padded rows [B, L] and their mask [B, L], 1 where a row has an element of its own.

    Raises:
        ValueError: a row is longer than `length`: what to cut is the plugin's decision.

    >>> pad([[5, 6, 7], [8]], 4, value=0, side="left")[0].tolist()
    [[0, 5, 6, 7], [0, 0, 0, 8]]
    """
    padded = np.full((len(rows), length), value, dtype)
    mask = np.zeros((len(rows), length), np.int32)
    for index, row in enumerate(rows):
        if len(row) > length:
            raise ValueError(f"row {index} has {len(row)} elements, but the length is {length}")
        start = length - len(row) if side == "left" else 0
        padded[index, start : start + len(row)] = row
        mask[index, start : start + len(row)] = 1
    return padded, mask


def stack_rows(ctx: Context, rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Encoded rows as one batch, each field padded to `ctx.length`: on the left for prompts, else on the right.

    Args:
        ctx: with the tokenizer; its stage says which side. Without a length it is `data.max_length`.
        rows: name to 1-D array, of the same names, as `encode_fn` returns them or several in a row.

    Returns:
        Each field [B, L]: ids padded with the padding id, labels with `IGNORED_LABEL`, others with 0; and
        `attention_mask`, 1 where a row has a token.
    """
    length = ctx.recipe.data.max_length if ctx.length is None else ctx.length
    side: Literal["left", "right"] = "left" if ctx.stage == "predict" else "right"
    fill = {"input_ids": padding_id(tokenizer_of(ctx)), "labels": IGNORED_LABEL}
    for row in rows:
        if row.keys() != rows[0].keys() or "input_ids" not in row:
            problem = (
                f"stack_rows got {', '.join(row)} beside {', '.join(rows[0])}: rows have input_ids, and fields alike"
            )
            remedy = "return the same fields for every example; of builtin(), take encode_fn too with collate_fn"
            raise PluginError("collate_fn", problem, remedy)
    batch: dict[str, NDArray[Any]] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        is_float = any(np.asarray(value).dtype.kind == "f" for value in values if len(value))
        batch[name], mask = pad(values, length, fill.get(name, 0), side, np.float32 if is_float else np.int32)
        if name == "input_ids":
            batch["attention_mask"] = mask
    return batch


def tokenizer_of(ctx: Context) -> Any:
    """`ctx.tokenizer`, or that of a processor, for a plugin that cannot do without.

    Raises:
        PluginError: the recipe names none, and neither does its model.
    """
    tokenizer = getattr(ctx.tokenizer, "tokenizer", ctx.tokenizer)
    if tokenizer is None or getattr(tokenizer, "model_input_names", None) == ["pixel_values"]:  # for images alone
        name = ctx.recipe.plugin.module
        raise PluginError(
            "model.tokenizer", f"the plugin {name} needs a tokenizer", "set it: byte, a hub id or a directory"
        )
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], *, target: bool = False) -> list[list[int]]:
    """Token ids of each text, with the marks that the tokenizer adds, and at the end the end mark in any case.

    Args:
        tokenizer: as `ctx.tokenizer`.
        texts: any number of them.
        target: whether these are targets of a seq2seq model, which some tokenizers treat unlike sources.
    """
    end = tokenizer.eos_token_id
    rows = tokenizer(text_target=texts) if target else tokenizer(texts)
    return [list(ids) if ids[-1:] == [end] else [*ids, end] for ids in rows["input_ids"]]


def padding_id(tokenizer: Any) -> int:
    """The id to pad with: some tokenizers have none, and then the end mark serves, as masks hide padding anyway."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def generate(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """What the model makes of a batch by `predict.generation`: see `Model.generate`.

    It reads `input_ids` and `attention_mask` [B, L], or of a batch without them `pixel_values`.

    Token ids [B, N]; [B, D, N] with `num_samples` above 1; and with `log_probs` a dict.
    """
    settings = ctx.recipe.predict.generation.model_dump()
    named = {"rng": rng, "tokenizer": ctx.tokenizer, **settings}
    if "input_ids" not in batch and "pixel_values" in batch:
        return ctx.model.generate(params, batch["pixel_values"], **named)
    for name in ("input_ids", "attention_mask"):
        if name not in batch:
            remedy = (
                'parts.generate reads input_ids and attention_mask: `pad(rows, length, value, side="left")` makes both'
            )
            raise with_remedy(KeyError(name), remedy)
    return ctx.model.generate(params, batch["input_ids"], batch["attention_mask"], **named)


def decode(tokenizer: Any, outputs: Any) -> list[Any]:
    """What `generate` returned, as B predictions: texts without padding, end mark and other special tokens.

    With `num_samples` above 1 each is a list of them; with `log_probs` each text is a dict of `text` and `log_probs`,
    one for each token up to the end.

    Args:
        tokenizer: as `ctx.tokenizer`.
        outputs: token ids [B, N] or [B, D, N], or a dict with `ids`, `log_probs` and `lengths`, as numpy arrays.
    """
    ids = np.asarray(outputs["ids"] if isinstance(outputs, Mapping) else outputs)
    texts: list[Any] = tokenizer.batch_decode(ids.reshape(-1, ids.shape[-1]), skip_special_tokens=True)
    if isinstance(outputs, Mapping):
        rows = np.asarray(outputs["log_probs"]).reshape(-1, ids.shape[-1]).tolist()
        lengths = np.asarray(outputs["lengths"]).reshape(-1).tolist()
        texts = [
            {"text": text, "log_probs": row[:length]} for text, row, length in zip(texts, rows, lengths, strict=True)
        ]
    if ids.ndim == 2:
        return texts
    samples = ids.shape[1]
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def held_out(key: str, share: float) -> bool:
    """Whether `key` belongs to the eval split: a fixed pseudo-random choice of about `share` (0 to 1) of all keys.

    The choice depends on nothing but the key, so a split by it is the same in every run, and two examples with the
    same key can never lie on both sides.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) < share * 2**32


def builtin(name: str) -> ModuleType:
    """The built-in plugin `name`, for a plugin that differs from it in a function or two.

        seq2seq = builtin("seq2seq")
        collate_fn, loss_fn, predict_fn = seq2seq.collate_fn, seq2seq.loss_fn, seq2seq.predict_fn

    Raises:
        PluginError: there is none of that name.
    """
    known = shipped_plugins()
    if name not in known:
        raise PluginError(f"builtin({name!r})", "no built-in plugin has this name", f"known: {', '.join(known)}")
    qualified = f"redco_builtin_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, known[name])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module  # before it runs: dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[qualified]


_LEFT_OUT = re.compile("_.*_|distutils|encodings|idlelib|lib2to3|pydoc_data|tests?|turtledemo|.*-.*")
"""Folders of tests, of tables, of installed packages (`site-packages`), and those that not every Python has."""


@cache
def standard_library() -> Mapping[str, str]:
    """Real text for examples that need no network: the source of this Python's standard library.

    About seven million characters. Files that are not plain ASCII are left out: in the rest a character is a byte.

    Returns:
        Dotted module name to source text, sorted by name.

    Raises:
        PluginError: this Python came without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources: dict[str, str] = {}
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if not _LEFT_OUT.fullmatch(name)]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            text = path.read_bytes()
            if text.isascii() and not path.name.startswith("_sysconfigdata"):
                module = ".".join(path.relative_to(root).with_suffix("").parts)
                sources[module.removesuffix(".__init__")] = text.decode()
    if not sources:
        raise PluginError(str(root), "this Python has no library source files", "use a Python installed with them")
    return dict(sorted(sources.items()))
