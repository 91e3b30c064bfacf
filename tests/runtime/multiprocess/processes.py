"""Runs of several processes on this machine, for tests: each is `worker.py` with the plain environment."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from redco_cli.run import predict, train
from redco_cli.training.records.metrics import read_records
from tests.training.tiny import final_state

WORKER = Path(__file__).with_name("worker.py")
COMPARED = ("loss", "grad_norm", "learning_rate", "weight", "accuracy", "exact", "skipped")


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A port that is free, and the one after it too: below those that the kernel gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000, 2)  # workers beside this one draw from the same
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


def start(
    arguments: Sequence[str],
    process: int,
    processes: int,
    port: int,
    devices: int = 1,
    log: IO[str] | int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen[str]:
    """Starts one process in the working directory; `log` takes what it says besides results."""
    own = {
        "REDCO_NUM_PROCESSES": str(processes),
        "REDCO_PROCESS_ID": str(process),
        "REDCO_COORDINATOR": f"localhost:{port}",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "USE_TORCH": "0",
    }
    return subprocess.Popen(
        [sys.executable, str(WORKER), *arguments],
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )


def ended(children: Sequence[subprocess.Popen[str]], seconds: float = 200) -> list[Ended]:
    """Waits for the end of all; none is left behind."""
    try:
        outputs = [child.communicate(timeout=seconds) for child in children]
    finally:
        for child in children:
            child.kill()
            with child:  # closes its pipes, and waits
                pass
    return [Ended(child.returncode, *output) for child, output in zip(children, outputs, strict=True)]


def run_several(arguments: Sequence[str], processes: int, devices: int) -> list[Ended]:
    """Runs a command as several processes, which must succeed."""
    port = free_port()
    ends = ended([start(arguments, process, processes, port, devices) for process in range(processes)])
    assert [end.code for end in ends] == [0] * processes, "\n".join(end.err for end in ends)
    return ends


def records(directory: str) -> dict[tuple[str, int], Mapping[str, Any]]:
    """What a run recorded, by kind and step: each once."""
    found = read_records(Path(directory) / "metrics.jsonl")
    by_step = {(record["kind"], record["step"]): record for record in found}
    assert len(by_step) == len(found)
    return by_step


def same(directory: str, expected: str, *, after: int = -1) -> None:
    """Every recorded value to 1e-5."""
    mine = {key: values for key, values in records(directory).items() if key[1] > after}
    theirs = {key: values for key, values in records(expected).items() if key[1] > after}
    assert mine.keys() == theirs.keys()
    assert len(mine) > 4
    for key, values in theirs.items():
        for name in set(COMPARED) & values.keys():
            assert mine[key][name] == pytest.approx(values[name], rel=1e-5), (key, name)


def exact(directory: str, expected: str, step: int) -> None:
    """Every record but what a clock measured, and the state after the last step: bit for bit."""
    timed = ("time", "examples_per_second", "tokens_per_second", "input_wait", "padding")
    mine, theirs = records(directory), records(expected)
    assert list(mine) == list(theirs)
    for key, values in theirs.items():
        for name in values.keys() - set(timed):
            assert mine[key][name] == values[name], (key, name)
    found, wanted = final_state(directory, step), final_state(expected, step)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 8
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def equal_to_one(mesh: str, processes: int, devices: int, *overrides: str) -> None:
    """Trains, evaluates, predicts and continues on several processes, and compares with one."""
    train("recipe.yaml", ["output_dir=one", *overrides])
    predicted = predict("one", output="one.jsonl").read_text()
    assert len({json.dumps(json.loads(line)["prediction"]) for line in predicted.splitlines()}) > 1
    run_several(["train", "recipe.yaml", "output_dir=many", f"mesh={mesh}", *overrides], processes, devices)
    same("many", "one")
    run_several(["predict", "many"], processes, devices)
    assert Path("many/predictions/eval_examples.jsonl").read_text() == predicted
    assert predict("many", ["mesh={data: 1}"], output="many.jsonl").read_text() == predicted
    # What several saved one process continues, and the other way round.
    train("recipe.yaml", ["output_dir=back", "checkpoint.resume=many/checkpoint-8", *overrides])
    same("back", "one", after=8)
    forth = ["output_dir=forth", "checkpoint.resume=one/checkpoint-8", f"mesh={mesh}", *overrides]
    run_several(["train", "recipe.yaml", *forth], processes, devices)
    same("forth", "one", after=8)
