"""What a killed or failed prediction left behind is continued by the same program and parameters, and by no other."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.prediction import predict as module
from redco_cli.prediction import predictor
from redco_cli.run import predict, train
from redco_cli.training.saving.files.integrity import MANIFEST_NAME
from tests.training.tiny import write_project

OUTPUT = """
def output_fn(ctx, outputs):
    calls.append(1)
    if len(calls) == 2:
        raise KeyError("names")
    return [f"class {row}" for row in outputs]
"""
PARTIAL = Path("out.jsonl.partial")


TRAIN = ["train.steps=2", "eval.predict=false", "eval.at_start=false", "train.warmup=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe with a run of two steps."""
    directory = tmp_path_factory.mktemp("trained")
    write_project(directory)
    train(directory / "recipe.yaml", [*TRAIN, f"output_dir={directory / 'run'}"])
    return directory


@pytest.fixture
def project(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stopped_after_a_batch() -> None:
    """Predicts 8 of 21 examples, then is killed."""
    called, sizes = predictor.call_output, []

    def killing(*arguments: object) -> list[object]:
        sizes.append(arguments[-1])
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return called(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "call_output", killing)
        with pytest.raises(KeyboardInterrupt):
            predict("recipe.yaml", output="out.jsonl")
    assert PARTIAL.read_bytes().count(b"\n") == 8


def counted() -> tuple[str, int]:
    """The predictions file, and how many predictions were made for it now."""
    called, sizes = predictor.call_output, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "call_output", lambda *a: sizes.append(a[-1]) or called(*a))
        text = predict("recipe.yaml", output="out.jsonl").read_text()
    assert not PARTIAL.exists()
    return text, sum(sizes)


@pytest.mark.slow
def test_a_repaired_plugin_starts_over(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = project / "plugin.py"
    plugin.write_text(f"calls = []\n{plugin.read_text()}{OUTPUT}")
    with pytest.raises(RedcoError, match=r"output_fn raised KeyError"):
        predict("recipe.yaml", output="out.jsonl")
    assert PARTIAL.read_text().count('"prediction": "class ') == 8
    repaired = plugin.read_text().replace("len(calls) == 2", "False").replace('f"class {row}"', 'f"the class {row}"')
    plugin.write_text(repaired)
    capsys.readouterr()
    text, made = counted()
    assert made == 21
    assert text == predict("recipe.yaml", output="whole.jsonl").read_text()
    assert text.count('"prediction": "the class ') == 21
    assert "out.jsonl.partial was made with other plugin code: starting over\n" in capsys.readouterr().err


@pytest.mark.slow
def test_functions_from_another_file_are_code_of_the_plugin(project: Path) -> None:
    (project / "shared_by_plugins.py").write_text("def output_fn(ctx, outputs):\n    return [1] * len(outputs)\n")
    plugin = project / "plugin.py"
    plugin.write_text(
        f"import runpy\noutput_fn = runpy.run_path('shared_by_plugins.py')['output_fn']\n{plugin.read_text()}"
    )
    stopped_after_a_batch()
    (project / "shared_by_plugins.py").write_text("def output_fn(ctx, outputs):\n    return [2] * len(outputs)\n")
    text, made = counted()
    assert made == 21
    assert [json.loads(line)["prediction"] for line in text.splitlines()] == [2] * 21


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_other_parameters_at_the_same_path_start_over(capsys: pytest.CaptureFixture[str]) -> None:
    stopped_after_a_batch()
    before = PARTIAL.read_text()
    shutil.rmtree("run")
    train("recipe.yaml", [*TRAIN, "train.learning_rate=1.0"])
    capsys.readouterr()
    text, made = counted()
    assert made == 21
    assert text == predict("recipe.yaml", output="whole.jsonl").read_text()
    assert not text.startswith(before)
    assert "out.jsonl.partial was made with other parameters: starting over\n" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_the_same_program_and_parameters_continue(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the run was copied, and the plugin touched."""
    stopped_after_a_batch()
    os.utime("plugin.py", (1, 1))
    shutil.copytree("run", "copied")
    shutil.rmtree("run")
    shutil.copytree("copied", "run")
    text, made = counted()
    assert made == 21 - 8
    assert text == predict("recipe.yaml", output="whole.jsonl").read_text()
    assert "starting over" not in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_a_partial_file_without_its_description_starts_over() -> None:
    stopped_after_a_batch()
    description, kept = Path("out.jsonl.partial.json"), PARTIAL.read_bytes()
    identity = json.loads(description.read_bytes())
    for torn in (None, b"", b"{", b"[]", b"\xff"):
        PARTIAL.write_bytes(kept)
        description.unlink() if torn is None else description.write_bytes(torn)
        assert not module._continues(PARTIAL, description, identity)
    assert counted()[1] == 21


def test_other_weights_in_the_same_directory_are_other_parameters(tmp_path: Path) -> None:
    section = SimpleNamespace(name=str(tmp_path), revision=None, subfolder=None)
    job = SimpleNamespace(recipe=SimpleNamespace(model=section), where=str)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"1234")
    contents = [module._content(job, section.name)]  # type: ignore[arg-type]
    (tmp_path / "out.jsonl.partial.json").write_text("{}")  # predictions may go there
    assert contents == [module._content(job, section.name)]  # type: ignore[arg-type]
    for number, name in enumerate(("config.json", "model.safetensors")):
        os.utime(tmp_path / name, (number, number))
        contents.append(module._content(job, section.name))  # type: ignore[arg-type]
    assert len(set(contents)) == 3


def test_the_manifest_of_a_checkpoint_is_the_one_that_is_looked_for() -> None:
    assert module._MANIFEST == MANIFEST_NAME


def test_what_may_be_of_another_secret_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial, description = tmp_path / "out.partial", tmp_path / "out.partial.json"
    partial.write_text("{}\n")
    description.write_text('{"recipe": 1}')
    assert module._continues(partial, description, {"recipe": 1}, secret=False)
    assert not module._continues(partial, description, {"recipe": 1}, secret=True)
    assert (
        "may be of another secret among plugin.options, which is in no file: starting over" in capsys.readouterr().err
    )


def test_arrays_of_examples_are_shown_and_told_apart() -> None:
    example = {
        "where": np.array([0.5, np.nan]),
        "image": np.zeros((8, 8), np.float32),
        "count": np.int64(3),
        "of": Path(),
    }
    shown = json.loads(module.line_of(4, example, 1.0, None))  # type: ignore[arg-type]
    expected = {"where": [0.5, "nan"], "image": "float32[8, 8]", "count": 3, "of": type(Path()).__name__}
    assert shown == {"index": 4, "example": expected, "prediction": 1.0}
    other = {**example, "image": np.eye(8, dtype=np.float32)}
    assert module._fingerprint([example]) == module._fingerprint([dict(example)]) != module._fingerprint([other])
