"""What is shown: whole texts without a terminal, the essentials with one."""

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redco_cli import console
from redco_cli.console.screen import _console_on
from redco_cli.errors import Problem, RecipeError, RedcoError

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """A clock that moves only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain():
    return console.open_console(io.StringIO(), terminal=False)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    drawn = console.open_console(io.StringIO(), terminal=True)
    drawn.width = 120
    return drawn


def said(on):
    return on.file.getvalue()


def seen(on):
    """What is left of a terminal's output without its control codes."""
    return CONTROL.sub("", said(on))


# ---------------------------------------------------------------- messages


def test_an_error_is_its_own_text_without_a_terminal(plain):
    error = RecipeError.of(
        [
            Problem("r.yaml:3: train.steps", "'[bold]x[/bold]' given, but a number is expected", "train.steps: [red]"),
            Problem("r.yaml:4: \tmodel" + "x" * 200, "unknown key", "did you mean models?"),
            Problem("", "no place known", ""),
        ]
    )
    console.print_error(error, plain)
    assert said(plain) == f"{error}\n"
    assert said(plain).startswith(
        "r.yaml:3: train.steps: '[bold]x[/bold]' given, but a number is expected\n  -> train.steps: [red]\n"
    )


def test_an_error_on_a_terminal_has_a_bold_place_and_the_same_words(terminal):
    terminal.width = 30  # never cut, so that it can be copied
    error = RedcoError("r.yaml:3: [a]" + "x" * 60, "bad \x1b[31m:smile:", "fix [/it]")
    console.print_error(error, terminal)
    assert f"\x1b[1mr.yaml:3: [a]{'x' * 60}\x1b[0m" in said(terminal)
    assert "\x1b[32mfix [/it]\x1b[0m" in said(terminal)
    assert seen(terminal) == str(error).replace("\x1b", "\\x1b") + "\n"


def test_marks_of_direction_are_spelled_out_on_a_terminal_but_not_what_joins_letters(terminal, plain):
    text = "abc\u202egpj.exe\u2066 \U000e0041 \u0915\u094d\u200d\u0937 \r\tx"
    for on in (terminal, plain):
        console.warn(text, on)
    assert "abc\\u202egpj.exe\\u2066 \\U000e0041 \u0915\u094d\u200d\u0937" in seen(terminal)
    assert "abc\u202egpj.exe\u2066 \U000e0041 \u0915\u094d\u200d\u0937" in said(plain)


def test_the_live_line_obeys_no_name_of_a_metric(terminal, clock):
    with console.TrainProgress(1000, console=terminal, clock=clock) as progress:
        progress.update(
            1, loss=1.0, learning_rate=1e-3, examples_per_second=1.0, tokens_per_second=None, extra={"a\x1b]0;b": 2.0}
        )
    assert "\x1b]" not in said(terminal)
    assert "a\\x1b]0;b" in said(terminal)


def test_what_an_outer_loop_logs_is_seen_from_the_next_step_on(plain, clock):
    now = {"learning_rate": 1e-3, "examples_per_second": 1.0, "tokens_per_second": None}
    with console.TrainProgress(3, console=plain, clock=clock) as progress:
        progress.update(1, 1.0, **now)
        progress.logged({"return": np.float32(21.5), "round": 1})
        progress.logged({"round": 2})
        progress.update(2, 1.0, **now)
        progress.update(3, 1.0, **now)
    first, *others = said(plain).splitlines()
    assert "return" not in first
    assert [line.partition("  lr")[0] for line in others] == [
        "step 2/3  loss 1.000  return 21.50  round 2",
        "step 3/3  loss 1.000  return 21.50  round 2",
    ]


def test_notes_and_warnings_are_one_line_on_stderr(capsys):
    console.note("reading [data]")
    console.warn("first\nsecond")
    assert capsys.readouterr() == ("", "reading [data]\nwarning: first second\n")


def test_text_that_the_stream_cannot_encode_is_spelled_out():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console.note("caf\u00e9 \udc80", console.open_console(stream, terminal=False))
    assert raw.getvalue() == b"caf\\xe9 \\udc80\n"


@pytest.mark.parametrize(
    ("environment", "draws"),
    [
        ({}, True),
        ({"CI": "true"}, False),
        ({"CI": "false"}, True),
        ({"TERM": "dumb"}, False),
        ({"NO_COLOR": "1"}, True),
    ],
)
def test_when_it_draws(monkeypatch, environment, draws):
    for name, value in {"CI": "", "TERM": "xterm", "NO_COLOR": "", **environment}.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: True
    assert _console_on(stream).is_terminal is draws
    assert _console_on(stream) is _console_on(stream)


def test_no_color_means_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    drawn = console.open_console(io.StringIO(), terminal=True)
    console.print_error(RedcoError("here", "wrong", "right"), drawn)
    assert "\x1b[32m" not in said(drawn)
    console.masked_tokens(["a", "b"], [False, True], "row", drawn)
    assert "a[loss]b[/loss]" in seen(drawn)


# ---------------------------------------------------------------- results


DOCUMENT = {
    "output_dir": Path("runs/x"),
    "steps": 100,
    "eval": {"loss": 1.23456789, "accuracy": 0.9, "perplexity": math.inf},
    "resumed": False,
    "best": None,
    "samples": ["def f():\n    pass", "[b]x[/b]"],
    "rows": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}],
}


def test_a_result_as_json_is_one_document(plain):
    console.result(DOCUMENT, True, plain)
    assert json.loads(said(plain), parse_constant=pytest.fail) == {
        "output_dir": "runs/x",
        "steps": 100,
        "eval": {"loss": 1.23456789, "accuracy": 0.9, "perplexity": None},
        "resumed": False,
        "best": None,
        "samples": ["def f():\n    pass", "[b]x[/b]"],
        "rows": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}],
    }


def test_json_on_a_terminal_is_the_same_document(terminal):
    terminal.width = 20
    console.result(DOCUMENT, True, terminal)
    assert json.loads(said(terminal))["samples"] == DOCUMENT["samples"]


def test_a_result_to_read(plain):
    console.result(DOCUMENT, False, plain)
    assert said(plain) == (
        "output_dir  runs/x\n"
        "steps       100\n"
        "eval\n"
        "  loss        1.235\n"
        "  accuracy    0.9000\n"
        "  perplexity  inf\n"
        "resumed     no\n"
        "best\n"
        "samples\n"
        "  - def f():\n"
        "        pass\n"
        "  - [b]x[/b]\n"
        "rows\n"
        "  - step  1\n"
        "    loss  2.000\n"
        "  - step  2\n"
        "    loss  nan\n"
    )


def test_results_go_to_stdout(capsys):
    console.result({"a": 1}, True)
    console.table("t", ["n"], [[1]])
    console.masked_tokens(["x"], [True], "row")
    out, err = capsys.readouterr()
    assert out == '{\n  "a": 1\n}\nt\n  n\n  1\nrow (1 of 1 tokens carry loss)\n[loss]x[/loss]\n'
    assert err == ""


def test_a_plain_table_is_aligned_and_marks_the_best(plain):
    rows = [[100, 2.1, 0.5, "a"], [2000, 1.25, None, "[bold]b"], [3000, 12.5, 0.75, "c"]]
    console.table("evaluations", ["step", "loss", "accuracy", "note"], rows, best=1, console=plain)
    assert said(plain) == (
        "evaluations\n"
        "  step   loss  accuracy  note\n"
        "   100  2.100    0.5000  a\n"
        "  2000  1.250            [bold]b  best\n"
        "  3000  12.50    0.7500  c\n"
    )


def test_a_drawn_table_has_the_same_cells(terminal):
    console.table("evaluations", ["step", "[loss]"], [[100, 2.1], [200, 1.25]], best=1, console=terminal)
    lines = [line.split() for line in seen(terminal).splitlines()]
    assert ["evaluations"] in lines
    assert ["step", "[loss]"] in lines
    assert ["100", "2.100"] in lines
    assert ["200", "1.250", "best"] in lines
    assert "\x1b[32m" in said(terminal)


TOKENS = ["<user>", "2+2?\n", "<bot>", "4", "\n", "\x1b[31m", "[/loss]"]
WEIGHTS = [0, 0, 0, 1, 1, 1, 0]


def test_masked_tokens_in_plain_text(plain):
    console.masked_tokens(TOKENS, WEIGHTS, "example 3", plain)
    assert said(plain) == ("example 3 (3 of 7 tokens carry loss)\n<user>2+2?\n<bot>[loss]4\n\\x1b[31m[/loss][/loss]\n")


def test_masked_tokens_in_colour(terminal):
    console.masked_tokens(TOKENS, WEIGHTS, "example 3", terminal)
    assert "\x1b[30;42m4⏎\x1b[0m\n\x1b[30;42m\\x1b[31m\x1b[0m" in said(terminal)
    assert seen(terminal) == "example 3 (3 of 7 tokens carry loss)\n<user>2+2?\n<bot>4⏎\n\\x1b[31m[/loss]\n"


def test_masked_tokens_with_weights(plain, terminal):
    console.masked_tokens(["a", "b", "c", "d"], [0.0, 0.5, 1.0, 2.0], "example 3", plain)
    assert said(plain) == ("example 3 (3 of 4 tokens carry loss)\na[loss 0.5]b[/loss][loss]c[/loss][loss 2]d[/loss]\n")
    console.masked_tokens(["a", "b"], [0.0, 0.5], "example 3", terminal)
    assert "\x1b[1;33m 0.5 \x1b[0m\x1b[30;43mb" in said(terminal)


def test_masked_tokens_must_match_their_weights(plain):
    with pytest.raises(ValueError, match="shorter"):
        console.masked_tokens(["a", "b"], [True], "row", plain)


# ---------------------------------------------------------------- training


def test_training_in_plain_lines(plain, clock):
    with console.TrainProgress(1000, console=plain, clock=clock) as progress:
        with progress.compiling("train step", "first batch of shape [8, 128]"):
            clock.now += 12.34
        clock.now += 10
        progress.update(10, 5.5, 3e-4, 12_345.0, 48.1, padding=0.874)
        clock.now += 20
        progress.update(20, 1.2341, 2.5e-5, None, 1234.5, {"accuracy": 0.5})
    assert said(plain) == (
        "compiling train step (first batch of shape [8, 128])\n"
        "compiled train step in 12s\n"
        "step 10/1000  loss 5.500  lr 3.0e-04  12.3k tokens/s  87% padding  48.1 examples/s  eta 16m30s\n"
        "step 20/1000  loss 1.234  accuracy 0.5000  lr 2.5e-05  1.23k examples/s  eta 24m30s\n"
    )


def test_a_quick_compilation_is_announced_only(plain, clock):
    progress = console.TrainProgress(10, console=plain, clock=clock)
    with progress.compiling("eval step"):
        clock.now += 0.5
    assert said(plain) == "compiling eval step\n"


def test_a_failed_compilation_is_not_called_done(plain, clock):
    progress = console.TrainProgress(10, console=plain, clock=clock)
    with contextlib.suppress(KeyError), progress.compiling("eval step"):
        clock.now += 5
        raise KeyError
    assert said(plain) == "compiling eval step\n"


def test_the_time_left_counts_evaluations_once_and_compilation_never(plain, clock):
    progress = console.TrainProgress(100, 20, console=plain, clock=clock)
    progress.phase("evaluating", 0, 4)
    with progress.compiling("eval step"):
        clock.now += 30
    clock.now += 10
    progress.phase("evaluating", 4, 4)
    clock.now += 20
    progress.evaluated(20, {"loss": 1.0}, best=False)
    for step in range(21, 41):
        clock.now += 1
        progress.update(step, 1.0, 1e-3, None, 1.0)
    # for 20 steps 20 s of training and 30 s of evaluation; 60 steps are left
    assert said(plain).splitlines()[-1].endswith("eta 2m30s")


def test_the_time_left_follows_recent_speed(plain, clock):
    progress = console.TrainProgress(1000, console=plain, clock=clock)
    for step in range(1, 31):
        clock.now += 100 if step <= 10 else 1
        progress.update(step, 1.0, 1e-3, None, 1.0)
    assert said(plain).splitlines()[-1].endswith("eta 16m10s")


def test_a_long_phase_speaks_now_and_then(plain, clock):
    progress = console.TrainProgress(100, console=plain, clock=clock)
    for done in range(31):
        progress.phase("evaluating", done, 30)
        clock.now += 1
    assert said(plain) == "evaluating 10/30\nevaluating 20/30\nevaluating 30/30\n"


def test_an_evaluation_has_its_line(plain):
    progress = console.TrainProgress(100, console=plain)
    progress.evaluated(50, {"loss": 1.5, "accuracy": 0.25}, best=True)
    progress.evaluated(60, {"loss": 1.75}, best=False)
    assert said(plain) == "eval 50/100  loss 1.500  accuracy 0.2500  best\neval 60/100  loss 1.750\n"


def last_line(on):
    return seen(on).replace("\r", "\n").rstrip("\n").splitlines()[-1]


def test_the_live_line(terminal, clock):
    with console.TrainProgress(1000, console=terminal, clock=clock) as progress:
        clock.now += 60
        progress.update(120, 1.234, 3e-4, 12_345.0, 48.1)
        console.note("a [note] above", terminal)
    assert "a [note] above\n" in seen(terminal)
    rest = "loss 1.234  lr 3.0e-04  12.3k tokens/s  48.1 examples/s  1m00s  eta 7m20s"
    assert last_line(terminal) == f"step 120/1000  {'━' * 3}{'─' * 21}  {rest}"
    assert said(terminal).endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, f"step 120/1000  {'━' * 2}{'─' * 12}  loss 1.234  lr 3.0e-04  12.3k tokens/s  eta 7m20s"),
        (50, f"step 120/1000  {'━' * 1}{'─' * 11}  loss 1.234  eta 7m20s"),
        (40, "step 120/1000  loss 1.234  eta 7m20s"),
        (20, "step 120/1000"),
        (8, "step 12…"),
    ],
    ids=[80, 50, 40, 20, 8],
)
def test_a_narrow_terminal_shows_what_matters_most(terminal, clock, width, line):
    terminal.width = width
    with console.TrainProgress(1000, console=terminal, clock=clock) as progress:
        clock.now += 60
        progress.update(120, 1.234, 3e-4, 12_345.0, 48.1, {"accuracy": 0.5})
    assert last_line(terminal) == line


def test_the_live_line_says_what_goes_on(terminal, clock):
    progress = console.TrainProgress(100, console=terminal, clock=clock)
    with progress.compiling("train step", "first batch of shape [8]"):
        clock.now += 3
        assert progress._draw().plain.endswith("  compiling train step (first batch of shape [8])  3.0s")
    progress.phase("evaluating", 3, 10)
    clock.now += 2
    assert progress._draw().plain.endswith("  evaluating 3/10  2.0s")
    progress.update(1, 1.0, 1e-3, None, 1.0)
    assert "evaluating" not in progress._draw().plain
    assert seen(terminal) == "compiled train step in 3.0s\n"


def test_an_error_leaves_the_terminal_usable(terminal):
    with pytest.raises(KeyError), console.TrainProgress(10, console=terminal):
        raise KeyError
    assert said(terminal).endswith("\x1b[?25h")


# ---------------------------------------------------------------- counts


def test_a_count_in_plain_lines(plain, clock):
    with console.CountProgress("predicting", 50, start=10, console=plain, clock=clock) as progress:
        for done in range(10, 51):
            progress.update(done)
            clock.now += 0.5
    assert said(plain) == (
        "predicting 30/50 examples  2 examples/s  eta 10s\npredicting 50/50 examples  2 examples/s  eta 0.0s\n"
    )


def test_a_count_without_an_end(plain, clock):
    progress = console.CountProgress("reading", None, unit="rows", console=plain, clock=clock)
    clock.now += 20
    progress.update(40_000)
    assert said(plain) == "reading 40000 rows  2k rows/s\n"


def test_a_count_on_a_terminal(terminal, clock):
    with console.CountProgress("predicting", 50, console=terminal, clock=clock) as progress:
        clock.now += 10
        progress.update(25)
    assert last_line(terminal) == (f"predicting 25/50 examples  {'━' * 12}{'─' * 12}  2.5 examples/s  eta 10s")


# ---------------------------------------------------------------- cost


def test_it_loads_quickly_and_without_jax():
    program = (
        "import time, sys, rich.console, rich.live, rich.table\n"
        "began = time.process_time()\n"
        "import redco_cli.console\n"
        "print(time.process_time() - began, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout for _ in range(3)]
    assert min(float(run.split()[0]) for run in runs) < 0.06
    assert runs[0].split()[1:] == ["False", "False"]
