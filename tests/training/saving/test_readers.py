"""Readers of a live run: a checkpoint that the run deletes while it is read is no damage, and the next one is taken."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import evaluate, predict, train
from redco_cli.trained import export, load_model
from redco_cli.training.saving import saved
from redco_cli.training.saving.files.deletion import CheckpointDeletedError
from redco_cli.training.saving.saved import SavedCheckpoints
from redco_cli.training.saving.selection import choosing_again
from tests.training.tiny import write_project

READERS: dict[str, Callable[[str], Any]] = {
    "predict": lambda choice: predict("run", output="out.jsonl", checkpoint=choice).read_text(),
    "eval": lambda choice: dict(evaluate("run", checkpoint=choice).values),
    "load_model": lambda choice: jax.tree.map(
        np.asarray, load_model("run" if choice in ("last", "best") else choice)[1]
    ),
    "export": lambda choice: export("run", output="exported", checkpoint=choice).nbytes,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run has checkpoints of steps 8, 9 and 12; the first and the last were evaluated."""
    directory = tmp_path_factory.mktemp("project")
    write_project(directory)
    with contextlib.chdir(directory):
        train("recipe.yaml", ["eval.predict=false"])
    return directory


@pytest.fixture
def run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in the working directory."""
    shutil.copytree(source, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project/run"


def delete(path: Path) -> None:
    """As a run does it: the name is gone at once."""
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(f"{path.name}.old.orbax-checkpoint-tmp")))


def vanishing(monkeypatch: pytest.MonkeyPatch, when: str, *steps: int) -> None:
    """Deletes checkpoints once each is chosen: before its files are compared, or after, before anything is restored."""
    find = saved.find_damage

    def find_damage(path: Path, *rest: Any) -> str | None:
        doomed = path.name in [f"checkpoint-{step}" for step in steps]
        if doomed and when == "before":
            delete(path)
        found = find(path, *rest)
        if doomed:
            delete(path)
        return found

    monkeypatch.setattr(saved, "find_damage", find_damage)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reader", ["predict", "load_model", pytest.param("eval", marks=pytest.mark.slow)])
def test_the_next_one_is_taken(
    run: Path, reader: str, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = READERS[reader]("run/checkpoint-9")
    vanishing(monkeypatch, when, 12)
    capsys.readouterr()
    found = READERS[reader]("last")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    said = " ".join(capsys.readouterr().err.split())
    assert "run/checkpoint-12 was deleted while it was read; the newest one is looked for again" in said
    assert "damaged" not in said
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}


@pytest.mark.usefixtures("run")
def test_the_next_best_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = READERS["predict"]("run/checkpoint-8")
    vanishing(monkeypatch, "after", 12)
    assert READERS["predict"]("best") == expected


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("reader", ["predict", "load_model"])
def test_one_that_was_named_is_not_replaced(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vanishing(monkeypatch, "after", 12)
    with pytest.raises(RedcoError) as error:
        READERS[reader]("run/checkpoint-12")
    assert str(error.value) == (
        "run/checkpoint-12: was deleted while it was read: its run keeps the newest checkpoint.keep, and the best\n"
        "  -> choose another, or a copy of it elsewhere; or let the run keep more of them"
    )


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "when", ["before", *(pytest.param(one, marks=pytest.mark.slow) for one in ("after", "at last"))]
)
def test_a_run_begins_with_the_next_of_a_live_one(
    when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if when == "at last":
        restore, doomed = SavedCheckpoints.restore_params, [Path("run/checkpoint-12")]

        def restore_params(self: SavedCheckpoints, *arguments: Any) -> Any:
            while doomed:
                delete(doomed.pop())
            return restore(self, *arguments)

        monkeypatch.setattr(SavedCheckpoints, "restore_params", restore_params)
    else:
        vanishing(monkeypatch, when, 12)
    short = ["train.steps=1", "train.warmup=1", "eval.at_start=false", "eval.predict=false"]
    train("recipe.yaml", ["model.params=run", "output_dir=new", *short])
    said = " ".join(capsys.readouterr().err.split())
    assert "run/checkpoint-12 was deleted while it was read; the newest one is looked for again" in said
    assert "beginning with the parameters of run/checkpoint-9" in said


@pytest.mark.usefixtures("run")
def test_all_of_them_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    vanishing(monkeypatch, "before", 8, 9, 12)
    with pytest.raises(RedcoError, match="run: holds no checkpoint"):
        READERS["predict"]("last")


def test_it_is_not_tried_for_ever() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise CheckpointDeletedError.at(Path("run/checkpoint-3"))

    with pytest.raises(CheckpointDeletedError):
        choosing_again(attempt)
    assert len(tries) == 5


LIVE = """
from redco_cli.run import train
train("recipe.yaml", ["output_dir=live", "train.steps=100000", "checkpoint.every=1", "checkpoint.keep=1",
    "eval.every=null", "eval.at_start=false", "eval.predict=false", "plugin.options.seconds=0.05", "logging.every=50"])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:coroutine '_read_array:RuntimeWarning")  # each test has filters of its own
@pytest.mark.usefixtures("run")
def test_readers_of_a_run_that_saves_all_the_time() -> None:
    with subprocess.Popen([sys.executable, "-c", LIVE], stderr=subprocess.DEVNULL) as live:
        try:
            while not list(Path("live").glob("checkpoint-*[0-9]")):
                assert live.poll() is None
            for number in range(12):
                assert predict("live", output=f"{number}.jsonl").read_text().count("\n") == 21
                assert load_model("live")[1]
                evaluate("live")
            assert live.poll() is None
        finally:
            live.kill()
