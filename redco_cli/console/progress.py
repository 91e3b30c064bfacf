"""How far a long job has come: one live line at the bottom of a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from redco_cli.console.numbers import compact, duration, readable
from redco_cli.console.screen import note, say, spelled_out, spoken

_PLAIN_INTERVAL = 10.0  # seconds between two plain lines about a count
_REFRESH_PER_SECOND = 4  # about 1 ms of drawing per second
_BAR_WIDTH = (8, 24)  # least and most cells


class _Field(NamedTuple):
    """A part of a line, `label value unit`. Where room is short the highest rank gives way first; rank 0 stays."""

    rank: int
    label: str
    value: str
    unit: str = ""


class TrainProgress:
    """How training goes; a context manager.

    The time left follows the speed of the last updates, compilation left out; evaluations to come are expected to cost
    as much per step as they did so far.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._start, self._step = total_steps, start_step, start_step
        self._console, self._clock = console or spoken(), clock
        self._fields: list[_Field] = []
        self._logged: dict[str, str] = {}
        self._began = clock()
        self._compiling: tuple[str, float] | None = None  # what, and since when
        self._compile_seconds = 0.0
        self._phase: tuple[str, float] | None = None
        self._phase_seconds = 0.0
        self._next_line = 0.0
        self._marks = deque([(self._began, start_step)], maxlen=10)  # training time and step of the last updates
        self._live = _live(self._console, self._draw)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(
        self,
        step: int,
        loss: float,
        learning_rate: float,
        tokens_per_second: float | None,
        examples_per_second: float,
        extra: Mapping[str, float] | None = None,
        padding: float | None = None,
    ) -> None:
        """Shows the state after optimizer step `step`.

        Args:
            step: optimizer steps done.
            loss: of the step.
            learning_rate: likewise.
            tokens_per_second: None where tokens are not counted.
            examples_per_second: the same of examples.
            extra: further numbers.
            padding: share of positions without a token, from 0 to 1; shown where it is more than a hundredth.
        """
        self._end_phase()
        self._step = step
        self._marks.append((self._clock() - self._compile_seconds - self._phase_seconds, step))
        fields = [_Field(1, "loss", readable(loss))]
        shown = {**{name: readable(value) for name, value in (extra or {}).items()}, **self._logged}
        fields += [_Field(8, name, text) for name, text in shown.items()]
        fields.append(_Field(5, "lr", f"{learning_rate:.1e}"))
        if tokens_per_second is not None:
            fields.append(_Field(4, "", compact(tokens_per_second), "tokens/s"))
        if padding is not None and padding > 0.01:
            fields.append(_Field(7, "", f"{padding:.0%}", "padding"))
        fields.append(_Field(6, "", compact(examples_per_second), "examples/s"))
        self._fields = fields
        if not self._live:
            say(self._console, _joined([self._counted(), *fields, *self._time_left()]).plain)

    def logged(self, values: Mapping[str, float]) -> None:
        """Shows what an outer loop logs, each name with its last value, from the next step on."""
        for name, value in values.items():
            self._logged[name] = str(value) if isinstance(value, Integral) else readable(float(value))

    def evaluated(self, step: int, values: Mapping[str, float], best: bool) -> None:
        """Says what an evaluation found, on a line of its own that stays."""
        self._end_phase()
        found = "  ".join(f"{name} {readable(value)}" for name, value in values.items())
        say(self._console, ("eval", "bold"), f" {step}/{self._total}  {found}", ("  best" if best else "", "green"))

    @contextmanager
    def compiling(self, what: str, why: str = "") -> Iterator[None]:
        """Says that `what` is being compiled and why (`first batch of shape [8, 128]`), and how long it took."""
        activity, began = f"compiling {what}{f' ({why})' if why else ''}", self._clock()
        self._compiling = activity, began
        if not self._live:
            say(self._console, activity)
        try:
            yield
        finally:
            seconds = self._clock() - began
            self._compiling = None
            self._compile_seconds += seconds
            if self._phase:  # compilation within a phase must not be left out twice
                self._phase = self._phase[0], self._phase[1] + seconds
        if seconds > 1:
            note(f"compiled {what} in {duration(seconds)}", self._console)

    def phase(self, name: str, done: int, total: int | None) -> None:
        """Shows that something else than training goes on (`evaluating`), until the next `update` or `evaluated`."""
        now = self._clock()
        if self._phase is None:
            self._next_line = now + _PLAIN_INTERVAL
        self._phase = f"{name} {_of(done, total)}", self._phase[1] if self._phase else now
        if not self._live and now >= self._next_line:
            self._next_line = now + _PLAIN_INTERVAL
            say(self._console, self._phase[0])

    def _end_phase(self) -> None:
        if self._phase:
            self._phase_seconds += self._clock() - self._phase[1]
            self._phase = None

    def _counted(self) -> _Field:
        return _Field(0, "step", _of(self._step, self._total))

    def _time_left(self) -> list[_Field]:
        (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return []
        per_step = (last_time - first_time) / (last_step - first_step)
        per_step += self._phase_seconds / (last_step - self._start)
        return [_Field(3, "eta", duration(per_step * (self._total - last_step)))]

    def _draw(self) -> Text:
        activity = self._compiling or self._phase
        if activity:
            what, since = activity
            fields = [_Field(1, "", what), _Field(2, "", duration(self._clock() - since))]
        else:
            fields = [*self._fields, _Field(7, "", duration(self._clock() - self._began)), *self._time_left()]
        return _fitted([self._counted(), *fields], self._step / self._total, self._console)


class CountProgress:
    """How far a count has come (`predicting 120/500 examples`); a context manager."""

    def __init__(
        self,
        what: str,
        total: int | None,
        start: int = 0,
        *,
        unit: str = "examples",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._start, self._done = start, start
        self._compiling: str | None = None
        self._console, self._clock = console or spoken(), clock
        self._began = clock()
        self._next_line = self._began + _PLAIN_INTERVAL
        self._live = _live(self._console, self._draw)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, done: int) -> None:
        """Shows that `done` of the total are done; in plain lines now and then, and at the end."""
        self._done = done
        now = self._clock()
        if not self._live and (now >= self._next_line or done == self._total):
            self._next_line = now + _PLAIN_INTERVAL
            say(self._console, _joined(self._counted()).plain)

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Says that `what` is being compiled, and leaves the time it takes out of the rate."""
        began = self._clock()
        self._compiling = f"compiling {what}"
        if not self._live:
            say(self._console, self._compiling)
        try:
            yield
        finally:
            self._compiling = None
            self._began += self._clock() - began

    def _counted(self) -> list[_Field]:
        fields = [_Field(0, self._what, _of(self._done, self._total), self._unit)]
        seconds, count = self._clock() - self._began, self._done - self._start
        if seconds > 0 and count > 0:
            fields.append(_Field(2, "", compact(count / seconds), f"{self._unit}/s"))
            if self._total is not None:
                fields.append(_Field(1, "eta", duration((self._total - self._done) * seconds / count)))
        return fields

    def _draw(self) -> Text:
        if self._compiling:
            return _fitted([self._counted()[0], _Field(1, "", self._compiling)], None, self._console)
        return _fitted(self._counted(), self._done / self._total if self._total else None, self._console)


def _live(console: Console, draw: Callable[[], Text]) -> Live | None:
    """The live line of a terminal. What a plugin prints meanwhile goes above it, unless stdout leads elsewhere."""
    if not console.is_terminal:
        return None
    return Live(
        console=console,
        get_renderable=draw,
        refresh_per_second=_REFRESH_PER_SECOND,
        redirect_stdout=sys.stdout.isatty(),
    )


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"


def _joined(fields: Sequence[_Field]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for index, field in enumerate(fields):
        line.append("  " if index else "")
        line.append(f"{field.label} " if field.label else "", "dim")
        line.append(field.value)
        line.append(f" {field.unit}" if field.unit else "", "dim")
    return line


def _fitted(fields: Sequence[_Field], share: float | None, console: Console) -> Text:
    """The fields that fit in one line, and a bar for the `share` done where room is left."""
    kept = [field._replace(label=spelled_out(field.label), value=spelled_out(field.value)) for field in fields]
    while kept[1:] and _joined(kept).cell_len > console.width:
        kept.pop(max(range(len(kept)), key=lambda index: (kept[index].rank, index)))
    line = _joined(kept)
    room = min(_BAR_WIDTH[1], console.width - line.cell_len - 2)
    if share is None or room < _BAR_WIDTH[0]:
        return line
    done, todo = ("━", "─") if console.encoding.startswith("utf") else ("#", "-")
    full = round(room * min(share, 1.0))
    bar = Text.assemble("  ", (done * full, "green"), (todo * (room - full), "dim"))
    return _joined(kept[:1]).append_text(bar).append("  " if kept[1:] else "").append_text(_joined(kept[1:]))
