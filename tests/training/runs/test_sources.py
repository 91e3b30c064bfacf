"""Runs on several datasets, and runs evaluated on a share of what they would be trained on."""

import json
from collections import Counter
from pathlib import Path

import pytest

from redco_cli.data.mixture import Mixture
from redco_cli.encoding.identity import identity_of
from redco_cli.errors import RedcoError
from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.run import evaluate, predict, train, validate
from tests.training.tiny import assert_same_run, interrupted, recorded, times_seen

FLOATS = ("np.asarray(e[name])", 'np.asarray(e[name], np.float32 if name == "x" else np.int32)')
SHORT = ["eval={every: null, at_start: false, predict: false, batch_size: 8}", "train={global_batch_size: 10, micro_batch_size: 10, steps: 4, warmup: 0}"]
LIST = "data.train=[{path: json, data_files: a.jsonl, weight: 2}, {path: json, data_files: b.jsonl, weight: 0.5}]"


@pytest.fixture
def project(tiny_project: Path) -> Path:
    """With 8 examples in `a.jsonl` and 12 in `b.jsonl`, which have a column more."""
    plugin = tiny_project / "plugin.py"
    plugin.write_text(plugin.read_text().replace(*FLOATS))
    for name, numbers in (("a", range(8)), ("b", range(8, 20))):
        rows = [
            {"x": [i % 7 / 7, *[0.5] * 7], "y": i % 3, "id": i, **({"b": 1} if name == "b" else {})} for i in numbers]
        (tiny_project / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_project


def seen(run: str) -> Counter[int]:
    total = Counter[int]()
    for counts in times_seen(recorded(run)).values():
        total.update(counts)
    return total


def refused(*overrides: str) -> str:
    with pytest.raises(RedcoError) as error:
        validate("recipe.yaml", overrides)
    return str(error.value)


@pytest.mark.slow
def test_each_example_comes_as_often_as_the_weight_of_its_source_says(project: Path) -> None:
    given = [*SHORT, LIST, "data.eval=25%"]
    train("recipe.yaml", ["output_dir=whole", *given])  # twice 6 of 8 examples, and half of 9 of 12: 2.5 epochs of 16
    interrupted(2, *given)
    train("recipe.yaml", given)
    assert_same_run("run", "whole", 4)
    held = [*prepare(load_recipe("run/recipe.resolved.yaml"), stages=("eval",)).eval_examples]
    counts, out = seen("run"), {example["id"] for example in held}
    assert len(out) == evaluate("run").examples == 5
    first = [counts[i] for i in range(8) if i not in out]
    second = [counts[i] for i in range(8, 20) if i in counts]
    assert not out & set(counts)
    assert (len(first), len(second)) == (6, 4)
    assert set(first) <= {4, 5, 6}
    assert set(second) <= {2, 3}
    predictions = [json.loads(line) for line in predict("run").read_text().splitlines()]
    assert [one["example"]["id"] for one in predictions] == [example["id"] for example in held]
    changed = "command line: data.train.0.weight: 3.0, but checkpoint-4 was trained with 2.0"
    assert changed in refused(*given, "data.train.0.weight=3")
    assert "data.eval: '30%', but checkpoint-4 was trained with '25%'" in refused(*given, "data.eval=30%")


@pytest.mark.slow
def test_another_choice_of_examples_is_other_data(project: Path) -> None:
    """Also while other eval data would be free to come."""
    given = [*SHORT, LIST, "data.eval=25%", "train.steps=2"]
    interrupted(1, *given)
    said = "data.train: checkpoint-1 was trained with other data: data.train: choice of examples differs"
    assert said in refused(*given, "data.eval=4")
    rows = (project / "b.jsonl").read_text().splitlines(keepends=True)
    (project / "b.jsonl").write_text("".join(rows[::-1]))
    assert "data.train: source 1: b.jsonl differs" in refused(*given)


def test_columns_may_differ_and_a_share_is_of_each_source(project: Path) -> None:
    job = prepare(load_recipe("recipe.yaml", [*SHORT, LIST, "data.eval=25%"]), stages=("train", "eval"))
    again = prepare(load_recipe("recipe.yaml", [*SHORT, LIST, "data.eval=25%", "seed=1"]), stages=("eval",))
    assert [*job.eval_examples] == [*again.eval_examples]
    assert sorted(job.eval_examples[0]) == ["id", "x", "y"]
    assert sorted(job.eval_examples[-1]) == ["b", "id", "x", "y"]
    trained, held = ({example["id"] for example in one} for one in (job.train_examples, job.eval_examples))
    assert not trained & held
    assert (len(job.train_examples), len(trained), len(held)) == (16, 10, 5)
    found = validate("recipe.yaml", [*SHORT, LIST, "data.eval=25%"])[0]["examples"]
    assert found == {"train": 16, "eval": 5, "data.train.0": 12, "data.train.1": 4}


def test_a_share_of_what_a_plugin_makes(project: Path) -> None:
    job = prepare(load_recipe("recipe.yaml", [*SHORT, "data.eval=3"]), stages=("train", "eval"))
    assert sorted(example["id"] for split in (job.train_examples, job.eval_examples) for example in split) == [*range(20)]
    assert len(job.eval_examples) == 3
    problem = refused(*SHORT, "data.eval=20")
    assert "data.eval: 20 given, but data.train has 20 in all: none is left to train on" in problem
    problem = refused(*SHORT, "data.eval=5%", "plugin.options.stream=true")
    assert "5% given, but the examples that load_examples of plugin.py returns have no length" in problem


def test_the_place_of_an_example_is_that_in_its_file(project: Path) -> None:
    examples = prepare(load_recipe("recipe.yaml", [*SHORT, LIST, "data.eval=25%"]), stages=("train",)).train_examples
    for index, example in enumerate(examples):
        number = example["id"] + 1
        assert examples.place(index) == (f"a.jsonl:{number}" if number <= 8 else f"b.jsonl:{number - 8}")
    said = refused(*SHORT, LIST.replace("0.5", "0.01"))
    assert said.startswith("command line: data.train.1.weight: 0.01 of 12 examples is none")


def test_what_is_encoded_is_kept_apart(project: Path) -> None:
    def identity(*overrides: str) -> str | None:
        examples = prepare(load_recipe("recipe.yaml", [*SHORT, *overrides]), stages=("train",)).train_examples
        assert isinstance(examples, Mixture)
        return identity_of(examples)

    found = [identity(LIST, *more) for more in ([], ["data.eval=1"], ["data.eval=2"], ["data.train.0.weight=1"])]
    assert len({*found, identity("data.train={path: json, data_files: a.jsonl}", "data.eval=1")}) == 5
    assert None not in found
    assert found[0] == identity(LIST)
    assert identity("data.eval=1") is None  # a plugin's own examples have no identity
