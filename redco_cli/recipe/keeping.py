"""The sections about what stays of a run: checkpoints, records and their copies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from redco_cli.recipe.durations import Duration
from redco_cli.recipe.section import Positive, Section


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Accepted = Annotated[tuple[Literal["plugin", "data"], ...], BeforeValidator(_as_list)]
"""One word, or a list of them."""


class CheckpointSection(Section):
    """What is kept of the run."""

    every: Duration | None = None
    """Interval; the last step is always saved; default: with every evaluation."""
    keep: Positive = 3
    """How many of the newest checkpoints stay; the best stays besides."""
    resume: str = "auto"
    """`auto` continues the newest checkpoint in `output_dir`, `never` needs an empty one, a path continues that one."""
    extend: Literal["restart", "stretch"] | None = None
    """How a run goes on whose `train.steps` has grown, where the steps done would have had another learning rate:
    `restart` warms up again to the peak, `stretch` takes the schedule of the new length from here on. Default: not."""
    accept: Accepted = Field(default=(), exclude=True)
    """On the command line only: go on though `plugin`, `data`, or both (`[plugin,data]`), are not those that the
    checkpoint was trained with. It is consent to this one change; checkpoints and records keep it, no recipe does."""


class WandbSection(Section):
    """Weights & Biases sink (extra `wandb`)."""

    project: str
    """Project name."""
    name: str | None = None
    """Run name."""
    entity: str | None = None
    """Team or user."""
    mode: Literal["online", "offline"] = "online"
    """Whether to send as it goes."""


class LoggingSection(Section):
    """What is shown and recorded; `metrics.jsonl` is always written."""

    every: Positive = 10
    """Steps between two records."""
    plot: bool = True
    """Keep `loss.png` in the output directory up to date."""
    tensorboard: bool = False
    """Write TensorBoard events (extra `tensorboard`)."""
    wandb: WandbSection | None = None
    """Send records to Weights & Biases."""
