"""One run owns its output directory: a second is refused, and what happens to one that loses it, or the directory."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import predict, train
from redco_cli.runtime import holder, lease
from redco_cli.runtime.lease import NAME, take
from redco_cli.runtime.liveness import this_process
from redco_cli.training.loop import TrainingRun
from redco_cli.training.records.metrics import read_records
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.files.integrity import find_damage
from redco_cli.training.saving.owner import check_owner, is_owned, owning
from tests.training.tiny import assert_same_run, interrupted, recorded, write_project

QUICK = "eval.predict=false"
TRAIN = """
import sys
from redco_cli.console import print_error
from redco_cli.errors import RedcoError
from redco_cli.run import train
try:
    train("recipe.yaml", sys.argv[1:])
except RedcoError as error:
    print_error(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    write_project(directory)
    with contextlib.chdir(directory):
        train("recipe.yaml", ["output_dir=whole", QUICK])
    return directory / "whole"


@pytest.fixture
def whole(finished: Path, project: Path) -> None:
    """That run, as `whole` in the working directory."""
    shutil.copytree(finished, project / "whole")


def start(*overrides: str, where: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", where + TRAIN, *overrides], stderr=subprocess.PIPE, text=True)
    STARTED.append(process)
    return process


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        return process.wait(timeout=200), process.stderr.read() if process.stderr else ""


def files(directory: Path) -> dict[str, bytes]:
    """Every file but the lease, whose count its holder renews."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != NAME)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@contextlib.contextmanager
def at_step(step: int, action: Callable[[], None]) -> Iterator[None]:
    """Does something once, in the loop, after a step of the next run."""
    is_milestone, done = TrainingRun._is_milestone, []

    def acting(self: TrainingRun, at: int) -> bool:
        if at == step and not done:
            done.append(at)
            self._setup.checkpoints.wait()
            action()
        return is_milestone(self, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "_is_milestone", acting)
        yield


@contextlib.contextmanager
def held(directory: str) -> Iterator[None]:
    """The lease of a directory, held and renewed by a process that is elsewhere."""
    Path(directory).mkdir(exist_ok=True)
    mine = replace(this_process(), host="node7", boot="another")
    taken, ends = take(Path(directory), print, identity=mine), threading.Event()

    def renew() -> None:
        while not ends.wait(0.1):
            taken.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        taken.release()


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_a_second_run_is_refused_and_the_first_is_as_if_alone(project: Path) -> None:
    """Whatever the first does at that moment; the second is told who it is, and has touched nothing."""
    refused: list[str] = []

    def second() -> None:
        before = files(project / "run")
        with pytest.raises(RedcoError) as error:
            train("recipe.yaml", [QUICK])
        refused.append(str(error.value))
        assert files(project / "run") == before
        predict("run", output="predictions.jsonl", checkpoint="last")

    with at_step(7, second):
        train("recipe.yaml", [QUICK])
    host, pid = this_process().host, os.getpid()
    (said,) = refused
    assert said.startswith(f"recipe.yaml:8: output_dir: run is written by host {host}, pid {pid}, since 20")
    assert "  -> wait for its end, or stop it, and the same command continues; or choose another output_dir" in said
    assert_same_run("run", "whole")
    assert not (project / "run" / NAME).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("project", "whole")
def test_of_two_processes_one_trains() -> None:
    """The other one tells of it by its exit code, though the first stands still; that one goes on where it stood."""
    first = start(QUICK)
    while not list(Path("run").glob("checkpoint-3")):
        assert first.poll() is None
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    before = files(Path("run"))
    code, said = ended(start(QUICK))
    assert code == 1
    assert f"run is written by host {this_process().host}, pid {first.pid}, since 20" in " ".join(said.split())
    assert files(Path("run")) == before
    first.send_signal(signal.SIGCONT)
    assert ended(first)[0] == 0
    assert_same_run("run", "whole")


@pytest.mark.usefixtures("project")
def test_a_run_that_is_refused_or_fails_leaves_nothing() -> None:
    with pytest.raises(RedcoError, match="nothing is no checkpoint"):
        train("recipe.yaml", ["checkpoint.resume=nothing", "output_dir=new/deep/run", QUICK])
    assert not Path("new").exists()
    with at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(RedcoError, match="stopped by"):
        train("recipe.yaml", [QUICK])
    assert not (Path("run") / NAME).exists()
    with held("run"), pytest.raises(RedcoError, match="run is written by host node7, pid"):
        train("recipe.yaml", [QUICK])


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("step", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_that_lost_its_lease_writes_nothing_more(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """As one that was frozen: between two records, or just before a save. The other's files stay as they are."""
    left: dict[str, bytes] = {}
    others = Path("run/checkpoint-9.orbax-checkpoint-tmp")

    def frozen() -> None:
        monkeypatch.setattr(holder, "is_running", lambda _: None)
        mine = replace(this_process(), host="node7", pid=77)
        take(Path("run").resolve(), lambda _: None, patience=0.2, identity=mine)
        others.mkdir()
        (others / "data").write_bytes(b"the other's")
        left.update(files(Path("run")))

    with at_step(step, frozen), pytest.raises(RedcoError) as error:
        train("recipe.yaml", [QUICK])
    said = str(error.value)
    assert said.startswith("run: was taken over by another run (host node7, pid 77, since 20")
    assert "as this one did not renew its lease in time: it was stopped, or its host or its disk stood still\n" in said
    assert "let one run at a time have this output_dir" in said
    assert files(Path("run")) == left
    assert (Path("run") / NAME).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_save_that_was_under_way_is_not_finished_under_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are all written, and the directory would get its name."""
    seal = Checkpoints._seal

    def frozen(self: Checkpoints) -> None:
        if self._saving.name == "checkpoint-6":
            monkeypatch.setattr(holder, "is_running", lambda _: None)
            take(self.directory, lambda _: None, patience=0.1, identity=replace(this_process(), host="node7"))
        seal(self)

    monkeypatch.setattr(Checkpoints, "_seal", frozen)
    with pytest.raises(RedcoError, match="run: was taken over by another run \\(host node7"):
        train("recipe.yaml", [QUICK])
    assert not Path("run/checkpoint-6").exists()
    assert find_damage(Path("run/checkpoint-3")) is None


@pytest.mark.slow
@pytest.mark.usefixtures("project", "whole")
@pytest.mark.parametrize(("step", "how"), [(5, "moved"), (12, "deleted"), (5, "deleted"), (12, "moved")])
def test_a_directory_that_is_deleted_under_its_run_is_made_anew(
    step: int, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its middle, and after the last save: all that comes from then on is there, whole."""

    def vanish() -> None:
        if how == "moved":
            Path("run").rename("moved")
        while Path("run").exists():
            shutil.rmtree("run", ignore_errors=True)  # the run deletes older checkpoints at the same time

    capsys.readouterr()
    with at_step(step, vanish):
        outcome = train("recipe.yaml", [QUICK])
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: run was deleted or moved while the run wrote it; it is made anew, and the next checkpoint" in said
    assert "run/metrics.jsonl was deleted or replaced while the run wrote it; it goes on there with step" in said
    assert outcome.checkpoint == Path("run/checkpoint-12").resolve()
    assert {path.name for path in Path("run").iterdir()} >= {"recipe.resolved.yaml", "sharding.json", "metrics.jsonl"}
    assert not (Path("run") / NAME).exists()
    whole = [row for row in recorded("whole") if row["step"] >= step]
    found = recorded("run")
    assert found == whole[-len(found) :]
    assert len(found) > 1 if step == 5 else found
    if how == "moved":
        assert not (Path("moved") / NAME).exists()
        train("recipe.yaml", ["output_dir=moved", QUICK])
        assert_same_run("moved", "whole")
    assert train("recipe.yaml", [QUICK]).was_finished


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_checkpoint_that_is_deleted_while_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle, the next one comes when it is due; at the end it is written once more."""
    seal, seen = Checkpoints._seal, []

    def deleted(self: Checkpoints) -> None:
        name = self._saving.name
        if name in ("checkpoint-6", "checkpoint-12") and name not in seen:
            seen.append(name)
            shutil.rmtree(self.directory)
        seal(self)

    monkeypatch.setattr(Checkpoints, "_seal", deleted)
    outcome = train("recipe.yaml", [QUICK])
    said = " ".join(capsys.readouterr().err.split())
    for name in ("checkpoint-6", "checkpoint-12"):
        assert f"warning: run/{name} was deleted while it was written; the next one is written when it is due" in said
    assert outcome.checkpoint.name == "checkpoint-12"
    assert find_damage(outcome.checkpoint) is None
    assert train("recipe.yaml", [QUICK]).was_finished


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_stop_saves_again_what_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    seal, seen = Checkpoints._seal, []

    def deleted(self: Checkpoints) -> None:
        if self._saving.name == "checkpoint-5" and not seen:
            seen.append(5)
            shutil.rmtree(self.directory)
        seal(self)

    monkeypatch.setattr(Checkpoints, "_seal", deleted)
    interrupted(5, QUICK)
    assert seen
    assert find_damage(Path("run/checkpoint-5")) is None


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "what", ["full", *(pytest.param(what, marks=pytest.mark.slow) for what in ("file", "unfinished"))]
)
def test_a_directory_that_cannot_be_made_anew_ends_the_run(what: str) -> None:
    """Never where another directory is by then."""

    def vanish() -> None:
        Path("run").rename("moved")
        if what == "file":
            Path("run").write_text("in the way")
        else:
            Path("run/checkpoint-3.orbax-checkpoint-tmp").mkdir(parents=True)  # as a save makes it that goes on
            if what == "full":
                Path("run/metrics.jsonl").write_text("")

    with at_step(5, vanish), contextlib.ExitStack() as stack:
        if what != "unfinished":
            stack.enter_context(
                pytest.raises(RedcoError, match="run: was deleted or moved while the run wrote it, and")
            )
        train("recipe.yaml", [QUICK])
    if what == "full":
        assert {path.name for path in Path("run").iterdir()} == {"metrics.jsonl", "checkpoint-3.orbax-checkpoint-tmp"}


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_metrics_file_that_is_deleted_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    with at_step(5, lambda: Path("run/metrics.jsonl").unlink()):
        train("recipe.yaml", [QUICK])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("run/metrics.jsonl was deleted or replaced while the run wrote it; it goes on there with") == 1
    assert [row["step"] for row in recorded("run") if row["kind"] == "train"] == list(range(5, 13))


def test_the_thread_notices_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "RENEWAL", 0.02)
    run = tmp_path / "run"
    check_owner(run)
    with owning(run, "output_dir"):
        before = (run / NAME).read_bytes()
        time.sleep(0.2)
        assert (run / NAME).read_bytes() != before
        (run / NAME).unlink()
        time.sleep(0.2)
        assert is_owned(run)
        shutil.rmtree(run)
        time.sleep(0.2)
        assert (run / NAME).exists()
        shutil.rmtree(run)
        run.write_text("in the way")
        time.sleep(0.2)
        assert not is_owned(run)
        with pytest.raises(RedcoError, match=r"cannot be made anew: .*run cannot be written: File exists"):
            check_owner(run)
    said = capsys.readouterr().err.replace("\n", " ")
    for text in ("the lease of", "was deleted or moved while", "this run ends where it would write next"):
        assert said.count(text) >= 1, text
    assert check_owner(run) is None


ENDS = """
import sys
from pathlib import Path
from redco_cli.runtime.stopping.signals import end_now
from redco_cli.training.saving.owner import owning
with owning(Path(sys.argv[1]), "output_dir"):
    end_now(75)
"""


def test_a_process_that_ends_at_once_leaves_no_lease(tmp_path: Path) -> None:
    """As a signal does before there is anything to save, or a stop that comes too late."""
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=False)
    assert done.returncode == 75
    assert list(tmp_path.iterdir()) == []


ELSEWHERE = """
from dataclasses import replace
from redco_cli.runtime import holder, lease
here = lease.this_process()
lease.this_process = lambda: replace(here, host="node7", boot="another")
holder.is_running = lambda _: None
lease.PATIENCE = 3.0
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("project", "whole")
def test_a_run_that_was_frozen_while_another_host_took_over() -> None:
    """It wakes while the other trains, and again in the midst of a save: it ends, and the other ends bit for bit."""
    for moment in ("checkpoint-3", "checkpoint-*.orbax-checkpoint-tmp"):
        first = start(QUICK, "plugin.options.seconds=0.2")
        while not list(Path("run").glob(moment)):
            assert first.poll() is None
            time.sleep(0.001)
        first.send_signal(signal.SIGSTOP)
        before = Path("run/metrics.jsonl").stat().st_ino
        second = start(QUICK, "plugin.options.seconds=0.2", where=ELSEWHERE)
        while not Path("run/metrics.jsonl").exists() or Path("run/metrics.jsonl").stat().st_ino == before:
            assert second.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)
        first.send_signal(signal.SIGCONT)
        code, said = ended(first)
        assert code == 1, said
        assert "run: was taken over by another run (host node7, pid" in " ".join(said.split())
        code, said = ended(second)
        assert code == 0, said
        assert "watching for up to 3 s whether host" in " ".join(said.split())
        assert_same_run("run", "whole")
        assert [path.name for path in Path("run").iterdir() if path.name[0] == "."] == []
        shutil.rmtree("run")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("project")
def test_two_runs_at_twenty_random_offsets() -> None:
    """One ends as if alone, bit for bit; the other is refused by name, unless the first had ended by then."""
    seed = random.SystemRandom().randrange(10_000)
    dice, refusals = random.Random(seed), 0
    train("recipe.yaml", ["output_dir=whole"])
    for trial in range(20):
        first = start("plugin.options.seconds=0.5")
        time.sleep(dice.uniform(0, 0.5) if trial % 2 else dice.uniform(0, 8))
        second = start("plugin.options.seconds=0.5")
        ends = ended(first), ended(second)
        codes = sorted(code for code, _ in ends)
        assert codes[0] == 0, (seed, ends)
        if codes[1]:
            refusals += 1
            winner, loser = (first, ends[1]) if ends[0][0] == 0 else (second, ends[0])
            said = f"run is written by host {this_process().host}, pid {winner.pid}, since 20"
            assert said in " ".join(loser[1].split()), (seed, ends)
        assert_same_run("run", "whole")
        assert len(read_records(Path("run/metrics.jsonl"))) == len(read_records(Path("whole/metrics.jsonl")))
        assert [path.name for path in Path("run").iterdir() if "tmp" in path.name or path.name[0] == "."] == []
        shutil.rmtree("run")
    print(f"seed {seed}: {refusals} of 20 refused")
    assert refusals > 4
