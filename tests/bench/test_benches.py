"""The benchmarks that README quotes still run: each once, as small as it gets."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from redco_cli.recipe.load import load_recipe
from tests.bench import everything
from tests.bench.gpu import attention

BENCHES = Path(__file__).resolve().parent
SMALL = {
    "encoders.py": (["--rounds", "1", "--only", "t5"], "; 1 rounds)"),
    "overhead.py": (["--steps", "2", "--rounds", "1", "--recipe", "digits"], "; 1 rounds)"),
    "packing.py": (
        ["--rounds", "1", "--steps", "2", "--max-length", "64", "--median", "16"],
        "tokens/s packed / padded",
    ),
    "save.py": (["--width", "64", "--layers", "1", "--batch", "8", "--rounds", "2", "--steps", "2"], "takes longer: "),
    "seconds.py": (["26"], "| 26 \\* | Llama-2-7B | h100:8 | 1.503 s |"),
    "step.py": (["--rounds", "1", "--set", "num_hidden_layers=1", "vocab_size=64"], "losses agree"),
    "traffic.py": (["--only", "mlp-residual", "--mesh", "data2xtensor4"], "; 1 cases)"),
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
    assert everything.figures(ran.stdout.splitlines(), name)


def test_figures_become_rows_of_a_table() -> None:
    said = ["round 1: 0.9", "=> tokens/s of a / b, c: 0.986 (0.92 to 1.09; 5 rounds)"]
    row = "| tokens/s of a / b, c | 0.986 | 0.92 to 1.09 | 5 rounds | `python tests/bench/x.py --y 2` |"
    assert everything.figures(said, "x.py --y 2") == [row]


def test_every_benchmark_is_run() -> None:
    named = {command.split()[0] for command in everything.COMMANDS}
    assert named == {path.name for path in BENCHES.glob("*.py")} - {"everything.py", "test_benches.py"} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 4e-3), ("float16", 6e-4)])
def test_what_is_measured_on_a_gpu_is_there_without_one(dtype: str, most: float) -> None:
    """Interpreted."""
    assert load_recipe(BENCHES / "gpu" / "llama_1b.yaml").recipe.train.global_batch_size == 8
    assert max(attention.errors(16, 256, 100, 3.0, True, True, jnp.dtype(dtype))) < most


def test_what_fails_or_measures_nothing_leaves_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "bench").mkdir(parents=True)
    (tmp_path / "tests" / "bench" / "none.py").write_text("print('nothing')")
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    monkeypatch.setattr(everything, "COMMANDS", ("none.py",))
    with pytest.raises(SystemExit, match=r"none.py: exit status 0, and BENCHMARKS.md is as it was"):
        everything.main()
    assert not (tmp_path / "BENCHMARKS.md").exists()
