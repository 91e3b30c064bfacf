"""`redco eval`: what training evaluated, found again, and nothing of the run changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.errors import RedcoError
from redco_cli.run import evaluate, train
from tests.training.tiny import recorded, write_project

MESHES = ["{data: 1}", "{data: 4}", "{data: 2, fsdp: 2, tensor: 2}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluated")
    write_project(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        train("recipe.yaml", ["train.steps=8", "eval.best_metric=exact", "eval.best_mode=max"])
    return root


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_numbers_as_in_training_on_any_mesh(here: Path, mesh: str) -> None:
    wanted = next(row for row in recorded("run") if (row["kind"], row["step"]) == ("eval", 8))
    before = contents(here / "run")
    found = evaluate("run", [f"mesh={mesh}"])
    assert (found.parameters, found.examples) == ("run/checkpoint-8", 21)
    assert list(found.values) == ["loss", "exact"]
    assert found.values["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found.values["exact"] == wanted["exact"]
    assert contents(here / "run") == before


def test_without_predictions_and_with_a_metric_that_only_they_have(here: Path) -> None:
    assert list(evaluate("recipe.yaml", ["eval.predict=false", "eval.best_metric=exact"]).values) == ["loss"]


def test_other_data_and_another_checkpoint(here: Path) -> None:
    rows = [{"x": [0.1 * i] * 8, "y": i % 3, "id": i} for i in range(5)]
    (here / "other.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    plugin = here / "plugin.py"
    plugin.write_text(plugin.read_text().replace("np.asarray(e[name])", "np.asarray(e[name], np.float32 if name == 'x' else None)"))
    others = ["data.eval.path=json", "data.eval.data_files=other.jsonl"]
    last = evaluate("run", others)
    assert last.examples == 5
    before = evaluate("run", others, checkpoint="run/checkpoint-4" if Path("run/checkpoint-4").exists() else "run/checkpoint-6")
    assert before.values["loss"] != last.values["loss"]
    assert evaluate("run", others, checkpoint="best").parameters.startswith("run/checkpoint-")


def test_the_command(here: Path) -> None:
    values = evaluate("run").values
    done = CliRunner().invoke(app, ["eval", "run"])
    title, names, row = done.stdout.splitlines()
    assert (done.exit_code, title, names.split()) == (0, "evaluation of run/checkpoint-8", ["examples", "loss", "exact"])
    assert row.split()[0] == "21"
    document = json.loads(CliRunner().invoke(app, ["eval", "run", "--json"]).stdout)
    assert document == {"parameters": "run/checkpoint-8", "examples": 21, "metrics": dict(values)}


def test_nothing_to_evaluate(here: Path) -> None:
    text = (here / "plugin.py").read_text()
    (here / "none.py").write_text(f"{text}\n\nwhole = load_examples\n\n\ndef load_examples(ctx, split):\n    return None\n")
    with pytest.raises(RedcoError) as refused:
        evaluate("recipe.yaml", ["plugin.module=none.py"])
    assert str(refused.value) == (
        "recipe.yaml: data.eval: there is nothing to evaluate\n"
        "  -> give data.eval.path and data.eval.data_files, or let load_examples(ctx, 'eval') return examples"
    )


@pytest.mark.slow
def test_several_processes_find_the_same(here: Path) -> None:
    command = ["launch", "--processes", "2", "--devices-per-process", "2", "--", "eval", "run", "mesh=auto", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "redco_cli", *command], stdout=subprocess.PIPE, text=True, check=True
    )
    document = json.loads("".join(line.removeprefix("[0] ") for line in done.stdout.splitlines()))
    values = evaluate("run").values
    assert document["examples"] == 21
    assert document["metrics"] == {"loss": pytest.approx(values["loss"], rel=1e-5), "exact": values["exact"]}
