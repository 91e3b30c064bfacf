"""Several datasets in a recipe, and a share of one as eval data."""

from fractions import Fraction
from pathlib import Path

import pytest

from redco_cli.errors import RecipeError
from redco_cli.recipe.load import load_recipe, resolved_yaml
from redco_cli.recipe.paths import moved, pin_paths, without_folders

LIST = """
data:
  train:
    - {path: json, data_files: a.jsonl}
    - path: csv
      data_files: b.csv
      weight: 2.5
  eval: 5%
"""


def refusal(load, text, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_a_list_has_weights_and_places(load):
    loaded = load(LIST)
    assert [source.weight for source in loaded.recipe.data.train] == [1.0, 2.5]
    assert loaded.where("data.train.1.weight") == "r.yaml:9: data.train.1.weight"
    assert loaded.where("data.train.0.split") == "r.yaml:6: data.train.0.split"
    assert [*loaded.recipe.data.sources("train")] == [*loaded.recipe.data.sources("eval")]
    assert [*loaded.recipe.data.sources("train")] == ["data.train.0", "data.train.1"]


def test_an_item_is_overridden_by_its_number(load):
    loaded = load(LIST, "data.train.1.limit=7", "data.train.0={path: text, data_files: c.txt}", environ={})
    first, second = loaded.recipe.data.train
    assert (second.limit, second.weight, first.path) == (7, 2.5, "text")
    assert loaded.where("data.train.1.limit") == "command line: data.train.1.limit"
    assert loaded.where("data.train.1.path") == "r.yaml:7: data.train.1.path"
    assert load(LIST, environ={"REDCO_DATA__TRAIN__1__WEIGHT": "3"}).recipe.data.train[1].weight == 3.0
    (first, second) = load(LIST, "data.train.1={limit: 3}").recipe.data.train
    assert (second.path, second.limit) == ("csv", 3)  # mappings merge, here too
    assert load(LIST, "data.train={path: org/data}").recipe.data.train.path == "org/data"
    assert load(LIST, "data.eval.path=org/data").recipe.data.eval.path == "org/data"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train.2.limit=1", "data.train is a list of 2, and 2 is no item of it"),
        ("data.train.path=json", "data.train is a list of 2, and path is no item of it"),
    ],
)
def test_an_item_that_is_not_there(load, override, said):
    key = override.partition("=")[0]
    remedy = "its items are 0 to 1; or give all: data.train=[...]"
    assert refusal(load, LIST, override) == f"command line: {key}: {said}\n  -> {remedy}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "data: {train: [{path: json, wieght: 2}]}",
            "r.yaml:3: data.train.0.wieght: unknown key\n  -> did you mean weight?",
        ),
        ("data: {train: [{path: json, weight: 0}]}", "r.yaml:3: data.train.0.weight: 0 given, but a number > 0"),
        ("data: {train: {path: json, weight: 2}}", "r.yaml:3: data.train.weight: unknown key"),
        ("data: {eval: [{path: json, weight: 2}]}", "r.yaml:3: data.eval.0.weight: unknown key"),
        ("data: {train: [{data_files: a}]}", "r.yaml:3: data.train.0.path: is missing"),
        ("data: {eval: 5 percent}", "a share of the training examples (5%), or a number of them (500), is expected"),
        ("data: {eval: 100%}", "a share of the training examples"),
        ("data: {eval: 0%}", "a share of the training examples"),
        ("data: {eval: 0}", "r.yaml:3: data.eval: 0 given, but"),
        ("data: {train: []}", "r.yaml:3: data.train: [] given, but"),
        ("data: {train: {path: json}, streaming: true, eval: 5%}", "r.yaml:3: data.eval: 5% given, but with"),
    ],
)
def test_what_is_refused(load, text, said):
    assert said in refusal(load, text)


@pytest.mark.parametrize(("given", "meant"), [("5%", Fraction(1, 20)), ("0.5 %", Fraction(1, 200)), ("500", 500)])
def test_what_is_held_out(load, given, meant):
    assert load(f"data: {{eval: {given}}}").recipe.data.held_out == meant


def test_paths_of_all_are_pinned_and_found_again(folder, write):
    for name in ("old/a.jsonl", "old/b.csv"):
        write(name, "")
    path = write("old/r.yaml", f"plugin: {{module: causal_lm}}\noutput_dir: {folder}/old/run{LIST}")
    pinned = pin_paths(load_recipe(path, (), {}))
    assert [one.data_files for one in pinned.recipe.data.train] == [f"{folder}/old/a.jsonl", f"{folder}/old/b.csv"]
    write("resolved.yaml", resolved_yaml(pinned))
    assert load_recipe("resolved.yaml", (), {}).recipe == pinned.recipe
    assert [one.data_files for one in without_folders(pinned.recipe).data.train] == ["a.jsonl", "b.csv"]
    before = pinned.recipe.model_dump(mode="json")
    (folder / "old").rename(folder / "new")
    now = pin_paths(load_recipe("new/r.yaml", [f"output_dir={folder}/new/run"], {})).recipe.model_dump(mode="json")
    found = moved(before, Path(folder, "new/run"), now)
    assert found["data"] == now["data"] != before["data"]
    assert moved(before, Path(folder, "new/run"), {**now, "data": {"train": None}})["data"] == before["data"]
