"""The `data` section: where examples come from, and what becomes of them before a batch."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from redco_cli.recipe.section import Positive, Section, Strings, contradiction

_SHARE = re.compile(r"(\d{1,2}(?:\.\d{1,6})?)\s*%")
Lengths = Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]


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


class WeightedSourceSection(SourceSection):
    """One of several datasets to train on."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often each of its examples comes in an epoch: 2 is twice, 0.5 is one half of them, the same in each epoch."""


def _checked_share(text: str) -> str:
    match = _SHARE.fullmatch(text)
    if match is None or not 0 < float(match[1]) < 100:
        raise ValueError("a share of the training examples (5%), or a number of them (500), is expected")
    return text


Share = Annotated[
    str, AfterValidator(_checked_share), WithJsonSchema({"type": "string", "pattern": f"^{_SHARE.pattern}$"})
]
"""`5%`, as it was written."""


class DataSection(Section):
    """Where examples come from; not needed when the plugin has `load_examples`."""

    train: SourceSection | Annotated[tuple[WeightedSourceSection, ...], Field(strict=False, min_length=1)] | None = None
    """Training examples: one dataset, or a list of them, each with its `weight`."""
    eval: (
        SourceSection
        | Annotated[tuple[SourceSection, ...], Field(strict=False, min_length=1)]
        | Share
        | Positive
        | None
    ) = None
    """Examples that evaluation, and prediction without `--input`, cover exactly once: one dataset or a list of them; or
    a share (`5%`) or number (`500`) of the examples of each training dataset, which then is not trained on. Which ones
    follows from their numbers alone: not from `seed`, and for a share not from what is appended."""
    max_length: Positive = 512
    """Longest sequence in tokens; the built-in plugins cut longer examples."""
    packing: bool | Literal["auto"] = "auto"
    """Several texts in a row of `max_length` tokens, which then is an example of `train.global_batch_size`: for plugins
    with `encode_fn` and models with `segment_ids` (redco's decoders). `auto` packs where that can be."""
    buckets: Literal["auto", False] | Lengths = "auto"
    """Lengths that rows are padded to, where they are not packed, and prompts: of a batch, the shortest that holds its
    longest row. For plugins with `encode_fn`. `auto` chooses a few by the lengths of rows; a list is in tokens, besides
    `max_length`; false always pads to that. A loss is the same without dropout, whose noise follows the shape."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """Of a text longer than `max_length` keep the beginning, all of it as several, or nothing; with `encode_fn`."""
    streaming: bool = False
    """Read the training data as it comes, without a local copy; it then has no known length."""
    shuffle: bool = True
    """Training order: a fresh permutation per epoch, a pure function of (seed, epoch, index)."""
    shuffle_buffer: Positive = 10_000
    """When streaming, examples held for shuffling; where rows are packed, examples that are packed together."""
    workers: Positive = 2
    """Threads that read and collate ahead of the device."""

    @model_validator(mode="after")
    def _of_known_length(self) -> DataSection:
        if not self.streaming:
            return self
        remedy = "leave data.streaming out"
        if self.held_out is not None:
            problem = f"{self.eval} given, but with data.streaming the training examples are not known beforehand"
            raise contradiction("data.eval", problem, f"{remedy}, or give data.eval a dataset of its own")
        return self

    @model_validator(mode="after")
    def _buckets_fit(self) -> DataSection:
        lengths = self.buckets if isinstance(self.buckets, tuple) else ()
        if lengths and max(lengths) > self.max_length:
            problem = f"{max(lengths)} is longer than data.max_length {self.max_length}, at which rows are cut"
            raise contradiction("data.buckets", problem, "leave it out of the list, or raise data.max_length")
        return self

    @property
    def held_out(self) -> Fraction | int | None:
        """What of the training examples is the eval data: a share below 1, a number, or None for nothing."""
        if isinstance(self.eval, str):
            return Fraction(self.eval.rstrip("% \t")) / 100
        return self.eval if isinstance(self.eval, int) else None

    def sources(self, split: str) -> dict[str, SourceSection]:
        """The datasets of `train` or `eval`, by their dotted keys; those of `eval` are those of `train` where a share
        of these is held out.
        """
        if split == "eval" and self.held_out is not None:
            return self.sources("train")
        given = getattr(self, split)
        if isinstance(given, tuple):
            return {f"data.{split}.{number}": source for number, source in enumerate(given)}
        return {} if given is None else {f"data.{split}": given}
