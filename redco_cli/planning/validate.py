"""Everything that can be wrong with a recipe, found in seconds: nothing is allocated, no weights are read."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from redco_cli.adapters.quantized.program import seen_params
from redco_cli.batch_sizes import micro_batch_size
from redco_cli.data.collate import collated
from redco_cli.data.encoded.buckets import LENGTHS
from redco_cli.data.encoded.encode import described
from redco_cli.data.encoded.rows import Rows
from redco_cli.data.encoded.windows import EncodedStream, looked_at
from redco_cli.data.mixed.streams import MixedStream
from redco_cli.data.mixture import Mixture
from redco_cli.data.places import Locate, place_of
from redco_cli.encoding.rows import first_examples
from redco_cli.errors import DataError, PluginError, Problem
from redco_cli.examples import stages_of
from redco_cli.job import Job, first_batch
from redco_cli.plugin.calls import call_output, describe, prove
from redco_cli.plugin.chat.shapes import recognised_shapes
from redco_cli.plugin.contract import IGNORED_LABEL, Stage
from redco_cli.plugin.shapes import shapes_of
from redco_cli.privacy.accounting import Budget
from redco_cli.row_notes import NOTHING_REMEDY, Notes, RowCounts
from redco_cli.training.cuts.findings import dependences
from redco_cli.training.cuts.means import refuse_means
from redco_cli.training.state import frozen_paths, partition
from redco_cli.training.timeline import Timeline

SHOWN_EXAMPLES = 2
LOOKED_AT, LOOKED_SECONDS, PART = 1000, 5.0, 50
"""Rows of each split that are collated, in parts, to find what is wrong with them; fewer where they take long."""
_LONGEST_LETTER = 4
"""Bytes of one letter, each of which may be a token."""
PLACES = 3
"""Of the rows of a kind, so many are named."""


@dataclass(frozen=True)
class MaskedTokens:
    """The decoded tokens of one sequence, and how much each counts in the loss; 0 for those that carry none."""

    title: str
    tokens: list[str]
    weights: list[float]

    @property
    def carries_loss(self) -> list[bool]:
        """For each token whether it counts."""
        return [weight > 0 for weight in self.weights]


def summary(job: Job, timeline: Timeline, privacy: Budget | None) -> dict[str, Any]:
    """What the recipe comes to: model, data, batch, steps, privacy; as plain data for `console.result`."""
    always = getattr(job.model, "frozen", ())
    frozen = frozen_paths(job.model.abstract, job.recipe.train.freeze, always, job.where("train.freeze"))
    trainable, rest = partition(job.model.abstract, frozen)
    buckets = job.buckets(job.train_rows, "train")
    length = None if buckets is None else buckets.lengths[-1]
    batch = job.collate("train")(first_examples(job.train_rows, min(8, micro_batch_size(job.recipe))), length=length)
    rows, warnings = _rows(job), [*_repeated(job), *refuse_means(job), *dependences(job), *_output(job)]
    return {
        "recipe": str(job.loaded.path),
        "plugin": job.plugin.file,
        "parameters": {"trainable": _count(trainable), "frozen": _count(seen_params(rest))},
        "examples": {
            "train": len(job.train_examples) if hasattr(job.train_examples, "__len__") else "streamed",
            "eval": 0 if job.eval_examples is None else len(job.eval_examples),
            **_per_source(job),
        },
        **_encoded(job),
        "rows": {split: found for split, (found, _) in rows.items()},
        "batch": describe({name: np.asarray(leaf) for name, leaf in batch.items()}),
        "steps": timeline.steps,
        "epochs": None if timeline.steps_per_epoch is None else float(timeline.steps / timeline.steps_per_epoch),
        "warmup": timeline.warmup,
        **({} if privacy is None else {"privacy": privacy.described()}),
        "eval_every": timeline.eval_every,
        "checkpoint_every": timeline.checkpoint_every,
        "warnings": [f"{one.where}: {one.problem}; {one.remedy}" for one in (*warnings, *_varying(job, rows))],
    }


def _repeated(job: Job) -> list[Problem]:
    """A step with more examples than there are has some of them twice; an outer loop brings its own."""
    size, examples = job.recipe.train.global_batch_size, job.train_size
    if examples is None or size <= examples or job.plugin.run_fn is not None:
        return []
    problem = f"a step of {size} examples is more than an epoch, of {examples}: it has some of them more than once"
    return [Problem(job.where("train.global_batch_size"), problem, f"{examples} are all of them")]


def _output(job: Job) -> list[Problem]:
    """What `output_fn` makes of outputs that are all 0, for those of the first batch nobody has computed.

    What it raises may be of these numbers, and is only told; what it returns breaks the contract whatever they are.

    Raises:
        PluginError: it returned no list, another number of predictions, or what JSON cannot hold.
    """
    if job.plugin.output_fn is None or "predict" not in stages_of(job.recipe) or job.eval_examples is None:
        return []
    outputs = prove(job.prediction, job.abstract, batch := first_batch(job, "predict"))
    zeros, size = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), outputs), len(next(iter(batch.values())))
    with tempfile.TemporaryDirectory() as folder:  # for what it may draw
        ctx = job.context("predict")
        ctx = replace(ctx, recipe=ctx.recipe.model_copy(update={"output_dir": folder}))
        try:
            call_output(job.plugin, ctx, zeros, size)
        except PluginError as error:
            if error.__cause__ is None:
                raise
            (told,) = error.problems
            return [replace(told, problem=f"with outputs that are all 0, {told.problem.splitlines()[0]}")]
    return []


def _varying(job: Job, rows: Mapping[str, tuple[Mapping[str, Any], int]]) -> list[Problem]:
    """A `collate_fn` whose batches have more shapes than a few lengths have, of which each is compiled."""
    shapes = max((count for _, count in rows.values()), default=0)
    if shapes <= LENGTHS or job.plugin.encode_fn is not None:
        return []
    looked_at = ", ".join(f"{found['looked_at']} {split} examples" for split, (found, _) in rows.items())
    problem = f"batches of the first {looked_at} have up to {shapes} shapes, and each is one more compilation"
    return [Problem(job.collate_place, problem, "pad to data.max_length, or to the next of a few lengths")]


def _per_source(job: Job) -> dict[str, int | str]:
    """How many examples an epoch has of each dataset, where there are several; of streams, about what share."""
    sources, examples = job.recipe.data.sources("train"), job.train_examples
    if isinstance(examples, MixedStream) and examples.is_spread:
        shares = [f"about {share:.0%}" for share in examples.shares]
        return dict(zip(sources, shares, strict=True))
    if not isinstance(examples, Mixture) or len(sources) < 2:
        return {}
    return {key: len(part.numbers) for key, part in zip(sources, examples.parts, strict=True)}


def _encoded(job: Job) -> dict[str, Any]:
    """The lengths of texts, and the rows made of them, where a plugin has an `encode_fn`."""
    found: dict[str, Any] = {}
    for split, given in (("train", job.train_rows), ("eval", job.eval_rows)):
        rows = looked_at(given)
        if rows is not None:
            streamed = {"of the first": len(rows.encoded)} if isinstance(given, EncodedStream) else {}
            lengths = {**streamed, "tokens": described(rows.encoded.lengths)}
            found[split] = {**lengths, "rows": len(rows), "packed": rows.is_packed}
            buckets = job.buckets(given, "train") if split == "train" else None
            if buckets is not None:
                filled = buckets.filled(job.recipe.train.global_batch_size)
                found[split] |= {"padded_to": list(buckets.lengths), "filled": round(filled, 4)}
            elif split == "train" or rows.is_packed:
                found[split]["filled"] = round(rows.filled, 4)
    return {"encoded": found} if found else {}


def _rows(job: Job) -> dict[str, tuple[dict[str, Any], int]]:
    """What collating the first rows of each split notes: how many were cut or empty, and where the first are.

    With it, how many shapes their batches have, the number of rows apart.

    Raises:
        DataError, PluginError: a row cannot be used, or there is nothing to learn.
    """
    found: dict[str, tuple[dict[str, Any], int]] = {}
    splits: tuple[tuple[Stage, Any], ...] = (("train", job.train_examples), ("eval", job.eval_examples))
    for split, examples in splits:
        if examples is None:
            continue
        with recognised_shapes() as shapes:
            counts, places, is_all, sizes = _looked_at(job, split, examples)
        encoded = isinstance(job.train_rows, Rows)  # of which all texts were looked at
        problem = counts.nothing_to_learn() if split == "train" and not encoded else ""
        if problem and (is_all or counts.rows >= LOOKED_AT):
            raise DataError(job.where("data.train"), problem, NOTHING_REMEDY)
        noted = {what: {"rows": count, "at": places[what]} for what, count in counts.noted.items()}
        recognised = {"shapes": dict(shapes.most_common())} if shapes else {}
        found[split] = {"looked_at": counts.rows, "all": is_all, **recognised, **noted}, sizes
    return found


def _looked_at(job: Job, split: Stage, examples: Any) -> tuple[RowCounts, dict[str, list[str]], bool, int]:
    """The counts of the first rows, the first places of each kind, whether these were all, and how many shapes."""
    counts, places, shapes = RowCounts(), dict[str, list[str]](), set[str]()
    stage: Stage = split if job.plugin.prepare_fn is None else "prepare"  # which reads what an example is
    collate, began = job.collate(stage), time.monotonic()
    size = len(examples) if hasattr(examples, "__len__") else None
    chosen = (examples[index] for index in range(size)) if size is not None else iter(examples)
    while part := list(itertools.islice(chosen, min(PART, LOOKED_AT - counts.rows))):
        first = counts.rows

        def locate(row: int, first: int = first) -> str:
            return place_of(examples, first + row)

        def noted(notes: Notes, size: int = len(part), locate: Locate = locate) -> None:
            counts.add([True] * size, notes)
            for what, rows in notes.items():
                known = places.setdefault(what, [])
                known.extend(locate(row) for row in rows[: PLACES - len(known)])

        shapes.add(str(shapes_of(collated(collate, part, job.collate_place, locate, noted))))
        if time.monotonic() - began > LOOKED_SECONDS:
            break
    return counts, places, counts.rows == size, len(shapes)


def masked_sequences(job: Job) -> Iterator[MaskedTokens]:
    """The first training sequences with what carries loss, where a batch has `input_ids` and `labels`."""
    if job.plugin.prepare_fn is not None:
        return
    examples = first_examples(job.train_examples, SHOWN_EXAMPLES)
    with recognised_shapes() as shapes:
        batch: Mapping[str, Any] = job.collate("train")(examples)
    ids, labels = np.asarray(batch.get("input_ids", ())), np.asarray(batch.get("labels", ()))
    if ids.ndim != 2 or job.tokenizer is None:
        return
    mask = np.asarray(batch.get("attention_mask", np.ones_like(ids))).astype(bool)
    decode = partial(getattr(job.tokenizer, "tokenizer", job.tokenizer).decode, skip_special_tokens=False)
    carrying = labels != IGNORED_LABEL
    aligned = labels.shape == ids.shape and bool((labels == ids)[carrying].all())  # else they are targets
    given = np.asarray(batch.get("weights", ()))
    weights = np.where(carrying, given if given.shape == labels.shape else 1.0, 0.0)
    shape = f", {next(iter(shapes))}" if len(shapes) == 1 else ""
    for row in range(len(ids)):
        title = f"training example {row + 1}{shape}"
        if aligned:
            kept = mask[row] | carrying[row]
            tokens = _texts(decode, ids[row][kept].tolist())
            yield MaskedTokens(title, tokens, weights[row][kept].tolist())
        elif labels.ndim == 2:
            tokens = _texts(decode, ids[row][mask[row]].tolist())
            answer = _texts(decode, labels[row][carrying[row]].tolist())
            counts = [0.0] * (len(tokens) + 1) + weights[row][carrying[row]].tolist()
            yield MaskedTokens(title, [*tokens, " => ", *answer], counts)


def _texts(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    """The text of each token; a letter of several tokens stands at the last of them."""
    texts, open_ids = [], list[int]()
    for token in ids:
        open_ids.append(token)
        text = decode(open_ids)
        is_part = text.endswith("\ufffd") and len(open_ids) < _LONGEST_LETTER
        texts.append("" if is_part else text)
        open_ids = open_ids if is_part else []
    return [*texts[:-1], decode(open_ids)] if open_ids else texts


def _count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
