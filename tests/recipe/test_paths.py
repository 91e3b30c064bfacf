from pathlib import Path

from redco_cli.recipe.load import load_recipe, resolved_yaml
from redco_cli.recipe.paths import pin_paths

RECIPE = """
model: {name: weights, tokenizer: byte}
data:
  train: {path: json, data_files: [a.jsonl, 'parts/*.jsonl', gone.jsonl]}
  eval: {path: saved, data_files: b.jsonl}
plugin: {module: plugins/p.py}
output_dir: runs/x
"""


def test_what_exists_is_pinned_and_the_rest_stays(folder, write):
    for name in ("project/a.jsonl", "project/plugins/p.py", "b.jsonl", "project/b.jsonl", "parts/1.jsonl"):
        write(name, "")
    for name in ("weights", "saved"):
        (folder / name).mkdir()
    write("project/r.yaml", RECIPE)
    loaded = load_recipe("project/r.yaml", (), {})
    pinned = pin_paths(loaded).recipe
    assert pinned.plugin.module == f"{folder}/project/plugins/p.py"
    assert pinned.model.name == f"{folder}/weights"
    assert pinned.model.tokenizer == "byte"
    assert pinned.data.train.data_files == (f"{folder}/project/a.jsonl", f"{folder}/parts/*.jsonl", "gone.jsonl")
    assert pinned.data.eval.data_files == f"{folder}/project/b.jsonl"  # beside the recipe, before the working directory
    assert (pinned.data.train.path, pinned.data.eval.path) == ("json", f"{folder}/saved")
    assert pinned.output_dir == "runs/x"
    assert loaded.recipe.plugin.module == "plugins/p.py"


def test_a_pinned_recipe_means_the_same_from_elsewhere(folder, write, monkeypatch):
    for name in ("project/a.jsonl", "project/plugins/p.py", "b.jsonl"):
        write(name, "")
    write("project/r.yaml", RECIPE)
    pinned = pin_paths(load_recipe("project/r.yaml", (), {}))
    write("runs/x/recipe.resolved.yaml", resolved_yaml(pinned))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    again = load_recipe(Path("../runs/x/recipe.resolved.yaml"), (), {})
    assert pin_paths(again).recipe == again.recipe == pinned.recipe


def test_names_that_are_no_paths_stay(load):
    loaded = load("model: {name: org/model}\ndata: {train: {path: org/data}}\n")
    assert pin_paths(loaded).recipe == loaded.recipe
