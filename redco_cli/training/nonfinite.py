"""Steps whose loss or gradient is not finite: skipped with a warning, until they are too many in a row."""

from __future__ import annotations

from redco_cli.console import warn
from redco_cli.errors import TrainingError
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.training.saving.checkpoint import Checkpoints

_NO_WEIGHT = "no position of the batch carries loss", "look at what collate_fn masks and loss_fn counts"
_NOT_FINITE = (
    "loss or gradient is not finite",
    "lower train.learning_rate, lengthen train.warmup, lower train.max_grad_norm, or look at the data",
)


def handle_skipped_step(step: int, streak: int, weight: float, limit: int, checkpoints: Checkpoints) -> None:
    """Warns of a skipped step, once for all processes.

    Args:
        step: the optimizer step.
        streak: how many were skipped in a row, this one included.
        weight: what its loss was divided by.
        limit: how many in a row end the run.
        checkpoints: of which the last is named.

    Raises:
        TrainingError: they are too many.
    """
    reason, remedy = _NO_WEIGHT if weight == 0 else _NOT_FINITE
    if streak < limit:
        if is_main_process():
            warn(f"step {step}: {reason}; the update is skipped ({streak} in a row)")
        return
    checkpoints.wait()
    steps = checkpoints.steps()
    good = f"last checkpoint: {checkpoints.path(steps[-1])}" if steps else "no checkpoint was due yet"
    raise TrainingError(
        f"step {step}",
        f"{reason}, {streak} steps in a row; the parameters are those of step {step - streak}; {good}",
        remedy,
    )
