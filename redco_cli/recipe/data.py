"""The `data` section: where examples come from, and what becomes of them before a batch."""

from __future__ import annotations

from typing import Literal

from redco_cli.recipe.section import Positive, Section, Strings


class SourceSection(Section):
    """One dataset, as `datasets.load_dataset` takes it."""

    path: str
    """`json` (also .jsonl), `csv`, `parquet`, `text`, `arrow`, a hub id, or a directory made by `save_to_disk`."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split, with slices: `train`, `test[:10%]`."""
    data_files: str | Strings | None = None
    """Files or glob patterns; relative ones are searched from the recipe's folder, then the working directory."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    limit: Positive | None = None
    """Use only the first so many examples."""


class DataSection(Section):
    """Where examples come from; not needed when the plugin has `load_examples`."""

    train: SourceSection | None = None
    """Training examples."""
    eval: SourceSection | None = None
    """Examples that evaluation, and prediction without `--input`, cover exactly once."""
    max_length: Positive = 512
    """Longest sequence in tokens; the built-in plugins cut longer examples."""
    packing: bool | Literal["auto"] = "auto"
    """Several texts in a row of `max_length` tokens, which then is an example of `train.global_batch_size`: for plugins
    with `encode_fn` and models with `segment_ids` (redco's decoders). `auto` packs where that can be."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """Of a text longer than `max_length` keep the beginning, all of it as several, or nothing; with `encode_fn`."""
    streaming: bool = False
    """Read the training data as it comes, without a local copy; it then has no known length."""
    shuffle: bool = True
    """Training order: a fresh permutation per epoch, a pure function of (seed, epoch, index)."""
    shuffle_buffer: Positive = 10_000
    """Examples held for shuffling when streaming."""
    workers: Positive = 2
    """Threads that read and collate ahead of the device."""
