"""What a checkpoint says of itself, beside its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redco_cli.plugin.shapes import Shapes
from redco_cli.training.saving.ranking import Best

_SINCE = frozenset({"outer", "segments", "skipped", "digests", "init_shapes", "identity", "accepted", "loss_scale"})
"""What checkpoints of earlier versions do not say."""


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps done.
        metric: the value that ranks it; None when it was not evaluated.
        best: step and value of the run's best evaluation until then, saved or not; None without any.
        put_off: whether an evaluation was due at this step that a signal or an error left undone.
        recipe: the resolved recipe, as plain data.
        data: where the run is in data of unknown length; None for data whose order follows from the step alone.
        outer: the values of an outer loop, as `outer_state.to_saved` writes them; None without one.
        segments: `Timeline.segments` as plain data; None in checkpoints of earlier versions: what the recipe says.
        skipped: steps without an update until then.
        loss_scale: as `precision.loss_scale.values_of` writes it; None where nothing computes in float16.
        digests: by name, of the parameters of the models that are never updated.
        init_shapes: of the batch that the model is built with, as `plugin.shapes` writes them.
        identity: digests by name of the code (`plugin`) and the `data` of the run; None in earlier versions.
        accepted: changes of these that the run went on with: at which step, what, why, and what has changed.
    """

    step: int
    metric: float | None
    best: Best
    put_off: bool
    recipe: Mapping[str, Any]
    data: Mapping[str, Any] | None = None
    outer: Mapping[str, Any] | None = None
    segments: Sequence[Mapping[str, int]] | None = None
    skipped: int = 0
    loss_scale: tuple[float, int] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    init_shapes: Shapes | None = None
    identity: Mapping[str, Mapping[str, str]] | None = None
    accepted: Sequence[Mapping[str, Any]] = field(default_factory=list)


def read_meta(restored: Any, step: int) -> Meta:
    """What the JSON of a checkpoint says.

    Args:
        restored: plain data.
        step: that the name of its directory says.

    Raises:
        ValueError: it is no such thing, or says that it is of another step.
    """
    known = Meta.__annotations__.keys()
    if not isinstance(restored, dict) or not known - _SINCE <= restored.keys() <= known:
        raise ValueError(f"meta does not say {', '.join(known)}")
    if restored["step"] != step:
        raise ValueError(f"it says that it is of step {restored['step']}")
    best = restored["best"] and (int(restored["best"][0]), float(restored["best"][1]))
    return Meta(**{**restored, "best": best})
