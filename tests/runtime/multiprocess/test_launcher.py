"""`redco launch` killed at random moments: its processes save and end within seconds, and the same command goes on."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.multiprocess.processes import exact
from tests.training.tiny import write_project

STEPS = 60
COMMAND = ["launch", "--processes", "2", "--devices-per-process", "1", "--", "train", "recipe.yaml", "mesh={data: 2}"]
COMMAND += [f"train.steps={STEPS}", "checkpoint.every=1000", "eval={every: 20, batch_size: 8}", "checkpoint.keep=9"]
WITHIN = 30.0
"""Seconds in which all must be gone: far longer than a step, far shorter than the run or any time-out."""


_started = []


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The tiny run, whose processes find redco; no launcher is left behind, and so none of their processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    yield tmp_path
    for launcher in _started:
        launcher.kill()
        launcher.communicate()
    _started.clear()


def started(directory):
    command = [*COMMAND, f"output_dir={directory}", "plugin.options.seconds=0.1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    _started.append(subprocess.Popen([sys.executable, "-m", "redco_cli", *command], **pipes))
    return _started[-1]


def state_of(process):
    """What the kernel says of a process, from its parent on; nothing of one that has ended."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if state == "Z" else rest


def children_of(process):
    known = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [one for one in known if state_of(one)[:1] == [str(process)]]


def killed(launcher, wait):
    """Kills a launcher once `wait` says so; how long its two processes take to end, and what had been recorded."""
    while len(children_of(launcher.pid)) < 2:
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.02)
    processes = children_of(launcher.pid)
    wait()
    assert launcher.poll() is None, launcher.communicate()
    launcher.kill()
    began = time.monotonic()
    launcher.wait()
    while any(map(state_of, processes)):
        assert time.monotonic() - began < WITHIN
        time.sleep(0.05)


def lines(directory):
    file = Path(directory) / "metrics.jsonl"
    return file.read_text().count('"train"') if file.exists() else 0


@pytest.mark.slow
def test_killed_at_random_moments_and_continued_bit_for_bit(project):
    seed = random.SystemRandom().randrange(2**32)
    dice = random.Random(seed)
    whole = started("whole")
    said = whole.communicate()[1]
    assert whole.returncode == 0, said
    early = [lambda: None, lambda: time.sleep(dice.uniform(0, 2)), lambda: time.sleep(dice.uniform(2, 8))]
    for wait in early:  # before anything is saved, and perhaps before anything is heard
        killed(started("run"), wait)
    for _ in range(3):
        before = lines("run")
        steps = before + dice.randint(1, 8)

        def wait(steps=steps):
            while lines("run") < steps:
                time.sleep(0.02)
            time.sleep(dice.uniform(0, 0.3))

        killed(started("run"), wait)
        saved = [int(path.name.partition("-")[2]) for path in Path("run").glob("checkpoint-*")]
        assert saved, seed
        assert max(saved) >= min(steps, STEPS), seed  # which no interval asked for
    last = started("run")
    said = last.communicate()[1]
    assert last.returncode == 0, (seed, said)
    exact("run", "whole", STEPS)
