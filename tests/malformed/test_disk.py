"""A disk that fills up: the error says so, and what was on it stays good."""

import contextlib
import resource
import shutil
from collections.abc import Iterator

import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore:Error (reading|writing) persistent compilation cache"),  # full as well
    pytest.mark.usefixtures("failing_disk"),
]
WIDE = ("nn.Dense(3)(x)", "nn.Dense(3)(nn.Dense(3000)(x))")
FULL = "cannot be written: File too large"
AGAIN = "\n  -> free space or correct the permissions, then run the same command again: it continues"


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes while the context lasts: writes fail in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_full_before_anything(folder) -> None:
    with full_disk(100):
        error = folder.refused("train", "recipe.yaml")
    remedy = "choose another output_dir, or correct its permissions"
    assert error == f"recipe.yaml:7: output_dir: run {FULL}\n  -> {remedy}"
    folder.done("train", "recipe.yaml")


@pytest.mark.slow
def test_full_before_the_first_step(folder) -> None:
    with full_disk(400):
        error = folder.refused("train", "recipe.yaml", leaves=["run", "run/metrics.jsonl"])
    assert error == f"FOLDER/run/recipe.resolved.yaml: {FULL}\n  -> free space"
    folder.done("train", "recipe.yaml")


@pytest.mark.slow
def test_full_while_metrics_are_written(folder) -> None:
    folder.plugin(plus="def run_fn(run):\n    for i in range(99):\n        run.log({'round': i}), run.save()\n")
    with full_disk(3000):
        error = folder.refused("train", "recipe.yaml", leaves=["run", r"run/[\w.]*"])
    assert error == (
        f"FOLDER/run/metrics.jsonl: {FULL}\n"
        "  -> free space, or set output_dir to a place you can write to; then start again"
    )


@pytest.mark.slow
def test_full_at_the_first_checkpoint(folder) -> None:
    folder.plugin(WIDE)
    with full_disk(15_000):
        error = folder.refused("train", "recipe.yaml", "train.steps=6", leaves=["run", r"run/[\w.]*", r"run/.*-tmp.*"])
    assert error == f"run/checkpoint-2: {FULL}; complete before it: none{AGAIN}"


@pytest.mark.slow
def test_full_at_a_later_checkpoint(folder) -> None:
    """The checkpoint before is complete, and with space again the same command continues from it."""
    filling = """
saved = resource.getrlimit(resource.RLIMIT_FSIZE)
evaluations = []


def metric_fn(ctx, examples, predictions):
    evaluations.append(1)
    while not os.path.isdir("run/checkpoint-2") and len(evaluations) == 2:
        time.sleep(0.01)  # it is written in the background
    if len(evaluations) == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, saved[1]))
    return {}
"""
    command = ("train", "recipe.yaml", "train.steps=6", "eval.predict=true")
    folder.plugin(WIDE, ("import optax\n", "import os, resource, time\nimport optax\n"), plus=filling)
    with full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[0]):  # to set it back
        error = folder.refused(*command, leaves=["run(/.*)?"])
    assert error == f"run/checkpoint-4: {FULL}; complete before it: checkpoint-2{AGAIN}"
    folder.plugin(WIDE)
    assert folder.done(*command)[1].startswith("continuing from run/checkpoint-2\n")
    assert [path.name for path in (folder.root / "run").iterdir() if "tmp" in path.name] == []


@pytest.mark.slow
def test_full_while_predictions_are_written(folder) -> None:
    folder.done("train", "recipe.yaml")
    folder.write(in__jsonl='{"x": [1, 2], "y": 0}\n' * 200)
    command = ("predict", "run", "--input", "in.jsonl", "predict.batch_size=8")
    with full_disk(9_000):
        error = folder.refused(*command, leaves=["run/predictions(/.*)?"])
    assert error == f"run/predictions/in.jsonl: {FULL}{AGAIN}"
    assert not (folder.root / "run/predictions/in.jsonl").exists()
    folder.done(*command)
    lines = (folder.root / "run/predictions/in.jsonl").read_text().splitlines()
    assert len(lines) == 200
    assert [path.name for path in (folder.root / "run/predictions").iterdir()] == ["in.jsonl"]


@pytest.mark.slow
def test_full_while_a_starter_is_copied(folder) -> None:
    with full_disk(500):
        error = folder.refused("init", "new", leaves=["new(/.*)?"])
    assert error == f"new: {FULL}\n  -> choose another directory"
    shutil.rmtree("new", ignore_errors=True)
    folder.done("init", "new")


@pytest.mark.parametrize("place", ["recipe.yaml", "recipe.yaml/new", "/proc/new"])
def test_a_starter_where_nothing_can_be_written(folder, place: str) -> None:
    error = folder.refused("init", place)
    assert error.startswith(f"{place}: cannot be written: ")
    assert error.endswith("\n  -> choose another directory")
