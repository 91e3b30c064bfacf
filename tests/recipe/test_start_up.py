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
LIBRARIES = (
    "import typer.main, yaml, rich.console, rich.live, rich.table, pydantic.main, pydantic.types, pydantic.json_schema"
)
"""What reading and refusing a recipe takes from others: machines differ in speed, their ratio hardly."""
REFUSED_WITHIN = 3
"""Times the CPU seconds of those imports; 2.2 when it was set."""
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
        pytest.param(["train", "-h"], 0, marks=pytest.mark.slow),
        (["--version"], 0),
        pytest.param(["schema"], 0, marks=pytest.mark.slow),
        (["train", "no.yaml"], 2),
        pytest.param(["train", "quickstart", "steps"], 2, marks=pytest.mark.slow),
        pytest.param(["predict", "no-run"], 2, marks=pytest.mark.slow),
        (["validate", "quickstart", "--origins"], 0),
        (["init", "new"], 0),
    ],
)
def test_nothing_heavy_is_imported_for(tmp_path, arguments, code):
    done = redco(*arguments, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_wrong_recipe_is_refused_at_once(bad_recipe):
    folder = bad_recipe.parent
    pairs = [(_cpu_seconds(folder, "train", "bad.yaml"), _cpu_seconds(folder, code=LIBRARIES)) for _ in range(5)]
    refused, imported = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert refused < REFUSED_WITHIN * imported


def _cpu_seconds(folder: Path, *arguments: str, code: str = "from redco_cli.cli import main; main()") -> float:
    """User and system seconds of a Python that runs ``code``, which refuses its arguments where it has any."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == bool(arguments)
    return usage.ru_utime + usage.ru_stime
