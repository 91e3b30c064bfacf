"""Runs of several processes on this machine, for tests: each is `worker.py` with the plain environment."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redco_cli.training.metrics import read_records

WORKER = Path(__file__).with_name("worker.py")
COMPARED = ("loss", "grad_norm", "learning_rate", "weight", "accuracy", "exact", "skipped")


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A port that is free, and the one after it too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return int(port)


def start(
    arguments: Sequence[str], process: int, processes: int, port: int, devices: int = 1, **environment: str
) -> subprocess.Popen[str]:
    """Starts one process in the working directory."""
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
        stderr=subprocess.PIPE,
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
