"""The picture of a run: losses and learning rate over steps, drawn from `metrics.jsonl`; and that of two beside."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from redco_cli.errors import StorageError
from redco_cli.training.records.metrics import read_records

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAIN, _EVAL, _RATE, _BAD = "#2f6db3", "#d1622b", "#5d6b78", "#c1121f"
_INK, _SOFT_INK, _GRID = "#20262c", "#5d6b78", "#e3e7eb"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": "#9aa4ad",
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _SOFT_INK,
    "ytick.color": _SOFT_INK,
}
_FEW = 12  # records below which a smoothed curve would be invention
_LOG_RATIO = 20  # a loss that spans more than this factor is drawn on a log scale


class Curve(NamedTuple):
    """One value over the run.

    Attributes:
        steps: optimizer steps, [N].
        values: nan where the value was not finite, [N].
    """

    steps: np.ndarray
    values: np.ndarray


def plot_losses(metrics_file: Path, png: Path) -> None:
    """Draws train loss (every record, and smoothed), eval loss and learning rate; replaces `png` in one stroke.

    The loss axis is logarithmic when the losses are positive and span more than a factor of 20.

    Args:
        metrics_file: a `metrics.jsonl`; its folder names the run.
        png: where the picture goes.

    Raises:
        StorageError: the records cannot be read, or the picture cannot be written.
    """
    records = read_records(metrics_file)
    name = metrics_file.resolve().parent.name
    _save(lambda: draw_losses(records, name), png, "free space there, or set logging.plot=false")


def plot_two(runs: Mapping[str, Sequence[Mapping[str, Any]]], png: Path) -> None:
    """Draws the losses of two runs, train (smoothed) and eval, in one picture; replaces `png` in one stroke.

    Args:
        runs: name to records, of both.
        png: where the picture goes.

    Raises:
        StorageError: the picture cannot be written.
    """
    _save(lambda: draw_two(runs), png, "choose another file: --plot FILE")


def _save(draw: Callable[[], Figure], png: Path, remedy: str) -> None:
    import matplotlib as mpl

    temporary = png.with_name(f".{png.name}.new")
    with mpl.rc_context(_STYLE):
        figure = draw()
        try:
            figure.savefig(temporary, format="png", dpi=160)
            os.replace(temporary, png)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(str(png), f"cannot be written: {error.strerror}", remedy) from None


def draw_two(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """The figure of two runs: a colour for each, a line for the loss of training, dots for that of evaluation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    drawn = []
    for colour, (name, records) in zip((_TRAIN, _EVAL), runs.items(), strict=True):
        train, evaluation, label = curve(records, "train", "loss"), curve(records, "eval", "loss"), _literal(name)
        values = train.values if len(train.steps) < _FEW else smoothed(train.values)
        axes.plot(train.steps, values, color=colour, linewidth=1.4, label=f"{label}, train")
        if len(evaluation.steps):
            axes.plot(*evaluation, "o--", color=colour, linewidth=0.8, markersize=4, label=f"{label}, eval")
        drawn += [train.values, evaluation.values]
    if spans_decades(np.concatenate(drawn)):
        _use_log_scale(axes)
    axes.set_ylabel("loss")
    _count_steps(axes)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK, handlelength=1.6)
    return figure


def draw_losses(records: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The figure of `records`: the losses above, the learning rate below."""
    from matplotlib.figure import Figure

    train, evaluation = curve(records, "train", "loss"), curve(records, "eval", "loss")
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_train(losses, train)
    _draw_eval(losses, evaluation)
    _draw_nonfinite(losses, train)
    if spans_decades(np.concatenate([train.values, evaluation.values])):
        _use_log_scale(losses)
    losses.set_ylabel("loss")
    losses.set_title(_literal(title), loc="left", fontsize=12, fontweight="bold", pad=10)
    if losses.get_legend_handles_labels()[0]:
        losses.legend(frameon=False, loc="upper right", labelcolor=_INK, handlelength=1.6)
    _draw_rate(rates, curve(records, "train", "learning_rate"))
    _count_steps(rates)
    figure.align_ylabels()
    return figure


def curve(records: Sequence[Mapping[str, Any]], kind: str, name: str) -> Curve:
    """The value `name` of the records of one kind that have it."""
    found = [(record["step"], record[name]) for record in records if record.get("kind") == kind and name in record]
    steps = np.array([step for step, _ in found], dtype=np.float64)
    return Curve(steps, np.array([math.nan if value is None else value for _, value in found], dtype=np.float64))


def smoothed(values: np.ndarray) -> np.ndarray:
    """A line fitted around each record with Gaussian weights, a fiftieth of the records wide.

    Where a moving mean lags behind a falling loss and starts below it, a straight line stays a straight line here.

    Args:
        values: [N]; nan has no weight.

    Returns:
        [N]; nan only where no neighbour has a value.
    """
    width = max(len(values) / 50, 1.0)
    reach = math.ceil(3 * width)
    offset = np.arange(-reach, reach + 1)
    weight = np.exp(-0.5 * (offset / width) ** 2)
    known = np.isfinite(values)

    def moment(power: int, of: np.ndarray) -> np.ndarray:
        return np.convolve(of, weight * offset**power)[reach : reach + len(values)]

    mass, first, second = (moment(power, known.astype(np.float64)) for power in range(3))
    total, tilted = (moment(power, np.where(known, values, 0.0)) for power in range(2))
    spread = mass * second - first**2
    is_line = spread > 1e-9 * mass**2  # else a single neighbour has a value
    upper = np.where(is_line, second * total - first * tilted, total)
    lower = np.where(is_line, spread, mass)
    fitted: np.ndarray = np.divide(upper, lower, out=np.full(len(values), math.nan), where=lower > 0)
    return fitted


def spans_decades(values: np.ndarray) -> bool:
    """Whether a linear axis would press most of `values` flat."""
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(0 < finite.min() < finite.max() / _LOG_RATIO)


def _draw_train(axes: Axes, train: Curve) -> None:
    if len(train.steps) < _FEW:
        if len(train.steps):
            axes.plot(train.steps, train.values, color=_TRAIN, linewidth=1.8, marker=".", label="train")
        return
    axes.plot(train.steps, train.values, color=_TRAIN, linewidth=0.8, alpha=0.28)
    axes.plot(train.steps, smoothed(train.values), color=_TRAIN, linewidth=1.8, label="train (smoothed)")


def _draw_eval(axes: Axes, evaluation: Curve) -> None:
    if not np.isfinite(evaluation.values).any():
        return
    best = int(np.nanargmin(evaluation.values))
    where = f"{evaluation.values[best]:.4g} at step {evaluation.steps[best]:.0f}"
    line = axes.plot(
        *evaluation, "o-", color=_EVAL, linewidth=1.2, markersize=5, label=f"eval (best {where})", zorder=4
    )
    line[0].set(markerfacecolor="white", markeredgewidth=1.5)
    axes.plot(evaluation.steps[best], evaluation.values[best], "o", markersize=6, color=_EVAL, zorder=5)


def _draw_nonfinite(axes: Axes, train: Curve) -> None:
    """A rug along the bottom edge."""
    bad = train.steps[~np.isfinite(train.values)]
    if len(bad):
        across = axes.get_xaxis_transform()
        axes.plot(bad, np.full(len(bad), 0.015), "|", color=_BAD, transform=across, label="train not finite")


def _draw_rate(axes: Axes, rate: Curve) -> None:
    axes.plot(*rate, color=_RATE, linewidth=1.4)
    axes.set_ylabel("learning\nrate")
    finite = rate.values[np.isfinite(rate.values)]
    peak = finite.max() if len(finite) else 0.0
    if peak > 0:
        axes.set_ylim(0, peak * 1.12)
        axes.set_yticks([0, peak], ["0", f"{peak:.1e}"])


def _count_steps(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.02)


def _literal(name: str) -> str:
    """A name in which matplotlib finds no formula."""
    return name.replace("$", r"\$")


def _use_log_scale(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
