"""Checkpoints on a disk that fails: damaged, full, or cut off while it was written."""

import contextlib
import errno
import json
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint._src.path import atomicity

from redco_cli.errors import RedcoError
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict, train
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.files.integrity import MANIFEST_NAME, find_damage, write_manifest
from redco_cli.training.saving.meta import Meta, read_meta
from redco_cli.training.saving.resume import find_start
from redco_cli.training.state import TrainState, new_state
from redco_cli.training.timeline import make_timeline
from tests.training.tiny import EXAMPLES, assert_same_run, damages, files, final_state, put, recorded, write_project

HARMLESS = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""What orbax writes after the manifest: nothing of it is restored."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run `whole` has checkpoints of steps 8, 9 and 12, of which 8 and 12 were evaluated."""
    directory = tmp_path_factory.mktemp("project")
    write_project(directory)
    with contextlib.chdir(directory):
        train("recipe.yaml", ["output_dir=whole"])
    return directory


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the run, as `run` in the working directory."""
    monkeypatch.chdir(project)
    shutil.copytree("whole", "run")
    yield project / "run"
    shutil.rmtree("run")


def same() -> Any:
    """What the whole run says of its code and data."""
    return json.loads(Path("whole/checkpoint-12/meta/metadata").read_text())["identity"]


SAME = SimpleNamespace(now=same, directory=Path("run"))


def start_step(run: Path) -> int:
    loaded = load_recipe("recipe.yaml", [f"output_dir={run}"])
    start, _ = find_start(loaded, make_timeline(loaded.recipe, EXAMPLES, loaded.where), SAME)
    start.checkpoints.close()
    return start.step


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def largest(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.slow
def test_a_damaged_file_is_noticed_before_anything_is_restored(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file of the newest checkpoint, in six ways: the one before it is taken, and both are named."""
    newest, random = run / "checkpoint-12", np.random.default_rng(0)
    assert start_step(run) == 12
    names = files(newest)
    assert {MANIFEST_NAME, *HARMLESS, "meta/metadata", "params/_METADATA", "training/_METADATA"} <= set(names)
    assert len(names) > 20
    for name in names:
        content = (newest / name).read_bytes()
        for kind, changed in damages(content, random):
            put(newest / name, changed)
            capsys.readouterr()
            assert start_step(run) == (12 if name in HARMLESS else 9), (name, kind)
            if name not in HARMLESS:
                said = " ".join(capsys.readouterr().err.split())
                assert said.startswith("warning: run/checkpoint-12 is damaged: "), (name, kind)
                if name != MANIFEST_NAME:  # a flipped bit of it may be one of another file's name
                    assert name in said
                assert said.endswith("; checkpoint-9 is taken instead")
        (newest / name).write_bytes(content)
    assert start_step(run) == 12


def test_a_run_continues_from_the_newest_whole_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(largest(run / "checkpoint-12" / "params" / "d"))
    shutil.copytree(run / "checkpoint-12", run / "checkpoint-12.damaged")
    (run / "checkpoint-9" / "meta" / "metadata").unlink()
    kept = files(run / "checkpoint-9")
    train("recipe.yaml")
    said = " ".join(capsys.readouterr().err.split())
    assert "run/checkpoint-12 is damaged: params/d/" in said
    assert "holds other bytes than were written; checkpoint-8 is taken instead" in said
    assert "run/checkpoint-9 is damaged: meta/metadata is missing; checkpoint-8 is taken instead" in said
    assert "continuing from run/checkpoint-8" in said
    assert_same_run("run", "whole")
    assert files(run / "checkpoint-9.damaged") == kept
    assert (run / "checkpoint-12.damaged-2").is_dir()
    assert find_damage(run / "checkpoint-12") is None


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(run: Path) -> None:
    steps = sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*"))
    for step in steps:
        (run / f"checkpoint-{step}" / "training" / "_METADATA").unlink()
    problem = "; ".join(f"run/checkpoint-{step} is damaged: training/_METADATA is missing" for step in steps[::-1])
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml")
    assert str(refused.value) == (
        f"run: no checkpoint is whole: {problem}\n  -> restore one from a copy, or move all of them away to start anew"
    )
    assert recorded("run") == recorded("whole")
    predict("run", output="whole-params.jsonl")  # needs only parameters, and these are whole


def test_a_checkpoint_asked_for_by_name_must_be_whole(run: Path) -> None:
    spoil(largest(run / "checkpoint-12" / "params" / "d"))
    named = largest(run / "checkpoint-12" / "params" / "d").relative_to(run / "checkpoint-12")
    text = f"run/checkpoint-12: is damaged: {named} holds other bytes than were written\n"
    text += "  -> choose another, such as run/checkpoint-9"
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", ["output_dir=other", "checkpoint.resume=run/checkpoint-12"])
    assert str(refused.value) == text
    assert not Path("other").exists()
    with pytest.raises(RedcoError) as refused:
        predict("run", output="out.jsonl", checkpoint="run/checkpoint-12")
    assert str(refused.value) == text


def test_prediction_takes_the_newest_or_best_whole_parameters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = predict("run", output="nine.jsonl", checkpoint="run/checkpoint-9").read_text()
    spoil(run / "checkpoint-12" / "params" / "_METADATA")
    capsys.readouterr()
    assert predict("run", output="last.jsonl").read_text() == expected
    said = " ".join(capsys.readouterr().err.split())
    assert "run/checkpoint-12 is damaged: params/_METADATA holds other bytes than were written" in said
    assert "checkpoint-9 is taken instead" in said
    assert (run / "checkpoint-12").is_dir()  # only training sets it aside
    predict("run", output="best.jsonl", checkpoint="best")
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-8 is taken instead" in said  # the only other one that was evaluated


def test_a_checkpoint_under_the_name_of_another_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Skipped and set aside, an older one too; refused where it was named."""
    (run / "checkpoint-12").rename(run / "checkpoint-11")
    (run / "checkpoint-8").rename(run / "checkpoint-7")
    for action in (
        lambda path: predict("run", output="out.jsonl", checkpoint=path),
        lambda path: train("recipe.yaml", ["output_dir=other", f"checkpoint.resume={path}"]),
    ):
        with pytest.raises(RedcoError) as refused:
            action("run/checkpoint-11")
        text = "run/checkpoint-11: is damaged: it says that it is of step 12\n  -> choose another, such as run/"
        assert str(refused.value).startswith(text)
    predict("run", output="out.jsonl")
    said = "run/checkpoint-11 is damaged: it says that it is of step 12; checkpoint-9 is taken instead"
    assert said in " ".join(capsys.readouterr().err.split())
    train("recipe.yaml")
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "run/checkpoint-7 is damaged: it says that it is of step 8; it is ignored" in told
    assert (run / "checkpoint-11.damaged").is_dir()
    assert (run / "checkpoint-7.damaged").is_dir()
    assert_same_run("run", "whole")


SAVES = """
import dataclasses, gc, sys
from pathlib import Path
import jax, jax.numpy as jnp, optax
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.meta import Meta
from redco_cli.training.state import new_state

checkpoints = Checkpoints(Path(sys.argv[1]), 2, "min")
state = jax.device_put(new_state({"w": jnp.zeros((50, 50))}, frozenset(), optax.adam(1.0)), jax.devices()[0])


def resident(first, last):
    for step in range(first, last):
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(step)), Meta(step, None, None, False, {}))
    checkpoints.wait()
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


before = resident(0, 60)
print((resident(60, 260) - before) / 200)
"""


@pytest.mark.slow
def test_saves_leave_little_memory_behind(tmp_path: Path) -> None:
    """13 KiB each were seen, of orbax and tensorstore; 45 KiB while it collected metrics for a log."""
    done = subprocess.run([sys.executable, "-c", SAVES, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 28


def test_what_earlier_versions_did_not_say_is_as_it_was_then() -> None:
    old = {"step": 4, "metric": 0.5, "best": [4, 0.5], "put_off": False, "recipe": {}, "data": None}
    assert read_meta(old, 4) == Meta(4, 0.5, (4, 0.5), False, {})
    with pytest.raises(ValueError, match="meta does not say"):
        read_meta({**old, "unheard": 1}, 4)
    with pytest.raises(ValueError, match="it says that it is of step 4"):
        read_meta(old, 5)


def test_a_manifest_tells_what_changed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"12345")
    (tmp_path / "two").write_bytes(b"")
    write_manifest(tmp_path)
    assert json.loads((tmp_path / MANIFEST_NAME).read_text()) == {"files": {"a/one": [5, 3421846044], "two": [0, 0]}}
    assert find_damage(tmp_path) is None
    (tmp_path / ".nfs0001").write_bytes(b"left by a network file system")
    assert find_damage(tmp_path) is None
    (tmp_path / "a" / "one").write_bytes(b"12346")
    assert find_damage(tmp_path) == "a/one holds other bytes than were written"
    assert find_damage(tmp_path, ("two",)) is None
    shares = [find_damage(tmp_path, share=slice(process, None, 2)) for process in range(2)]
    assert shares == ["a/one holds other bytes than were written", None]
    (tmp_path / "a" / "one").write_bytes(b"1234")
    assert find_damage(tmp_path) == "a/one has 4 bytes of 5"
    (tmp_path / "a" / "one").write_bytes(b"12345")
    (tmp_path / "a" / "three").write_bytes(b"")
    assert find_damage(tmp_path) == "a/three was added"
    (tmp_path / MANIFEST_NAME).write_text('{"files": [1]}')
    assert find_damage(tmp_path) == "manifest.json is no manifest"
    (tmp_path / MANIFEST_NAME).unlink()
    assert find_damage(tmp_path) == "manifest.json is missing"


META = Meta(5, None, None, False, {})


def state_of(value: float) -> TrainState:
    return jax.device_put(new_state({"w": jnp.full(3, value)}, frozenset(), optax.adam(1.0)), jax.devices()[0])


def value_in(directory: Path) -> float:
    """What the newest checkpoint holds, as another process finds it."""
    checkpoints = Checkpoints(directory, 3, "min")
    assert checkpoints.steps() == [5]
    assert checkpoints.damage(5) is None
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_of(0)
    )
    restored = checkpoints.restore(5, abstract)
    assert checkpoints.meta(5) == META
    return float(restored.params["w"][0])


def test_a_save_that_replaces_another_leaves_one_whole_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is renamed, before and after it another process finds one of the two, whole."""
    checkpoints, rename, found = Checkpoints(tmp_path, 3, "min"), Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        found.append(value_in(tmp_path))
        moved = rename(self, target)
        found.append(value_in(tmp_path))
        return moved

    checkpoints.save(state_of(1.0), META)
    checkpoints.save(state_of(7.0), META)
    checkpoints.wait()
    assert value_in(tmp_path) == 1.0  # it is saved already
    monkeypatch.setattr(Path, "rename", watched)
    checkpoints.save(state_of(2.0), META, replace=True)
    checkpoints.save(state_of(3.0), META, replace=True)
    checkpoints.close()
    assert found == [2.0] * 4 + [3.0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert value_in(tmp_path) == 3.0


def test_a_replacement_that_was_killed_or_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, 3, "min")
    checkpoints.save(state_of(1.0), META)
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr("redco_cli.training.saving.checkpoint.write_manifest", full_disk)
        checkpoints.save(state_of(2.0), META, replace=True)
        with pytest.raises(RedcoError, match=r"checkpoint-5: cannot be written: No space .* before it: checkpoint-5\n"):
            checkpoints.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
        assert value_in(tmp_path) == 1.0
    checkpoints.save(state_of(3.0), META, replace=True)
    checkpoints._checkpointer.wait_until_finished()  # and is killed then
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-5", "checkpoint-5.new"}
    assert value_in(tmp_path) == 3.0
    following = Checkpoints(tmp_path, 3, "min")
    following.sweep()
    following.close()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert value_in(tmp_path) == 3.0
    checkpoints.close()


def full_disk(_directory: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.usefixtures("failing_disk")
@pytest.mark.parametrize("size", [0, 70, 300, 1000])
def test_a_save_that_fails_leaves_the_one_before_it(run: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The limit hits a directory's first file, a file in its middle, or the manifest at the end."""
    save = Checkpoints.save

    def failing(self: Checkpoints, state: object, meta: Meta, *rest: object, **named: bool) -> None:
        self.wait()
        with files_up_to(size) if meta.step == 12 else contextlib.nullcontext():
            save(self, state, meta, *rest, **named)  # type: ignore[arg-type]
            self.wait()

    shutil.rmtree(run / "checkpoint-12")
    monkeypatch.setattr(Checkpoints, "save", failing)
    with pytest.raises(RedcoError) as failed:
        train("recipe.yaml")
    assert str(failed.value) == (
        "run/checkpoint-12: cannot be written: File too large; complete before it: checkpoint-8, checkpoint-9\n"
        "  -> free space or correct the permissions, then run the same command again: it continues"
    )
    left = {path.name for path in run.iterdir()}
    assert {name for name in left if "checkpoint" in name} == {"checkpoint-8", "checkpoint-9"}
    monkeypatch.undo()
    monkeypatch.chdir(run.parent)
    train("recipe.yaml")
    assert_same_run("run", "whole")


@pytest.mark.slow
def test_a_directory_that_cannot_be_made(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left that would write into it, waits for it, and keeps the process from its end for minutes."""
    make = atomicity._create_tmp_directory

    async def refused(to_make: object, path: Path, **how: object) -> Path:
        if path.parent.name.startswith("checkpoint-12."):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return await make(to_make, path, **how)

    shutil.rmtree(run / "checkpoint-12")
    monkeypatch.setattr(atomicity, "_create_tmp_directory", refused)
    before = {thread.ident for thread in threading.enumerate()}
    with pytest.raises(RedcoError, match="run/checkpoint-12: cannot be written: Disk quota exceeded"):
        train("recipe.yaml")
    assert [one.name for one in threading.enumerate() if one.ident not in before and not one.daemon] == []
    monkeypatch.undo()
    monkeypatch.chdir(run.parent)
    train("recipe.yaml")
    assert_same_run("run", "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("failing_disk")
def test_a_full_disk(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, where the tests may mount it: the error says so, and with room the run ends as it should."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    monkeypatch.chdir(project)
    try:
        with pytest.raises(RedcoError, match=r"cannot be written: No space left on device; complete before it: "):
            train("recipe.yaml", [f"output_dir={disk}/run", "checkpoint.keep=20"])
        saved = sorted((disk / "run").glob("*checkpoint*"))
        assert saved
        assert all(path.name.partition("-")[2].isdigit() and find_damage(path) is None for path in saved)
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        train("recipe.yaml", [f"output_dir={disk}/run", "checkpoint.keep=20"])
        assert recorded(f"{disk}/run") == recorded("whole")
        found, expected = final_state(f"{disk}/run", 12), final_state("whole", 12)
        assert all((found[name] == value).all() for name, value in expected.items())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
