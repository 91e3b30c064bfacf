"""Which evaluation of a run is its best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Best = tuple[int, float] | None
"""Step and value of the best evaluation; None without any."""


def finite(value: float | None) -> float | None:
    """A metric that can be ranked: None for one that is not a number, or infinite."""
    return value if value is not None and math.isfinite(value) else None


def improves(value: float | None, best: Best, mode: Literal["min", "max"]) -> bool:
    """Whether an evaluation is better than the best one: of two equals, the earlier one is the best.

    Example:
        >>> improves(0.5, (100, 0.5), "min"), improves(0.4, (100, 0.5), "min"), improves(None, None, "min")
        (False, True, False)
    """
    known = finite(value)
    if known is None or best is None:
        return known is not None
    return known < best[1] if mode == "min" else known > best[1]


def count_unimproved(records: Iterable[Mapping[str, Any]], metric: str, mode: Literal["min", "max"]) -> int:
    """How many evaluations among records of a run, in their order, there were since the best one.

    Example:
        >>> records = [{"kind": "eval", "step": i, "loss": x} for i, x in enumerate([3.0, 2.0, 2.0, None, 2.5])]
        >>> count_unimproved(records, "loss", "min")
        3
    """
    best: Best = None
    count = 0
    for record in records:
        if record.get("kind") == "eval":
            improved = improves(record.get(metric), best, mode)
            best, count = ((record["step"], record[metric]), 0) if improved else (best, count + 1)
    return count
