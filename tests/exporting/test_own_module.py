"""A plugin's own model whose predictions lack one of its inputs: trained, predicted, evaluated, loaded, exported."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import load_file

from redco_cli import evaluate, export, load_model, predict, train
from redco_cli.errors import RedcoError
from redco_cli.exporting.tokenizer import save_byte_tokenizer
from redco_cli.run import validate
from redco_cli.training.saving.files.integrity import write_manifest
from tests.architecture.source import ROOT

NETS = """
import flax.linen as nn
import jax.numpy as jnp


class Net(nn.Module):
    width: int
    shift: float = 0.0

    @nn.compact
    def __call__(self, points, labels, train=False):
        known = nn.Embed(4, self.width, name="known")(labels)
        hidden = nn.tanh(nn.Dense(self.width, name="hidden")(points) + known)
        return nn.Dense(4, name="output")(nn.Dropout(0.1, deterministic=not train)(hidden)) + self.shift
"""
PLUGIN = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from nets import Net

from redco_cli.plugin.contract import Loss


@dataclass(frozen=True)
class Options:
    width: int = 8


def build_model(ctx):
    return Net(ctx.options.width)


def load_examples(ctx, split):
    points = np.random.default_rng(split == "eval").normal(size=(40 if split == "train" else 11, 8))
    return [{"point": point.astype(np.float32), "label": int(point[0] > 0)} for point in points]


def collate_fn(ctx, examples):
    batch = {"points": np.stack([example["point"] for example in examples])}
    if ctx.stage != "predict":
        batch["labels"] = np.array([example["label"] for example in examples])
    return batch


def loss_fn(ctx, params, batch, rng, train):
    logits = ctx.model(params, batch["points"], 3 - batch["labels"], rng=rng, train=train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return Loss(losses.sum(), losses.size)


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["points"], jnp.zeros(len(batch["points"]), jnp.int32))
"""
RECIPE = """
plugin: {module: own.py, options: {width: 16}}
train: {global_batch_size: 8, steps: 4, learning_rate: 1e-2}
eval: {every: 2}
logging: {plot: false}
mesh: {data: 1}
output_dir: runs/own
"""
SHAPES = {"points": {"shape": [8], "dtype": "float32"}, "labels": {"shape": [], "dtype": "int32"}}
INIT_BATCH = """
def init_batch(ctx):
    return {"labels": jax.ShapeDtypeStruct((1,), np.int32), "points": np.zeros((1, 8))}
"""
NORMED = """

class Normed(Net):
    @nn.compact
    def __call__(self, points, labels, train=False):
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")
        return nn.Dense(4)(norm(nn.Dense(self.width)(points)))
"""
STATE = """

def build_model(ctx):
    return Normed(ctx.options.width)


def init_state(ctx, params):
    return {"count": 0, "model": ctx.model.init_variables()}


def loss_fn(ctx, params, batch, rng, train):
    kept = ctx.state["model"]
    found = ctx.model(params, batch["points"], None, train=train, variables=kept, mutable=train and list(kept))
    logits, updated = found if train else (found, kept)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return Loss(losses.sum(), losses.size, stats={"kept": (updated, 1)} if train else {})


def update_state(ctx, state, params, stats):
    return {"count": state["count"] + 1, "model": stats["kept"]}


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["points"], None, variables=ctx.state["model"])
"""
POINTS = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)
LABELS = np.array([0, 1, 2], np.int32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run `runs/own`, which has checkpoints of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("own")
    for name, text in {"nets.py": NETS, "own.py": PLUGIN, "recipe.yaml": RECIPE}.items():
        (directory / name).write_text(text)
    with contextlib.chdir(directory):
        train("recipe.yaml")
    return directory


@pytest.fixture
def project(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory: a project that has moved since."""
    shutil.copytree(trained, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def outputs(name: str | Path, **settings: Any) -> np.ndarray[Any, Any]:
    model, params = load_model(name, **settings)
    return np.asarray(jax.jit(model)(params, POINTS, LABELS))


def refused(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(RedcoError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def in_another_process(folder: Path, name: str | Path) -> np.ndarray[Any, Any]:
    """What a model gives that a process loads which knows nothing of the project."""
    script = f"""
import sys
import jax, numpy as np
from redco_cli import load_model
model, params = load_model({str(name)!r})
sys.stdout.buffer.write(np.asarray(jax.jit(model)(params, *np.load("in.npz").values())).tobytes())
"""
    folder.mkdir()
    np.savez(folder / "in.npz", POINTS, LABELS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, check=True, timeout=200)
    return np.frombuffer(done.stdout, np.float32).reshape(3, 4)


def stored_shapes(run: str) -> Any:
    return json.loads(Path(run, "checkpoint-4/meta/metadata").read_text())["init_shapes"]


def predictions(file: Path) -> np.ndarray[Any, Any]:
    return np.array([json.loads(line)["prediction"] for line in file.read_text().splitlines()], np.float32)


@pytest.mark.slow
def test_predictions_need_no_labels_that_only_the_model_takes(project: Path) -> None:
    examples = [{"point": point} for point in POINTS]
    found = predictions(predict("runs/own", input=examples))
    model, params = load_model("runs/own")
    expected = model(params, POINTS, np.zeros(3, np.int32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    again = predictions(predict("recipe.yaml", input=examples, output="again.jsonl"))
    np.testing.assert_array_equal(again, found)
    assert evaluate("runs/own").parameters == "runs/own/checkpoint-4"


@pytest.mark.slow
def test_a_run_is_loaded_from_anywhere(project: Path, trained: Path, tmp_path: Path) -> None:
    newest = outputs("runs/own")
    for same in (project / "runs/own", Path("runs/own/checkpoint-4/"), trained / "runs/own"):
        np.testing.assert_array_equal(outputs(same), newest)
    assert np.abs(outputs("runs/own/checkpoint-2") - newest).max() > 1e-3
    np.testing.assert_array_equal(in_another_process(tmp_path / "there", project / "runs/own"), newest)


@pytest.mark.slow
def test_what_is_loaded_is_split_as_planned(project: Path) -> None:
    expected = outputs("runs/own")
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    export("runs/own", output="out")
    for name in ("runs/own", "out"):
        model, params = load_model(name, mesh=mesh)
        np.testing.assert_allclose(jax.jit(model)(params, POINTS, LABELS), expected, rtol=1e-5, atol=1e-6)
        specs = {leaf.sharding.spec for leaf in jax.tree.leaves(params)}
        assert any("tensor" in str(spec) for spec in specs), specs
    _, whole = load_model("out", mesh=jax.make_mesh((8,), ("own",), axis_types=(AxisType.Auto,)))
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(whole)} == {PartitionSpec()}


@pytest.mark.slow
def test_what_is_exported_is_read_where_there_is_nothing_else(project: Path, trained: Path, tmp_path: Path) -> None:
    expected = outputs("runs/own")
    exported = export("runs/own", output="out")
    names = ["batch_shapes.json", "model.safetensors", "plugin/nets.py", "plugin/own.py", "recipe.yaml"]
    assert [file.relative_to(exported.directory).as_posix() for file in exported.files] == names
    assert exported.difference == 0.0
    assert json.loads(Path("out/batch_shapes.json").read_text()) == {"model": "model", "batch": SHAPES}
    tensors = load_file("out/model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "hidden/bias": (16,),
        "hidden/kernel": (8, 16),
        "known/embedding": (4, 16),
        "output/bias": (4,),
        "output/kernel": (16, 4),
    }
    for folder in (trained, project):
        assert not [file for file in exported.files if bytes(folder) in file.read_bytes()]
    Path("nets.py").write_text("raise RuntimeError('not this one')")
    np.testing.assert_array_equal(outputs("out"), expected)
    Path("out").rename(tmp_path / "moved")
    shutil.rmtree(project / "runs")
    np.testing.assert_array_equal(in_another_process(tmp_path / "there", tmp_path / "moved"), expected)
    assert not list((tmp_path / "moved").rglob("*.pyc"))


@pytest.mark.slow
def test_a_package_and_a_tokenizer_go_along(project: Path, tmp_path: Path) -> None:
    expected = outputs("runs/own")
    (project / "package").mkdir()
    Path("nets.py").rename("package/nets.py")
    needs_tokenizer = PLUGIN.replace("return Net", "assert ctx.tokenizer.pad_token == '<pad>'\n    return Net")
    Path("package/own.py").write_text(needs_tokenizer.replace("from nets", "from .nets"))
    Path("package/__init__.py").write_text("")
    Path("tokenizer").mkdir()
    save_byte_tokenizer(Path("tokenizer"))
    export("runs/own", ["plugin.module=package.own", "model.tokenizer=tokenizer"], output="out")
    assert sorted(file.name for file in Path("out/plugin/package").iterdir()) == ["__init__.py", "nets.py", "own.py"]
    Path("out").rename(tmp_path / "moved")
    shutil.rmtree("tokenizer")
    Path("package/nets.py").write_text("raise RuntimeError('not this one')")
    np.testing.assert_array_equal(outputs(tmp_path / "moved"), expected)
    np.testing.assert_array_equal(in_another_process(tmp_path / "there", tmp_path / "moved"), expected)


@pytest.mark.slow
def test_batch_norm_comes_with_its_statistics(project: Path, tmp_path: Path) -> None:
    Path("nets.py").write_text(NETS + NORMED)
    Path("own.py").write_text(PLUGIN.replace("import Net", "import Normed") + STATE)
    train("recipe.yaml", ["output_dir=runs/normed"])
    expected = predictions(predict("runs/normed", input=[{"point": point} for point in POINTS]))
    exported = export("runs/normed", output="out")
    assert exported.difference == 0.0
    assert load_file("out/model.safetensors")["batch_stats/norm/var"].shape == (16,)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    for name in ("runs/normed", "out"):
        np.testing.assert_allclose(outputs(name), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs(name, mesh=mesh), expected, rtol=1e-5, atol=1e-6)
    model, params = load_model("out")
    begun = jax.jit(lambda: model(params, POINTS, LABELS, variables=model.init_variables()))()
    assert np.abs(begun - expected).max() > 0.01
    export("runs/normed", output="half", dtype="bfloat16")
    assert 0 < np.abs(outputs("half") - expected).max() < 0.05


@pytest.mark.parametrize(
    ("plugin", "tokenizer", "refused_key"),
    [
        ("../elsewhere.py", "null", "plugin.module: ../elsewhere.py"),
        ("FOLDER/elsewhere.py", "null", "plugin.module: FOLDER/elsewhere.py"),
        ("elsewhere.py", "null", "plugin.module: elsewhere.py"),  # though it is in the working directory
        ("link.py", "null", "plugin.module: link.py"),
        ("plugin/own.py", "../tokenizer", "model.tokenizer: ../tokenizer"),
    ],
)
def test_an_export_takes_nothing_from_elsewhere(
    plugin: str, tokenizer: str, refused_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out/plugin").mkdir(parents=True)
    recipe = f"plugin: {{module: {plugin}}}\nmodel: {{tokenizer: {tokenizer}}}\noutput_dir: x\n"
    Path("out/recipe.yaml").write_text(recipe.replace("FOLDER", str(tmp_path)))
    Path("out/batch_shapes.json").write_text(json.dumps({"model": "model", "batch": SHAPES}))
    for name in ("elsewhere.py", "out/plugin/own.py"):
        Path(name).write_text("raise RuntimeError('not this one')")
    Path("out/link.py").symlink_to("../elsewhere.py")
    assert f"{refused_key.replace('FOLDER', str(tmp_path))} is not in out\n" in refused(load_model, "out")


@pytest.mark.slow
def test_half_precision(project: Path) -> None:
    exported = export("recipe.yaml", output="out", dtype="bfloat16", checkpoint="runs/own/checkpoint-2")
    assert exported.nbytes == 2 * (16 + 8 * 16 + 4 * 16 + 4 + 16 * 4)
    assert exported.difference == 0.0
    difference = np.abs(outputs("out") - outputs("runs/own/checkpoint-2")).max()
    assert 0 < difference < 0.05


@pytest.mark.slow
def test_init_batch_says_what_a_model_takes(project: Path) -> None:
    """Also where no batch of training has it all, as for a model of which the loss calls a part."""
    without = PLUGIN.replace('ctx.stage != "predict"', "True").replace('batch["labels"] =', 'batch["right"] =')
    without = without.replace('batch["labels"]', 'batch["right"]')
    Path("own.py").write_text(without)
    assert "Net.__call__ takes labels, but the batch has points, right" in refused(validate, "recipe.yaml")
    Path("own.py").write_text(without + INIT_BATCH)
    train("recipe.yaml", ["output_dir=runs/other"])
    assert stored_shapes("runs/other") == stored_shapes("runs/own") == SHAPES
    np.testing.assert_array_equal(outputs("runs/other"), outputs("runs/own"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("return []", "returned a list instead of a dict"),
        ("return {'points': np.zeros(())}", "batch['points'] has shape ()"),
        ("return {'points': jax.ShapeDtypeStruct((), np.float32)}", "batch['points'] has shape ()"),
        ("return {'points': np.zeros((1, 8))}", "Net.__call__ takes labels, but the batch has points"),
        ("return 1 / 0", "init_batch raised ZeroDivisionError"),
    ],
)
def test_an_init_batch_that_cannot_be_used_is_refused(project: Path, text: str, message: str) -> None:
    Path("own.py").write_text(f"{PLUGIN}\n\ndef init_batch(ctx):\n    {text}\n")
    assert message in refused(validate, "recipe.yaml")


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_built_from_training_data(project: Path) -> None:
    expected = outputs("runs/own")
    checkpoint = Path("runs/own/checkpoint-4")
    meta = json.loads((checkpoint / "meta/metadata").read_text())
    del meta["init_shapes"]
    (checkpoint / "meta/metadata").write_text(json.dumps(meta))
    write_manifest(checkpoint)
    np.testing.assert_array_equal(outputs("runs/own"), expected)
    export("runs/own", output="out")
    np.testing.assert_array_equal(outputs("out"), expected)
    assert "takes labels, but the batch has points" in refused(predict, "runs/own", input=[{"point": POINTS[0]}])


def test_a_damaged_checkpoint_is_passed_over(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = outputs("runs/own/checkpoint-2")
    (Path("runs/own/checkpoint-4/meta/metadata")).write_text("{}")
    np.testing.assert_array_equal(outputs("runs/own"), expected)
    assert "checkpoint-2 is taken instead" in capfd.readouterr().err
    assert refused(load_model, "runs/own/checkpoint-4").startswith("runs/own/checkpoint-4: is damaged: ")
    assert predict("runs/own", input=[{"point": POINTS[0]}]).is_file()


@pytest.mark.slow
def test_a_run_that_moved_with_its_project_finds_its_plugin(project: Path, tmp_path: Path) -> None:
    train("recipe.yaml", ["output_dir=runs/new"])
    expected = outputs("runs/new")
    project.rename(tmp_path / "new")
    np.testing.assert_array_equal(outputs(tmp_path / "new/runs/new"), expected)
    (tmp_path / "new/own.py").unlink()
    assert refused(load_model, tmp_path / "new/runs/new") == (
        f"runs/new/checkpoint-4: plugin.module: the plugin that builds this model, {project}/own.py, is gone\n  -> "
        "put it back there; or export the run where it still is (redco export RUN --output DIR), and load that"
    )


@pytest.mark.slow
def test_what_cannot_be_loaded_is_told(project: Path) -> None:
    export("runs/own", output="out")
    Path("out/plugin/nets.py").write_text(NETS.replace('name="output"', 'name="logits"'))
    again = "export the run again, or take its files as they were exported"
    assert refused(load_model, "out") == (
        "out: 4 parameters are missing, of another shape, or not of the model that its plugin builds: "
        f"logits/bias, logits/kernel, output/bias, output/kernel\n  -> {again}"
    )
    Path("out/batch_shapes.json").write_text('{"model": "model", "batch": []}')
    assert refused(load_model, "out").startswith("out/batch_shapes.json: cannot be read: no shapes of arrays by name: ")
    assert refused(predict, "runs/own", checkpoint="runs/own/checkpoint-9") == (
        "--checkpoint: runs/own/checkpoint-9 is no checkpoint\n"
        "  -> give last, best, or a directory such as runs/x/checkpoint-100"
    )
    for checkpoint in Path("runs/own").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    untrained = "runs/own: holds no checkpoint\n  -> train first: redco train"
    assert refused(load_model, "runs/own") == refused(export, "runs/own", output="other") == untrained


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        pytest.param(
            "import",
            "import pathlib\npathlib.Path(__file__).with_name('own.txt').read_text()\nimport",
            "FileNotFoundError",
            marks=pytest.mark.slow,
        ),
        ("self.shift", "len(__file__)", "what was exported gives other outputs than the model: they differ by "),
    ],
)
def test_an_export_that_would_not_be_the_model_is_refused(project: Path, before: str, after: str, message: str) -> None:
    """A plugin that reads a file beside it, or computes something else elsewhere."""
    Path("nets.py").write_text(NETS.replace(before, after, 1))
    Path("own.txt").touch()
    assert message in refused(export, "recipe.yaml", output="out")
    assert not [*Path().glob("out"), *Path().glob(".out*")]
