"""Steps whose loss or gradient is not finite: skipped with a warning, until they are too many in a row."""

from __future__ import annotations

import math

from redco_cli.console import warn
from redco_cli.errors import TrainingError
from redco_cli.job import Job
from redco_cli.row_notes import NOTHING_REMEDY
from redco_cli.runtime.peers.census import RowCensus
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.training.saving.checkpoint import Checkpoints

_NO_WEIGHT = "no position of the batch carries loss", "look at what collate_fn masks and loss_fn counts"
_NOT_FINITE = (
    "loss or gradient is not finite",
    "lower train.learning_rate, lengthen train.warmup, lower train.max_grad_norm, or look at the data",
)

_LOSS_FROM_THE_FIRST = (
    "the loss is not finite from the first step on, before any update",
    "look at the data and loss_fn, not at the learning rate: ids of tokens or classes beyond the table or the "
    "number of classes, a logarithm of 0 or a division by it, nan in the data or in the weights that it begins with",
)
_GRADIENT_FROM_THE_FIRST = (
    "the loss is finite, but its gradient is not, from the first step on, before any update",
    "look at loss_fn, not at the learning rate: a root or a norm at 0, or jnp.where around a division or logarithm of "
    "0, whose gradient is nan on the side that is not taken too: make the argument safe instead",
)


def handle_skipped_step(
    job: Job,
    step: int,
    streak: int,
    weight: float,
    loss: float,
    checkpoints: Checkpoints,
    census: RowCensus,
    loss_scale: float | None,
) -> None:
    """Warns of a skipped step, once for all processes; of many in a row at the first, second, fourth and so on.

    Args:
        job: its recipe says how many in a row end the run.
        step: the optimizer step.
        streak: how many were skipped in a row, this one included.
        weight: what its loss was divided by.
        loss: of the step.
        checkpoints: of which the last is named.
        census: of the rows read, of which is told what was noted where no position carries loss.
        loss_scale: by which the loss was scaled, where a model computes in float16.

    Raises:
        TrainingError: they are too many.
    """
    reason, remedy = _NO_WEIGHT if weight == 0 else _NOT_FINITE
    if weight and streak == step and (loss_scale is None or not math.isfinite(loss)):
        reason, remedy = _GRADIENT_FROM_THE_FIRST if math.isfinite(loss) else _LOSS_FROM_THE_FIRST
    elif weight and loss_scale is not None:
        reason = f"{reason} in float16 with loss_scale {loss_scale:g}, which is halved"
        remedy = f"set model.dtype: bfloat16 where the device has it; {remedy}"
    if streak < job.recipe.train.max_nonfinite_steps:
        if is_main_process() and streak.bit_count() == 1:
            warn(f"step {step}: {reason}; the update is skipped ({streak} in a row)")
        return
    checkpoints.wait()
    steps = checkpoints.steps()
    good = f"last checkpoint: {checkpoints.path(steps[-1])}" if steps else "no checkpoint was due yet"
    noted = census.so_far().line() if weight == 0 else ""
    raise TrainingError(
        f"step {step}",
        f"{reason}, {streak} steps in a row; the parameters are those of step {step - streak}; {good}"
        f"{'; ' if noted else ''}{noted}",
        remedy,
    )


def refuse_to_learn_nothing(job: Job, step: int, skipped: int, weight: float, census: RowCensus) -> None:
    """Ends a run of which no row has carried loss, once it has read all of them.

    A single batch without weight is allowed; so nothing is refused before.

    Args:
        job: for the place of its data.
        step: the optimizer step.
        skipped: how many steps of the run were skipped.
        weight: what the loss of this one was divided by.
        census: of the rows read.

    Raises:
        TrainingError: there is nothing to learn.
    """
    if weight or skipped < step or step * job.recipe.train.global_batch_size < census.stop:
        return
    counts = census.so_far()
    problem = counts.nothing_to_learn() or f"nothing to learn: no step of {step} has a position that carries loss"
    raise TrainingError(job.where("data.train"), problem, NOTHING_REMEDY)
