"""Runs as they are listed and compared, from files that stand for what training leaves behind."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.errors import UsageError
from redco_cli.recipe.load import load_recipe, resolved_yaml
from redco_cli.reports import show_runs
from redco_cli.runtime.disk import open_held
from redco_cli.runtime.lease import take
from redco_cli.runtime.liveness import this_process
from redco_cli.training.records.runs import differing_keys, find_runs, metrics_of, summarize

BASE = "plugin: {module: m}\noutput_dir: o\n"
RECORDS = [
    {"step": 10, "kind": "train", "time": 1.0, "loss": 3.0},
    {"step": 10, "kind": "eval", "time": 2.0, "loss": 2.5, "accuracy": 0.5},
    {"step": 15, "kind": "run", "time": 2.5, "round": "one"},
    {"step": 20, "kind": "eval", "time": 3.0, "loss": 2.75, "accuracy": 0.75},
    {"step": 20, "kind": "train", "time": 3.5, "loss": None, "nonfinite": {"loss": "nan"}},
]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a run: its recipe, its records, the steps of its checkpoints, and what the newest says of itself."""
    monkeypatch.chdir(tmp_path)

    def run(
        name: str, text: str = "", records: Any = RECORDS, steps: tuple[int, ...] = (), put_off: bool = False
    ) -> Path:
        (tmp_path / "recipe.yaml").write_text(BASE + text)
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        loaded = load_recipe("recipe.yaml", (), {})
        (directory / "recipe.resolved.yaml").write_text(resolved_yaml(loaded))
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for step in steps:
            (directory / f"checkpoint-{step}/meta").mkdir(parents=True)
            (directory / f"checkpoint-{step}/meta/metadata").write_text(json.dumps({"put_off": put_off}))
        return directory

    return run


@pytest.mark.parametrize(
    ("given", "state", "step", "saved", "steps"),
    [
        ({"text": "train: {steps: 20}\n", "steps": (10, 20)}, "finished", 20, 20, 20),
        ({"text": "train: {steps: 40}\n", "steps": (10,)}, "stopped", 20, 10, 40),
        ({"text": "train: {steps: 20}\n", "steps": (20,), "put_off": True}, "stopped", 20, 20, 20),
        ({"text": "train: {steps: 20}\n"}, "never saved", 20, None, 20),
        ({"text": "train: {steps: 20}\n", "records": [], "steps": (20,)}, "finished", 20, 20, 20),
        ({"text": "train: {steps: 2 epochs}\n", "steps": (20,)}, "stopped", 20, 20, None),
    ],
)
def test_states(make: Any, given: Any, state: str, step: int, saved: int | None, steps: int | None) -> None:
    found = summarize(make("x", **given))
    assert (found.state, found.step, found.saved, found.steps) == (state, step, saved, steps)


def test_a_length_in_epochs_is_noted_in_the_resolved_recipe(make: Any) -> None:
    directory = make("x", "train: {steps: 2 epochs}\n")
    loaded = load_recipe("recipe.yaml", (), {})
    (directory / "recipe.resolved.yaml").write_text(resolved_yaml(loaded, 25))
    assert summarize(directory).steps == 25
    assert load_recipe(directory / "recipe.resolved.yaml", (), {}).recipe == loaded.recipe


@pytest.mark.parametrize(
    ("text", "best"), [("", (10, 2.5)), ("eval: {best_metric: accuracy, best_mode: max}\n", (20, 0.75))]
)
def test_the_best_evaluation_is_the_one_that_ranks_checkpoints(make: Any, text: str, best: Any) -> None:
    assert summarize(make("x", text)).best == best


def test_a_run_is_running_while_a_process_holds_its_records(make: Any) -> None:
    directory = make("x", steps=(10,))
    with open_held(directory / "metrics.jsonl"):
        assert summarize(directory).state == "running"
    assert summarize(directory).state == "stopped"
    holds = "import sys; from pathlib import Path; from redco_cli.runtime.disk import open_held;"
    holds += "file = open_held(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holds, str(directory / "metrics.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert summarize(directory).state == "running"
        other.kill()
    assert summarize(directory).state == "stopped"


def test_who_holds_a_run(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By its lease: known for processes of this machine, that of another one may be dead."""
    directory, here = make("x", steps=(10,)), this_process()
    for identity, state, said in (
        (here, "running", f"running on {here.host}, pid {here.pid}"),
        (replace(here, host="node7"), "held", f"held by node7, pid {here.pid}"),
        (replace(here, pid=2**22 + 1), "stopped", "stopped at 10"),
    ):
        lease = take(directory, lambda _: None, identity=identity)
        run = summarize(directory)
        assert run.state == state
        assert ("holder" in run.as_plain()) == (state != "stopped")
        show_runs([run], as_json=False)
        assert said.replace(" ", "") in "".join(capsys.readouterr().out.split())
        lease.release()
    assert summarize(directory).state == "stopped"


def test_runs_are_found_at_any_depth_and_not_in_checkpoints(make: Any, tmp_path: Path) -> None:
    make("b/deep")
    make("a")
    make("a/checkpoint-3/no-run")
    make(".hidden")
    assert [run.directory.name for run in find_runs(tmp_path / "runs")] == ["a", "deep"]
    assert [run.directory.name for run in find_runs(tmp_path / "runs/a")] == ["a"]
    with pytest.raises(UsageError) as caught:
        find_runs(Path("rums"))
    assert str(caught.value) == "rums: is no directory\n  -> name the directory that your runs are in: redco runs DIR"


def test_a_damaged_run_hides_no_other(make: Any) -> None:
    (make("bad") / "metrics.jsonl").write_text("no\n")
    (make("worse") / "recipe.resolved.yaml").write_text("a: [\n")
    make("good")
    found = {run.directory.name: run for run in find_runs(Path("runs"))}
    assert {name: run.state for name, run in found.items()} == {
        "bad": "unreadable",
        "good": "never saved",
        "worse": "unreadable",
    }
    assert found["bad"].problem == "runs/bad/metrics.jsonl:1: is no record of redco"
    assert found["worse"].problem.startswith("runs/worse/recipe.resolved.yaml:2: not valid YAML")


def test_what_differs(make: Any) -> None:
    one = summarize(make("one", "seed: 3\nplugin: {module: m, options: {a: {b: 1}, c: {}}}\n".replace("plugin", "x-")))
    other = summarize(make("other", "train: {freeze: [a]}\n", RECORDS[:2]))
    assert differing_keys(one.recipe or {}, other.recipe or {}) == {"train.freeze": ([], ["a"]), "seed": (3, 0)}
    assert metrics_of(one) == {"eval/loss": (2.75, 2.5), "eval/accuracy": (0.75, 0.5), "train/loss": (None, None)}
    assert metrics_of(other) == {"eval/loss": (2.5, 2.5), "eval/accuracy": (0.5, 0.5), "train/loss": (3.0, None)}


TWO = "two runs are compared\n  -> name their output directories"


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["runs", *arguments])


class TestCommand:
    def test_the_table(self, make: Any) -> None:
        make("one", "train: {steps: 40}\n", steps=(10,))
        make("two", records=[])
        head, names, one, two = command().stdout.splitlines()
        assert (head, names.split()) == (
            "runs",
            ["run", "state", "step", "metric", "best", "at", "step", "last", "written"],
        )
        assert one.split()[:8] == ["runs/one", "stopped", "at", "10", "20/40", "loss", "2.500", "10"]
        assert two.split() == ["runs/two", "never", "saved", "0", "loss"]
        assert json.loads(command("--json").stdout)["runs"][1] == {
            "run": "runs/two",
            "state": "never saved",
            "step": 0,
            "saved": None,
            "steps": None,
            "metric": "loss",
            "best": None,
            "best_step": None,
            "written": None,
        }

    def test_two_runs(self, make: Any, tmp_path: Path) -> None:
        make("one", "seed: 3\n")
        make("two", "train: {freeze: [a]}\n", RECORDS[:2])
        done = command("runs/one", "runs/two")
        assert '  train.freeze  []        ["a"]\n  seed          3         0\n' in done.stdout
        row = next(line for line in done.stdout.splitlines() if "eval/accuracy" in line)
        assert row.split() == ["eval/accuracy", "0.7500", "0.5000", "0.5000", "0.5000"]
        assert done.stderr == "curves of both: add --plot FILE.png\n"
        document = json.loads(command("runs/one", "runs/two", "--json", "--plot", "two.png").stdout)
        assert document["recipe"] == {"train.freeze": [[], ["a"]], "seed": [3, 0]}
        assert document["metrics"]["eval/loss"] == {"end": [2.75, 2.5], "best": [2.5, 2.5]}
        assert (tmp_path / document["plot"]).read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a", "b", "c"], f"redco runs: 3 given, but {TWO}"),
            (["--plot", "x.png"], f"redco runs: none given, but {TWO}"),
            (
                ["runs/one", "runs"],
                "runs: is no run: it has no recipe.resolved.yaml\n  -> name the output directories of two runs",
            ),
            (["runs/one", "runs/../runs/one"], "runs/../runs/one: is the same run twice\n  -> name two runs"),
        ],
    )
    def test_wrong_usage(self, make: Any, arguments: list[str], message: str) -> None:
        make("one")
        done = command(*arguments)
        assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"{message}\n")

    def test_a_picture_that_cannot_be_written(self, make: Any) -> None:
        make("one")
        make("two")
        done = command("runs/one", "runs/two", "--plot", "nowhere/x.png")
        assert (done.exit_code, done.stderr) == (
            1,
            "nowhere/x.png: cannot be written: No such file or directory\n  -> choose another file: --plot FILE\n",
        )


def test_nothing_heavy_is_imported(make: Any) -> None:
    make("one")
    program = "import sys; from redco_cli.cli import app; app(['runs'], standalone_mode=False)"
    program += ";print([name for name in ('jax', 'flax', 'orbax', 'datasets', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
