"""Several models as one: what each is, and what is told of one that is not."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from redco_cli.errors import RecipeError
from redco_cli.models.resolve import resolve_model
from redco_cli.models.several import assembled, constant_of, members_of, section_of
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.schema import Recipe

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}


def recipe(**models: Any) -> Recipe:
    model = {"config": GPT2, "dtype": "bfloat16", "params": "runs/first"}
    return Recipe.model_validate({"plugin": {"module": "p"}, "output_dir": "o", "model": model, "models": models})


def test_what_a_model_does_not_say_is_as_in_model():
    given = recipe(same={}, later={"params": "runs/x", "dtype": "float32"}, larger={"config": {**GPT2, "n_embd": 16}})
    same, later, larger = (section_of(given, name) for name in ("same", "later", "larger"))
    assert same == given.model
    assert (later.config, later.params, later.dtype) == (GPT2, "runs/x", "float32")
    assert (larger.config["n_embd"], larger.params, larger.dtype) == (16, None, "bfloat16")
    resolved = Recipe.model_validate_json(json.dumps(given.model_dump(mode="json")))
    assert [section_of(resolved, name) for name in given.models] == [same, later, larger]


def test_models_are_one_with_parameters_below_their_names():
    given = recipe(teacher={"config": {**GPT2, "n_embd": 16}}, other={"frozen": False})
    models = assembled(given, resolve_model(given.model, where=str), str)
    assert list(members_of(models)) == ["model", "teacher", "other"]
    assert dict(constant_of(models)) == {"teacher": "bfloat16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(models.abstract["teacher"])} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(models.abstract["other"])} == {jnp.dtype("float32")}
    assert models.members["teacher"].config.n_embd == 16
    assert models.frozen[-1] == "teacher/.*"
    assert all(path.partition("/")[0] in models.members for path in models.stacked)
    plain = resolve_model(given.model, where=str)
    assert assembled(recipe(), plain, str) is plain


def test_a_model_without_an_architecture_is_refused():
    given = Recipe.model_validate({"plugin": {"module": "p"}, "output_dir": "o", "models": {"teacher": {}}})
    with pytest.raises(RecipeError, match=r"models.teacher: has neither name nor config, and build_model returns a, b"):
        assembled(given, {"a": None, "b": None}, str)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("{teacher: {parms: x}}", "r.yaml:3: models.teacher.parms: unknown key\n  -> did you mean params?"),
        ("{Teacher: {}}", "r.yaml:3: models.Teacher"),
        ("{model: {}}", "r.yaml:3: models.model: this is the name of the model itself"),
        ("{a: {name: x, config: {}}}", "r.yaml:3: models: a model has a name and a config"),
    ],
)
def test_mistakes_have_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(f"plugin: {{module: p}}\noutput_dir: o\nmodels: {models}\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe("r.yaml", (), {})
    assert message in str(refused.value)
