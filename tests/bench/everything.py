"""Runs every benchmark and writes `BENCHMARKS.md`: ratios, their spread, the commands, versions and the machine.

    make bench

Each runs in a process of its own, one after the other. What is on the lines that begin with `=>` becomes the table: a
name, the median, and in brackets the least and the largest value and how many there were. Nothing is written where one
of them fails.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "overhead.py",
    "overhead.py --recipe digits --steps 200",
    "save.py",
    "packing.py",
    "step.py --rounds 10",
    "encoders.py --rounds 10",
    "traffic.py",
    "seconds.py",
)
FIGURE = re.compile(r"=> (?P<what>.+): (?P<median>\S+) \((?P<low>\S+) to (?P<high>\S+); (?P<count>\d+ \w+)\)")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "transformers", "torch")


def figures(lines: Sequence[str], command: str) -> list[str]:
    """Rows of the table, of what a benchmark printed."""
    found = (FIGURE.fullmatch(line.strip()) for line in lines)
    rows = [match.groupdict() for match in found if match is not None]
    cells = "| {what} | {median} | {low} to {high} | {count} |"
    return [f"{cells.format(**row)} `python tests/bench/{command}` |" for row in rows]


def measured(command: str) -> list[str]:
    """What a benchmark prints, on the screen as it comes.

    Raises:
        SystemExit: it failed, or printed no figure.
    """
    print(f"== python tests/bench/{command}", flush=True)
    name, *arguments = command.split()
    started = [sys.executable, ROOT / "tests" / "bench" / name, *arguments]
    lines: list[str] = []
    with subprocess.Popen(started, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode or not figures(lines, command):
        raise SystemExit(f"tests/bench/{command}: exit status {process.returncode}, and BENCHMARKS.md is as it was")
    return lines


def machine() -> str:
    """Processor, cores and versions of what computes."""
    information = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", information.read_text()) if information.exists() else None
    processor = named.group(1) if named else platform.processor() or platform.machine()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{processor}, {os.cpu_count()} cores; Python {platform.python_version()}; {versions}"


def main() -> None:
    """Measures and writes."""
    rows = [row for command in COMMANDS for row in figures(measured(command), command)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    text = f"""# Benchmarks

Written by `make bench`. Ratios are of what ran in turn on one machine; their spread is over rounds, cases or rows.
A median above 1 is better where tokens/s are compared, and worse where bytes or seconds are. What is estimated for
chips was not measured on them here.

| what | median | spread | of | command |
|---|--:|--:|--:|---|
{chr(10).join(rows)}

{time.strftime("%Y-%m-%d")}, commit {commit.strip()}: {machine()}.
"""
    (ROOT / "BENCHMARKS.md").write_text(text)


if __name__ == "__main__":
    main()
