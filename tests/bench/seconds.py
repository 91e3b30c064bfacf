"""Estimated step times beside published ones, for the configurations that were published.

    python tests/bench/seconds.py              the table of errors of README.md, by the programs that are kept
    python tests/bench/seconds.py --plan       by the plans of the same steps, which need no compiler
    python tests/bench/seconds.py 26 40        other rows
    python tests/bench/seconds.py --unseen     those that nothing was fitted on or chosen for

The steps are in tests/chips/steps.py, with what is kept of each; `python -m tests.chips.steps` compiles them anew.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from redco_cli.chips.speeds import peak
from redco_cli.planning.targets.seconds import StepTime, step_time
from redco_cli.sharding.compiled.events import from_json
from tests.chips.steps import FITTED, JUDGED, STEPS, UNSEEN, kept

_MODELS = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.1-70b": "Llama-3.1-70B",
    "llama-2-70b": "Llama-2-70B",
    "llama-2-7b": "Llama-2-7B",
}
_CONFIGS = {
    "12": "Llama-3.1-405B",
    "14": "Gemma-3-12B",
    "15 on 2": "Gemma-3-12B",
    "15 on 4": "Gemma-3-12B",
    "23 of 16B": "16B",
    "23 of 32B": "32B",
    "25": "32B",
    "Mistral": "Mistral-7B",
    "Mixtral": "Mixtral-8x7B",
}
"""By row, those that have no name of ours."""


@dataclass(frozen=True)
class Compared:
    """A row of the table.

    Attributes:
        name: its number.
        published: seconds.
        found: as predicted.
        flops: of the model in a step, the same for both.
        rate: operations a second of all devices at peak.
    """

    name: str
    published: float
    found: StepTime
    flops: float
    rate: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.found.typical / self.published

    @property
    def mfu(self) -> tuple[float, float]:
        """Published and predicted, counting the operations as we do."""
        return self.flops / self.rate / self.published, self.flops / self.rate / self.found.typical


def compared(name: str, *, by_plan: bool = False) -> Compared:
    """A published step beside its prediction."""
    step, known = STEPS[name], kept()[name]
    chips = step.chips
    found = step_time(from_json(known["plan" if by_plan else "timeline"]), chips)
    return Compared(name, step.seconds, found, known["flops"], chips.devices * peak(chips.chip, "bfloat16"))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of values of which no two are the same.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20)])
    0.5
    """
    ranks = [[sorted(column).index(value) for value in column] for column in zip(*pairs, strict=True)]
    apart = sum((one - other) ** 2 for one, other in zip(*ranks, strict=True))
    return 1 - 6 * apart / (len(pairs) * (len(pairs) ** 2 - 1))


def lines(names: Sequence[str], *, by_plan: bool = False) -> Iterator[str]:
    """The table, and what its errors come to."""
    yield "| row | model | chips | published | predicted | range | error | MFU published | predicted |"
    yield "|--:|---|---|--:|--:|--:|--:|--:|--:|"
    rows = [compared(name, by_plan=by_plan) for name in names]
    for row in rows:
        step, found = STEPS[row.name], row.found
        model = _MODELS.get(step.model) or _CONFIGS[row.name]
        note = " \\*" if row.name in FITTED else ""
        between = f"{found.low:.2f} to {found.high:.2f}"
        mfu = " | ".join(f"{one:.1%}" for one in row.mfu)
        times = f"{row.published:.3f} s | {found.typical:.3f} s | {between} | {row.ratio - 1:+.1%}"
        yield f"| {row.name}{note} | {model} | {step.target.replace('*', ' x ')} | {times} | {mfu} |"
    yield ""
    judged = [row for row in rows if row.name in JUDGED]
    counted = judged or rows
    if len(counted) > 1:
        errors = [abs(row.ratio - 1) for row in counted]
        which = f"the {len(judged)} rows that are judged" if judged else f"these {len(rows)} rows"
        yield (
            f"Of {which}: median error {statistics.median(errors):.1%}, largest "
            f"{max(errors):.1%}, rank correlation of MFU {rank_correlation([row.mfu for row in counted]):.2f}."
        )
    ratios = [row.ratio for row in counted]
    middle = statistics.median(ratios)
    figure = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {len(ratios)} rows)"
    yield f"=> step time, estimated / published, {'by the plan' if by_plan else 'compiled'}: {figure}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("rows", nargs="*", help="default: those that are judged")
    given = parser.parse_args()
    for line in lines(given.rows or (UNSEEN if given.unseen else JUDGED), by_plan=given.plan):
        print(line, flush=True)
