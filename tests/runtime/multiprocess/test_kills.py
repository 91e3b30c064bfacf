"""Runs of one or several processes that are asked to stop, or killed, at random moments: what comes out in the end."""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redco_cli.training.saving.checkpoint import Checkpoints
from tests.runtime.multiprocess.processes import Ended, ended, exact, free_port, records, run_several, start

EXAMPLES = 40
NOTES = """
    import time
    with open("now", "w") as file:
        file.write(ctx.stage)
    time.sleep(ctx.options[ctx.stage])
    import os
    while os.path.exists("hold"):
        time.sleep(0.1)
"""
OPTIONS = [f"plugin.options.{stage}={seconds}" for stage, seconds in (("train", 0.05), ("eval", 0.2), ("predict", 0.2))]
STEPS = 240
LONG = [*OPTIONS, f"train.steps={STEPS}", "eval.every=10", "eval.batch_size=8", "checkpoint.every=3", "data.workers=1"]
PHASES = ("compiling", "training", "evaluating", "predicting", "saving")
_STAGES = {"evaluating": "eval", "predicting": "predict"}


@pytest.fixture
def noted(project: Path) -> Path:
    """The tiny project: its loss draws random numbers and counts examples, and a file says what is collated."""
    text = (project / "plugin.py").read_text()
    for old, new in (
        ("def collate_fn(ctx, examples):", f"def collate_fn(ctx, examples):{NOTES}"),
        ('    logits = ctx.model(params, batch["x"])\n    each', NOISE),
        ('{"accuracy": right.sum()}', f'{{"accuracy": right.sum(), **seen(batch, train, {EXAMPLES})}}'),
        ('        "counted": np', '        "id": np.array([e["id"] for e in examples]),\n        "counted": np'),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    (project / "plugin.py").write_text(text + SEEN)
    return project


NOISE = """    import jax
    noise = 0.1 * jax.random.normal(rng, batch["x"].shape) if train else 0.0
    logits = ctx.model(params, batch["x"] + noise)
    each"""
SEEN = """

def seen(batch, train, count):
    return {f"seen/{i}": (batch["id"] == i).sum() for i in range(count)} if train else {}
"""


def begun(processes: int, devices: int, arguments: Sequence[str], **environment: str) -> list[subprocess.Popen[str]]:
    """Starts a run; what each process says goes to a file."""
    port, environment = free_port(), {"REDCO_TIMEOUT": "40", **environment}
    children = []
    for process in range(processes):
        with open(f"log-{process}", "w") as log:
            command = ["train", "recipe.yaml", *arguments]
            children.append(start(command, process, processes, port, devices, log, **environment))
    return children


def finished(children: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """How each ended, within a minute."""
    ends = ended(children, 60)
    return [replace(end, err=Path(f"log-{process}").read_text()) for process, end in enumerate(ends)]


def wait_for_phase(phase: str, children: Sequence[subprocess.Popen[str]], dice: random.Random) -> None:
    """Waits for a phase of a run, and a little longer."""
    lines, now, deadline = Path("run/metrics.jsonl"), Path("now"), time.monotonic() + 240
    began, before = time.time(), lines.stat().st_size if lines.exists() else 0
    now.unlink(missing_ok=True)
    grown = before + dice.randrange(1, 20_000)
    wait = dice.uniform(0, 5) if phase == "anywhere" else dice.uniform(0, 0.3)
    while all(child.poll() is None for child in children):
        stage = now.read_text() if now.exists() else ""
        size = lines.stat().st_size if lines.exists() else 0
        is_new = lines.exists() and lines.stat().st_mtime > began
        if {
            "anywhere": bool(stage),
            "compiling": "compiling train step" in Path("log-0").read_text(),
            "training": is_new and (size > grown or size < before),
            "saving": is_new and any(Path("run").glob("*.orbax-checkpoint-tmp")),
        }.get(phase, is_new and stage == _STAGES.get(phase)):
            break
        assert time.monotonic() < deadline, phase
        time.sleep(0.001)
    time.sleep(wait)


def whole(processes: int, devices: int, *overrides: str) -> None:
    """The uninterrupted run."""
    run_several(["train", "recipe.yaml", "output_dir=whole", *LONG, *overrides], processes, devices)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize(("processes", "devices", "mesh"), [(1, 1, "{data: 1}"), (2, 2, "{data: 2, fsdp: 2}")])
def test_ten_signals_at_random_moments_change_nothing(processes: int, devices: int, mesh: str) -> None:
    """Each ends all processes with one code at one saved step, in seconds, and the next start continues exactly."""
    seed = random.SystemRandom().randrange(10_000)
    dice = random.Random(seed)
    whole(processes, devices, f"mesh={mesh}")
    phases = [*PHASES, *PHASES]
    dice.shuffle(phases)
    took = []
    for number, phase in enumerate(phases):
        fresh = {"REDCO_CACHE": f"cache-{number}"} if phase == "compiling" else {}
        children = begun(processes, devices, [*LONG, f"mesh={mesh}"], **fresh)
        wait_for_phase(phase, children, dice)
        began = time.monotonic()
        children[dice.randrange(processes)].send_signal(dice.choice([signal.SIGTERM, signal.SIGUSR1]))
        ends = finished(children)
        took.append((phase, round(time.monotonic() - began, 1)))
        assert [end.code for end in ends] == [75] * processes, (seed, phase, [end.err[-2000:] for end in ends])
        checkpoints = Checkpoints(Path("run").resolve(), 3, "min")
        last = checkpoints.steps()[-1]
        assert checkpoints.damage(last) is None
        assert all(f"checkpoint-{last}: stopped by a signal after step {last}; saved" in end.err for end in ends), ends
        checkpoints.close()
    print(f"seed {seed}, seconds from a signal to the end: {took}")
    run_several(["train", "recipe.yaml", *LONG, f"mesh={mesh}"], processes, devices)
    exact("run", "whole", STEPS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("noted")
def test_two_processes_stop_predicting_and_continue() -> None:
    """What was written is kept, and each prediction comes once."""
    arguments = [*LONG, "mesh={data: 2}", "predict.batch_size=2"]
    run_several(["train", "recipe.yaml", *arguments, "train.steps=4"], 2, 1)
    run_several(["predict", "run", "predict.batch_size=2", "output_dir=other"], 2, 1)
    file = Path("run/predictions/eval_examples.jsonl")
    expected, partial = file.read_text(), Path(f"{file}.partial")
    file.unlink()
    for process in (1, 0):
        port, command = free_port(), ["predict", "run", "predict.batch_size=2"]
        children = [start(command, number, 2, port) for number in range(2)]
        before, deadline = partial.read_text().count("\n") if partial.exists() else 0, time.monotonic() + 60
        while not partial.exists() or partial.read_text().count("\n") <= before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children[process].terminate()
        ends = ended(children, 60)
        assert [end.code for end in ends] == [75, 75], ends
        kept = partial.read_text()
        assert expected.startswith(kept)
        assert all(f"stopped by a signal after {kept.count(chr(10))} of 21 examples; kept" in end.err for end in ends)
        assert before < kept.count("\n") < 21
    run_several(["predict", "run", "predict.batch_size=2"], 2, 1)
    assert file.read_text() == expected
    assert not partial.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_interrupt_ends_all_at_once(processes: int) -> None:
    """Even where data that does not come keeps the run from the end of its step."""
    children = begun(processes, 1, [*LONG, f"mesh={{data: {processes}}}"])
    wait_for_phase("training", children, random.Random(0))
    Path("hold").touch()
    time.sleep(2)
    children[-1].send_signal(signal.SIGINT)
    time.sleep(2)
    assert all(child.poll() is None for child in children)
    children[-1].send_signal(signal.SIGINT)
    began = time.monotonic()
    assert [end.code for end in finished(children)] == [130] * processes
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("noted")
def test_one_of_two_processes_killed_twenty_times_changes_nothing() -> None:
    """Two processes with four devices each; the other one ends by itself, with the reason."""
    seed = random.SystemRandom().randrange(10_000)
    dice, mesh = random.Random(seed), "mesh={data: 2, fsdp: 2, tensor: 2}"
    whole(2, 4, mesh)
    took = []
    for phase in ["anywhere", "training", "saving", "evaluating"] * 5:
        children = begun(2, 4, [*LONG, mesh])
        wait_for_phase(phase, children, dice)
        began, killed = time.monotonic(), dice.randrange(2)
        children[killed].kill()
        ends = finished(children)
        took.append((phase, killed, round(time.monotonic() - began, 1)))
        assert [end.code for end in ends] == ([-9, 1] if killed == 0 else [1, -9]), (seed, phase, ends)
        assert f"processes: process {killed} " in ends[1 - killed].err
        assert "is gone" in ends[1 - killed].err
    print(f"seed {seed}, phase, process, seconds until the other ended: {took}")
    run_several(["train", "recipe.yaml", *LONG, mesh], 2, 4)
    exact("run", "whole", STEPS)
    assert not list(Path("run").glob("*tmp*"))


CHAIN = [
    (1, 8, "{data: 8}"),
    (2, 4, "{fsdp: 8}"),
    (1, 8, "{data: 2, fsdp: 2, tensor: 2}"),
    (2, 4, "{data: 2, fsdp: 2, tensor: 2}"),
    (1, 8, "{fsdp: 8}"),
    (2, 4, "{data: 8}"),
    (1, 1, "{data: 1}"),
]
"""Processes, devices of each, mesh: a run that is moved from each to the next."""


def times(rows: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[int, dict[int, int]]:
    """How often each example was in the batch of each step: {step: {id: times}}; those not seen are left out."""
    counts = {}
    for (kind, step), row in rows.items():
        if kind == "train":
            found = {i: round(row[f"seen/{i}"] * row["weight"]) for i in range(EXAMPLES)}
            counts[step] = {i: count for i, count in found.items() if count}
    return counts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("noted")
def test_a_run_moves_between_devices_and_processes() -> None:
    """The losses are those of the uninterrupted run to 1e-5, and each example comes once in each epoch."""
    whole(1, 8, "mesh={data: 8}")
    for processes, devices, mesh in CHAIN[:-1]:
        children = begun(processes, devices, [*LONG, f"mesh={mesh}"])
        wait_for_phase("training", children, random.Random(0))
        children[-1].terminate()
        ends = finished(children)
        assert [end.code for end in ends] == [75] * processes, ends
    processes, devices, mesh = CHAIN[-1]
    run_several(["train", "recipe.yaml", *LONG, f"mesh={mesh}"], processes, devices)
    mine, theirs = records("run"), records("whole")
    assert list(mine) == list(theirs)
    apart = {key: abs(mine[key]["loss"] - values["loss"]) for key, values in theirs.items()}
    print(f"largest difference of a loss: {max(apart.values()):.1e}")
    assert max(apart.values()) < 1e-5
    assert times(mine) == times(theirs)
    drawn: Counter[int] = Counter()
    for step, seen in times(mine).items():
        drawn.update(seen)
        assert sum(seen.values()) == 8
        assert max(drawn.values()) - min(drawn[i] for i in range(EXAMPLES)) <= 1, step
