"""`model.params`: a run that begins with the parameters of another, and only with these."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.paths import pin_paths
from redco_cli.run import predict, train, validate
from tests.training.tiny import assert_same_run, final_state, recorded, write_project

STILL = ["train.learning_rate=0.0", "train.steps=2", "eval.at_start=false", "eval.predict=false"]
"""What leaves the parameters as they are: what is saved is what the run began with."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run `source`, which has checkpoints of steps 3, 4 and 6."""
    directory = tmp_path_factory.mktemp("project")
    write_project(directory)
    with contextlib.chdir(directory):
        train("recipe.yaml", ["output_dir=source", "train.steps=6"])
    return directory


@pytest.fixture
def project(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    shutil.copytree(source, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def saved_params(run: str, step: int) -> dict[str, np.ndarray]:
    return {name: value for name, value in final_state(run, step).items() if name.startswith("['params']")}


def assert_same_params(run: str, step: int, expected: str, at: int) -> None:
    found, wanted = saved_params(run, step), saved_params(expected, at)
    assert found.keys() == wanted.keys()
    assert len(wanted) == 4
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def refused(*overrides: str) -> str:
    with pytest.raises(RedcoError) as error:
        train("recipe.yaml", overrides)
    with pytest.raises(RedcoError) as found_before:
        validate("recipe.yaml", overrides)
    assert str(found_before.value) == str(error.value)
    assert not Path("run").exists()
    return str(error.value)


def spoil(checkpoint: Path) -> None:
    largest = max((path for path in (checkpoint / "params" / "d").iterdir()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("given", "step", "mesh"),
    [
        ("source/checkpoint-3", 3, "{data: 1}"),
        pytest.param("source", 6, "{data: 2, fsdp: 2, tensor: 2}", marks=pytest.mark.slow),
    ],
)
def test_a_run_begins_with_the_saved_parameters_and_nothing_else(
    given: str, step: int, mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train("recipe.yaml", [f"model.params={given}", f"mesh={mesh}", *STILL])
    assert_same_params("run", 2, "source", step)
    fresh, spent = final_state("run", 2), final_state("source", step)
    moments = [name for name in fresh if "['mu']" in name]
    assert moments
    assert not all(np.array_equal(fresh[name], spent[name]) for name in moments)
    assert [row["step"] for row in recorded("run") if row["kind"] == "train"] == [1, 2]
    assert f"beginning with the parameters of source/checkpoint-{step}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_run_that_continues_needs_the_other_no_more() -> None:
    recipe = ["model.params=source"]
    train("recipe.yaml", ["output_dir=whole", *recipe])
    train("recipe.yaml", recipe)
    for step in (9, 12):
        shutil.rmtree(f"run/checkpoint-{step}")
    shutil.rmtree("source")
    train("recipe.yaml", recipe)
    assert_same_run("run", "whole")
    text = predict("recipe.yaml", recipe, output="a.jsonl").read_text()
    assert text == predict("run", output="b.jsonl").read_text()


@pytest.mark.usefixtures("project")
def test_another_source_is_another_run() -> None:
    train("recipe.yaml", ["model.params=source", *STILL])
    with pytest.raises(
        RedcoError, match=r"model.params: '.*checkpoint-3', but checkpoint-2 was trained with '.*source'"
    ):
        train("recipe.yaml", ["model.params=source/checkpoint-3", *STILL])


def test_the_newest_whole_checkpoint_of_the_run_is_taken(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(project / "source" / "checkpoint-6")
    train("recipe.yaml", ["model.params=source", *STILL])
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: source/checkpoint-6 is damaged: params/d/" in said
    assert "; checkpoint-4 is taken instead" in said
    assert_same_params("run", 2, "source", 4)
    assert (project / "source" / "checkpoint-6").is_dir()


def test_what_is_no_whole_checkpoint_is_refused(project: Path) -> None:
    spoil(project / "source" / "checkpoint-6")
    assert " holds other bytes than were written\n  -> choose another, such as source/checkpoint-4" in refused(
        "model.params=source/checkpoint-6", "output_dir=run"
    )
    (project / "empty").mkdir()
    assert refused("model.params=empty") == (
        "command line: model.params: empty holds no checkpoint\n"
        "  -> train that run first, or name another: its output directory, or a checkpoint-<step> in it"
    )
    assert refused("model.params=gone/checkpoint-3") == (
        f"command line: model.params: {project}/gone/checkpoint-3 is no checkpoint\n"
        "  -> give the output directory of a run, or a directory such as runs/x/checkpoint-100"
    )


def test_parameters_of_another_model_are_named(project: Path) -> None:
    plugin = (project / "plugin.py").read_text()
    plugin = plugin.replace('nn.Dense(8, name="output")', 'nn.Dense(5, name="output", use_bias=False)')
    (project / "plugin.py").write_text(plugin.replace('nn.Dense(16, name="hidden")', 'nn.Dense(16, name="inner")'))
    assert refused("model.params=source") == (
        "command line: model.params: the parameters in source/checkpoint-6 are not those of this model: "
        "output/kernel is [16, 8], not [16, 5]; inner/bias is missing; inner/kernel is missing; "
        "hidden/bias is not used; hidden/kernel is not used; output/bias is not used\n"
        "  -> give the model the config and the implementation of that run, or leave model.params out; for one part "
        "of it beside new ones, models: {encoder: {params: source, frozen: false}} and a build_model that returns "
        "encoder and these by name"
    )


def test_another_size_is_no_other_part(project: Path) -> None:
    plugin = (project / "plugin.py").read_text()
    (project / "plugin.py").write_text(plugin.replace('nn.Dense(8, name="output")', 'nn.Dense(5, name="output")'))
    assert refused("model.params=source") == (
        "command line: model.params: the parameters in source/checkpoint-6 are not those of this model: "
        "output/bias is [8], not [5]; output/kernel is [16, 8], not [16, 5]\n"
        "  -> give the model the config and the implementation of that run, or leave model.params out"
    )


def test_one_of_several_models_is_named_with_its_parameters(project: Path) -> None:
    plugin = (project / "plugin.py").read_text()
    head = "class Head(nn.Module):\n    @nn.compact\n    def __call__(self, x): return nn.Dense(3, name='top')(x)\n"
    plugin = plugin.replace("def build_model", f"{head}\n\ndef build_model")
    plugin = plugin.replace("return Net()", 'return {"model": Net(), "head": Head()}')
    (project / "plugin.py").write_text(plugin.replace("ctx.model(params,", 'ctx.model(params["model"],'))
    assert refused("model.params=source") == (
        "command line: model.params: the parameters in source/checkpoint-6 are not those of this model: "
        "head/top/bias is missing; head/top/kernel is missing; head/hidden/bias is not used; head/hidden/kernel is not "
        "used; head/output/bias is not used; head/output/kernel is not used\n"
        "  -> give the model the config and the implementation of that run, or leave model.params out; for one part "
        "of it beside new ones, models: {encoder: {params: source, frozen: false}} and a build_model that returns "
        "encoder and these by name"
    )


@pytest.mark.usefixtures("project")
def test_a_source_that_is_gone_is_told_and_not_needed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "recipes").mkdir()
    (project / "recipe.yaml").rename(project / "recipes" / "recipe.yaml")
    (project / "plugin.py").rename(project / "recipes" / "plugin.py")
    (project / "source").rename(project / "recipes" / "source")
    train("recipes/recipe.yaml", ["model.params=source", *STILL])
    (project / "recipes" / "source").rename(project / "recipes" / "sources")
    validate("recipes/recipe.yaml", ["model.params=source", *STILL])
    with pytest.raises(RedcoError) as error:
        validate("recipes/recipe.yaml", ["model.params=elsewhere", *STILL])
    assert str(error.value) == (
        f"command line: model.params: '{project}/elsewhere' is gone, but checkpoint-2 was trained with "
        f"'{project}/recipes/source'\n  -> restore the value, or choose another output_dir for a new run"
    )


def test_prediction_without_a_run_takes_them(project: Path) -> None:
    expected = predict("source", output="expected.jsonl", checkpoint="source/checkpoint-3").read_text()
    found = predict("recipe.yaml", ["model.params=source/checkpoint-3"], output="found.jsonl").read_text()
    assert found == expected


def test_a_relative_path_starts_at_the_recipe(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "recipe.yaml").write_text((project / "recipe.yaml").read_text() + "model: {params: source}\n")
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert pin_paths(load_recipe("../recipe.yaml")).recipe.model.params == str(project / "source")
    monkeypatch.chdir(project)
    (project / "recipe.yaml").rename(project / "elsewhere" / "recipe.yaml")
    assert pin_paths(load_recipe("elsewhere/recipe.yaml")).recipe.model.params == str(project / "source")
    shutil.rmtree(project / "source")
    assert pin_paths(load_recipe("elsewhere/recipe.yaml")).recipe.model.params == str(project / "source")


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "vocab_size": 264,
}


@pytest.mark.slow
def test_a_named_model_gives_its_config_and_the_other_run_its_parameters(project: Path) -> None:
    """The directory of the model holds no weights: none are looked for."""
    (project / "named").mkdir()
    (project / "named" / "config.json").write_text(json.dumps(LLAMA))
    (project / "train.jsonl").write_text('{"text": "abcdefgh"}\n' * 4)
    (project / "lm.yaml").write_text(
        "data: {train: {path: json, data_files: train.jsonl}, max_length: 8}\nplugin: {module: causal_lm}\n"
        "train: {global_batch_size: 4, steps: 1, learning_rate: 1e-2}\nlogging: {plot: false}\nmesh: {data: 1}\n"
        f"output_dir: first\nmodel: {{config: {json.dumps(LLAMA)}, tokenizer: byte}}\n"
    )
    train("lm.yaml")
    named = ["model={name: named, tokenizer: byte, params: first}", "output_dir=second"]
    (project / "lm.yaml").write_text((project / "lm.yaml").read_text().rpartition("model:")[0])
    train("lm.yaml", [*named, "train.learning_rate=0.0"])
    found, wanted = saved_params("second", 1), saved_params("first", 1)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 5
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_named_model_is_searched_beside_the_recipe_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = (
        "data: {train: {path: json, data_files: train.jsonl}, max_length: 8}\nplugin: {module: causal_lm}\n"
        "train: {global_batch_size: 4, steps: 1}\nmodel: {name: named, tokenizer: byte}\noutput_dir: first\n"
    )
    beside = project / "recipes"
    (beside / "named").mkdir(parents=True)
    (beside / "named" / "config.json").write_text(json.dumps(LLAMA))
    (beside / "train.jsonl").write_text('{"text": "abcdefgh"}\n' * 4)
    (beside / "lm.yaml").write_text(recipe)
    job = prepare(load_recipe("recipes/lm.yaml"), stages=("train",))
    assert (job.recipe.model.name, job.recipe.model.tokenizer) == ("recipes/named", "byte")
    assert job.model.config.hidden_size == 16
    assert pin_paths(load_recipe("recipes/lm.yaml")).recipe.model.name == str(beside / "named")
    monkeypatch.chdir(beside)
    assert prepare(load_recipe("lm.yaml"), stages=("train",)).recipe.model.name == "named"
