"""What in a traced loss depends on how its batch is cut: rows that meet, and noise that is drawn once for all of them.

Said of what is certain only; the rest a run finds out (`proof`), or nobody does.
"""

from __future__ import annotations

import os
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from redco_cli.batch_sizes import micro_batch_size
from redco_cli.errors import Problem, RedcoError
from redco_cli.job import Job
from redco_cli.sharding.axes import fresh_dims
from redco_cli.training.cuts import arithmetic, views  # noqa: F401  the rules register themselves
from redco_cli.training.cuts.trace import frames, line_of, place_of, traced
from redco_cli.training.cuts.values import CONSTANT, Batch, Kind, Value, rows
from redco_cli.training.cuts.walk import Draw, Walk

REMEDY = "sum over the examples, Loss(sum, weight); or say whole_batch = True in the plugin: its batches are never cut"
_DRAW_REMEDY = "draw numbers for each example, leading dim B; or say whole_batch = True in the plugin"
_SHARED = "are drawn once for all examples of a micro-batch: the result depends on how the batch is cut"
_FIXED = "are drawn with a key that nothing of the step enters: every step draws the same"
_FIXED_REMEDY = "draw with the rng that loss_fn is given, which is another one in each micro-batch"
_SHOWN = 3
"""Of the shapes that a line draws, so many are named."""
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")))
_MODELS = ("flax", "transformers")
"""Libraries whose layers draw as they see fit: dropout that a batch shares is theirs, and is noise either way."""


def dependences(job: Job) -> list[Problem]:
    """What in the plugin's training loss depends on how a batch is cut; nothing where the plugin keeps it whole, or
    where each example has a gradient of its own.

    Nothing is computed: the loss is traced over a batch, and where it draws numbers over one of twice the size too.
    """
    if job.plugin.whole_batch or job.recipe.train.global_batch_size == 1 or job.recipe.privacy is not None:
        return []
    size = max(micro_batch_size(job.recipe), 2)
    total, draws = read(job, size)
    found = []
    if total.kind in (Kind.QUOTIENT, Kind.MIXED) and total.cause is not None:
        what = f"Loss.sum depends on how the batch is cut into micro-batches: {total.cause.what}"
        found.append(Problem(_place(job, total.cause.equation), what, REMEDY))
    return found + _of_draws(job, size, draws)


def _of_draws(job: Job, size: int, draws: list[Draw]) -> list[Problem]:
    """What is wrong with draws: those of the step's key that examples share, and those for each that know no step."""
    try:
        larger = read(job, 2 * size)[1] if draws else []
    except RedcoError:  # no batch of this run is so large, and the plugin or the model may refuse it
        return []
    if len(larger) != len(draws):  # the loss is another one for another size
        return []
    both = list(zip(draws, larger, strict=True))
    shared = [draw for draw, other in both if not draw.is_fixed and draw.shape == other.shape]
    fixed = [draw for draw, other in both if draw.is_fixed and draw.shape != other.shape]
    return [*_told(job, shared, _SHARED, _DRAW_REMEDY), *_told(job, fixed, _FIXED, _FIXED_REMEDY)]


def _told(job: Job, draws: Sequence[Draw], what: str, remedy: str) -> list[Problem]:
    """One problem for each line that draws."""
    shapes: dict[str, list[str]] = defaultdict(list)
    for draw in draws:
        shapes[_place(job, draw.equation)].append(str(list(draw.shape)))
    found = []
    for place, sizes in shapes.items():
        told = ", ".join([*dict.fromkeys(sizes)][:_SHOWN]) + (", ..." if len(set(sizes)) > _SHOWN else "")
        found.append(Problem(place, f"random numbers ({told}) {what}", remedy))
    return found


def read(job: Job, size: int) -> tuple[Value, list[Draw]]:
    """What the rows of a batch of `size`, at least two, come to in the loss, and the plugin's draws that reach it."""
    closed, abstract = traced(job, size, lambda loss: loss.sum)
    batch, given = Batch(size), replace(CONSTANT, is_given=True)
    arguments = [given for _ in jax.tree.leaves(job.abstract)]
    arguments.append(replace(given, from_key=True))
    arguments += [
        replace(rows([(batch.axis,), *fresh_dims(leaf.shape[1:])]), is_given=True) for leaf in jax.tree.leaves(abstract)
    ]
    walk = Walk(batch)
    (total,) = walk.closed(closed, arguments)
    draws = [walk.draws[number] for number in sorted(total.draws)]
    return total, [draw for draw in draws if draw.is_fixed or _is_of_the_plugin(job, draw.equation)]


def _library(file: str) -> str:
    """Of which installed library a file is; `redco` for one of this package, empty for a user's own."""
    for folder in _LIBRARIES:
        if file.startswith(folder + os.sep):
            return Path(file).relative_to(folder).parts[0]
    return "redco" if Path(file).is_relative_to(Path(__file__).parents[2]) else ""


def _is_of_the_plugin(job: Job, equation: Any) -> bool:
    """Whether the plugin makes a draw, and no layer of a model: what is neither's is whose it was called by."""
    for file, _ in frames(equation):
        if os.path.realpath(file) == os.path.realpath(job.plugin.file):
            return True
        library = _library(file)
        if library in _MODELS or f"{os.sep}redco_cli{os.sep}models{os.sep}" in file:
            return False
        if not library:
            return True
    return False


def _place(job: Job, equation: Any) -> str:
    return place_of(job, line_of(job, equation))
