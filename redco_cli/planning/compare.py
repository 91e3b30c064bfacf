"""Two plans side by side, figure by figure: what another mesh costs more (`--why`), or another model (`--diff`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from redco_cli.planning.report import Comparison, Difference, Report

TOTAL = "total"


def compare(first: Report, second: Report) -> Comparison:
    """The figures of two plans, those that only one of them has as zero of the other.

    Args:
        first: the plan that is reported.
        second: what it is compared with.
    """
    times = [_seconds(first), _seconds(second)]
    return Comparison(
        first=_label(first),
        second=_label(second),
        first_fits=first.fits,
        second_fits=second.fits,
        seconds=_differences(*times) if all(times) else (),
        memory=_differences(dataclasses.asdict(first.memory), dataclasses.asdict(second.memory)),
        traffic=_differences(_traffic(first), _traffic(second)),
    )


def _seconds(report: Report) -> Mapping[str, float]:
    """What a step is made of; nothing where that is not known."""
    return {} if report.speed is None else {term.name: term.seconds for term in report.speed.terms}


def _label(report: Report) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in report.chosen.mesh.items())
    length = "" if report.seq_length is None else f" of {report.seq_length} tokens"
    step = f"{report.global_batch_size} examples{length}, micro-batch {report.chosen.micro_batch_size}"
    return f"{report.model} on {mesh} ({step}, remat {report.chosen.remat}, {report.dtype})"


def _traffic(report: Report) -> Mapping[str, float]:
    moved: dict[str, float] = {}
    for one in report.collectives:
        name = f"{one.kind} over {one.axis}"
        moved[name] = moved.get(name, 0) + one.bytes
    return moved


def _differences(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[Difference, ...]:
    """Each figure, the largest difference first, and their sum."""
    found = [Difference(name, float(first.get(name, 0)), float(second.get(name, 0))) for name in {**first, **second}]
    found.sort(key=lambda one: -abs(one.second - one.first))
    return (*found, Difference(TOTAL, float(sum(first.values())), float(sum(second.values()))))
