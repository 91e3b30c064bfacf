"""Recipes that are trained to their mark as a user trains them: in a process of their own.

The compiler options of the tests are for programs that run once. What runs thousands of times takes several times as
long with them, and its threads only wait for those of the other workers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "PYTHONPATH": str(ROOT)}


def trained(recipe: str, output: Path, settings: Sequence[str]) -> list[dict[str, float]]:
    """The values of each evaluation of `redco train RECIPE`, on one device."""
    command = [sys.executable, "-m", "redco_cli", "train", recipe, f"output_dir={output}", "mesh.data=1", *settings]
    done = subprocess.run(command, env={**os.environ, **OPTIONS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "eval"]
