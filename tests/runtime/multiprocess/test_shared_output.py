"""An output directory that the processes of a run do not share is named before anything waits for it."""

import os
import threading
import time
from pathlib import Path

import pytest

from redco_cli.errors import StorageError
from redco_cli.run import train
from redco_cli.training.saving import resume
from tests.runtime.multiprocess.processes import Ended, ended, free_port, run_several, start

SHORT = ["train.steps=2", "eval.every=2", "eval.predict=false", "mesh={data: 2}"]


def apart(project: Path, *overrides: str) -> list[Ended]:
    """Two processes with the same files and the same relative output directory, each in a directory of its own."""
    other = project / "other"
    other.mkdir(exist_ok=True)
    for name in ("plugin.py", "recipe.yaml"):
        (other / name).write_bytes((project / name).read_bytes())
    port, children = free_port(), []
    for process, place in enumerate((project, other)):
        os.chdir(place)
        children.append(start(["train", "recipe.yaml", *SHORT, *overrides], process, 2, port))
    os.chdir(project)
    return ended(children, 90)


@pytest.mark.slow
def test_an_output_directory_that_is_not_shared_is_named_on_all(project: Path) -> None:
    for end in apart(project):
        assert end.code == 1, end.err
        problem = f"output_dir: process 1 does not see what process 0 writes to {project}/run\n"
        assert f"{problem}  -> put output_dir on a disk that all processes share" in end.err
    assert list(project.glob("run/.shared*")) == list(project.glob("other/run/.shared*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("owner", [0, 1])
def test_checkpoints_that_are_not_shared_are_named_on_all(project: Path, owner: int) -> None:
    """Rather than taken for damaged where they are not."""
    train("recipe.yaml", [*SHORT, "mesh={data: 1}"])
    if owner == 1:
        (project / "other").mkdir()
        (project / "run").rename(project / "other/run")
    unseen = "checkpoint-2 in" if owner == 0 else "what process 0 writes to"
    for end in apart(project, "train.steps=4"):
        assert end.code == 1, end.err
        assert f"output_dir: process 1 does not see {unseen}" in end.err


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_the_mark_is_gone_and_a_shared_run_continues() -> None:
    run_several(["train", "recipe.yaml", *SHORT], 2, 1)
    run_several(["train", "recipe.yaml", *SHORT, "eval.every=9", "checkpoint.every=9"], 2, 1)
    assert [path.name for path in Path("run").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("blind", "said"), [((1,), "process 1 does not"), ((2, 3, 5), "process 2 and 2 more do not")])
def test_who_does_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: tuple[int, ...], said: str
) -> None:
    (tmp_path / "mark").touch()
    monkeypatch.setattr(
        resume, "process_allgather", lambda _, seen: [seen and process not in blind for process in range(6)]
    )
    with pytest.raises(StorageError) as error:
        resume.refuse_unshared(tmp_path, "mark", "output_dir", "it")
    assert str(error.value) == f"output_dir: {said} see it\n  -> put output_dir on a disk that all processes share"


def test_a_file_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    """As where a network's file system remembers a listing; it is then not waited for longer."""
    timer = threading.Timer(0.5, (tmp_path / "mark").touch)
    timer.start()
    begin = time.monotonic()
    resume.refuse_unshared(tmp_path, "mark", "output_dir", "it")
    assert 0.4 < time.monotonic() - begin < 5
    timer.join()


def test_a_process_alone_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "process_allgather", None)
    resume.open_output(tmp_path / "run", "output_dir")
    assert list((tmp_path / "run").iterdir()) == []
