"""The benchmarks that README quotes still run: each once, as small as it gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parent
SMALL = {
    "overhead.py": (["--steps", "2", "--rounds", "1", "--recipe", "digits"], "median of 1 rounds"),
    "save.py": (["--width", "64", "--layers", "1", "--batch", "8", "--rounds", "2", "--steps", "2"], "of an interval"),
    "seconds.py": (["26"], "1 of 1 rows have a time"),
    "step.py": (["--rounds", "1", "--set", "num_hidden_layers=1", "vocab_size=64"], "losses agree"),
    "traffic.py": (["--only", "mlp-residual", "--mesh", "data2xtensor4"], "1 cases"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    arguments, said = SMALL[name]
    environ = {**os.environ, "REDCO_CACHE": str(tmp_path)}
    environ.pop("XLA_FLAGS", None)
    ran = subprocess.run([sys.executable, BENCHES / name, *arguments], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout
