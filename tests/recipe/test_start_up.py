"""A wrong recipe, and help, cost what reading a small file costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = [
    *("jax", "jaxlib", "flax", "orbax", "optax", "numpy", "scipy", "transformers", "datasets", "grain", "safetensors"),
    *(
        "tokenizers",
        "torch",
        "tensorflow",
        "pandas",
        "pyarrow",
        "matplotlib",
        "jinja2",
        "redco_cli.run",
        "redco_cli.job",
    ),
]
REFUSED_WITHIN = 0.5
"""CPU seconds, user and system."""
REPORT = f"""
import sys
from redco_cli.cli import main
sys.argv = ["redco", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *[name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.fixture
def bad_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("plugin: {module: causal_lm}\noutput_dir: runs/x\ntrain: {steps: soon}\n")
    return path


def redco(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return subprocess.run(
        [sys.executable, "-c", REPORT, *arguments], cwd=folder, env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("command", ["train", "predict", "validate"])
def test_a_wrong_recipe_is_refused_before_anything_heavy_is_imported(bad_recipe, command):
    done = redco(command, "bad.yaml", folder=bad_recipe.parent)
    assert done.returncode == 1
    assert done.stderr == (
        "bad.yaml:3: train.steps: 'soon' given, but expected a number of optimizer steps (1000) "
        "or epochs (3 epochs)\n"
        "  -> train.steps: Length of the run: optimizer steps or epochs.\n"
    )
    assert done.stdout == "loaded:\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "-h"], 0),
        (["--version"], 0),
        (["schema"], 0),
        (["train", "no.yaml"], 2),
        (["train", "quickstart", "steps"], 2),
        (["predict", "no-run"], 2),
        (["validate", "quickstart", "--origins"], 0),
        (["init", "new"], 0),
    ],
)
def test_nothing_heavy_is_imported_for(tmp_path, arguments, code):
    done = redco(*arguments, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert "Traceback" not in done.stderr


def test_a_wrong_recipe_is_refused_at_once(bad_recipe):
    best = min(_cpu_seconds("train", "bad.yaml", folder=bad_recipe.parent) for _ in range(5))
    assert best < REFUSED_WITHIN


def _cpu_seconds(*arguments: str, folder: Path) -> float:
    process = subprocess.Popen(
        [sys.executable, "-c", "from redco_cli.cli import main; main()", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 1
    return usage.ru_utime + usage.ru_stime
