"""A plugin's secret from the first step to the last use of the run: it computes with it, and nothing has it on disk."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from redco_cli import evaluate, export, load_model, predict, predict_examples, train
from redco_cli.encoding import identity
from redco_cli.errors import PluginError, RecipeError
from redco_cli.recipe.schema import Recipe
from redco_cli.reports import runs
from redco_cli.run import validate
from redco_cli.training.saving.files.integrity import write_manifest
from redco_cli.training.saving.resume import refuse_changes
from tests.training.tiny import PLUGIN

MARK = "s3cr3t-m4rk"
GIVEN, VARIABLE = f"plugin.options.api_key={MARK}", "REDCO_PLUGIN__OPTIONS__API_KEY"
CHECK = f"assert ctx.options['api_key'] == ctx.recipe.plugin.options['api_key'] == {MARK!r}"
RECIPE = f"""
plugin: {{module: plugin.py, options: {{api_key: {MARK}}}}}
train: {{global_batch_size: 4, steps: 1, schedule: constant}}
logging: {{plot: false, tensorboard: true}}
mesh: {{data: 1}}
output_dir: run
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plugin.py").write_text(PLUGIN.replace("    return Net()", f"    {CHECK}\n    return Net()"))
    Path("recipe.yaml").write_text(RECIPE)
    return tmp_path


def refusal(call):
    with pytest.raises(RecipeError) as caught:
        call()
    assert MARK not in str(caught.value)
    return str(caught.value)


def holding(directory):
    """Files below a directory that hold the secret, or have it in their name."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return [path for path in paths if MARK in path.name or MARK.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_run_uses_its_secret_and_leaves_it_nowhere(project, monkeypatch, capsys):
    train("recipe.yaml")
    resolved = Path("run/recipe.resolved.yaml").read_text().splitlines()
    (line,) = (number for number, line in enumerate(resolved, start=1) if "api_key: <hidden>" in line)
    uses = {
        "train": lambda more: train("run", [*more, "train.steps=2"]),
        "evaluate": lambda more: evaluate("run", more),
        "predict": lambda more: predict("run", more),
        "examples": lambda more: predict_examples("run", [{"x": np.zeros(8), "y": 0, "id": 0}], more),
        "validate": lambda more: validate("run/recipe.resolved.yaml", more),
        "export": lambda more: export("run", more, output="exported"),
    }
    needed = f"run/recipe.resolved.yaml:{line}: plugin.options.api_key: this value is a secret, which is not kept"
    for name, use in uses.items():
        assert refusal(lambda use=use: use([])).startswith(needed), name
        if name in ("train", "export"):
            use([GIVEN])
    for name, place in (("run", "run/checkpoint-2"), ("exported", "exported/recipe.yaml")):
        assert refusal(lambda name=name: load_model(name)).startswith(place)
    monkeypatch.setenv(VARIABLE, MARK)
    for name in ("run", "exported"):
        load_model(name)
    predict("run")
    assert MARK not in "".join(capsys.readouterr())
    copies = [project / "exported" / "plugin" / "plugin.py", project / "plugin.py", project / "recipe.yaml"]
    assert sorted(path for path in holding(project) if "__pycache__" not in path.parts) == copies


def test_what_differs_between_runs_is_told_without_values(project, capsys):
    for name, secret, text in (("a", MARK, "x"), ("b", f"{MARK}2", "y")):
        (project / name).mkdir()
        written = {"plugin": {"module": "p.py", "options": {"api_key": secret, "text": text}}, "output_dir": name}
        (project / name / "recipe.resolved.yaml").write_text(json.dumps(written))  # as an earlier version left it
    runs(["a", "b"], as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["recipe"] == {"plugin.options.text": ["x", "y"]}
    assert MARK not in out + err


def test_options_that_do_not_fit_are_refused_without_their_values(project):
    wrong = "\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Options:\n    api_key: int\n"
    Path("plugin.py").write_text(PLUGIN + wrong)
    with pytest.raises(PluginError) as caught:
        validate("recipe.yaml")
    said = "recipe.yaml:2: plugin.options.api_key: '<hidden>' given: Input should be a valid integer"
    assert str(caught.value).startswith(said)


def test_what_a_plugin_raises_is_shown_without_them(project):
    Path("plugin.py").write_text(
        PLUGIN.replace("return Net()", "raise OSError(f'401 for ?key={ctx.options[\"api_key\"]}')")
    )
    with pytest.raises(PluginError) as caught:
        validate("recipe.yaml")
    assert "build_model raised OSError" in str(caught.value)
    assert "401 for ?key=<hidden>" in str(caught.value)


@pytest.mark.slow
def test_a_run_that_an_earlier_version_left_with_its_secret_continues(project):
    train("recipe.yaml")
    checkpoint = Path("run/checkpoint-1")
    meta = checkpoint / "meta" / "metadata"
    meta.write_text(meta.read_text().replace("<hidden>", MARK))
    write_manifest(checkpoint)
    train("recipe.yaml", ["train.steps=2"])
    assert holding(project / "run") == [project / "run" / "checkpoint-1" / "meta" / "metadata"]
    said = "plugin.options.noise: 0.5, but checkpoint-2 was trained with None"
    assert said in refusal(lambda: train("recipe.yaml", ["train.steps=2", "plugin.options.noise=0.5"]))


def recipe_with(**options):
    return Recipe.model_validate({"plugin": {"module": "plugin.py", "options": options}, "output_dir": "run"})


def test_an_option_that_is_no_secret_tells_two_runs_apart():
    before, now = (recipe_with(label_key=key, api_key=MARK).model_dump(mode="json") for key in ("label", "other"))
    said = "r.yaml: plugin.options.label_key: 'other', but checkpoint-1 was trained with 'label'\n"
    assert refusal(lambda: refuse_changes(before, now, (), "r.yaml: {}".format, "checkpoint-1")).startswith(said)


def test_rows_that_may_be_of_another_secret_are_not_kept(monkeypatch):
    monkeypatch.setattr(identity, "identity_of", lambda _: "data")
    monkeypatch.setattr(identity, "encoding_code", lambda _: "code")
    monkeypatch.setattr(identity, "_identity_of_tokenizer", lambda _: "tokenizer")

    def kept(**options):
        return identity.kept_at(None, SimpleNamespace(recipe=recipe_with(**options), stage="train", tokenizer=None), [])

    assert len({kept(label_key="a"), kept(label_key="b"), kept(label_key="b", n=1)}) == 3
    assert kept(label_key="a", servers=[{"api_key": MARK}]) is None
