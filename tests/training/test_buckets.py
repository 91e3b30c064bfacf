"""Rows padded to a few lengths: the same losses from fewer positions, by the programs that were announced."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from redco_cli import predict, train
from redco_cli.data.loader import order
from redco_cli.encoding.rows import refuse_unencoded
from redco_cli.errors import RecipeError
from redco_cli.prediction import predictor
from redco_cli.recipe.data import DataSection
from redco_cli.run import validate
from redco_cli.training.records.metrics import read_records
from tests.runtime.multiprocess.processes import run_several, same
from tests.training.tiny import final_state

RECIPE = """
model: {config: {model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
  num_attention_heads: 2}, task: causal_lm, tokenizer: byte}
data:
  train: {path: json, data_files: train.jsonl}
  eval: {path: json, data_files: train.jsonl, limit: 32}
  max_length: 128
  packing: false
  buckets: [32]
plugin: {module: causal_lm}
train: {global_batch_size: 4, micro_batch_size: 2, steps: 6, learning_rate: 1e-2, max_compilations: 1}
eval: {every: 6, batch_size: 4}
predict: {generation: {max_new_tokens: 2}, batch_size: 2}
logging: {every: 1, plot: false}
mesh: {data: 2}
output_dir: run
"""
LENGTHS = [number * 7 % 13 + (40 if number % 8 == 5 else 0) + 1 for number in range(40)]
"""Tokens of each text, the end mark apart: 5 of 40 are longer than 32."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe with 40 texts, the run of it, and what that said."""
    directory, said = tmp_path_factory.mktemp("trained"), io.StringIO()
    (directory / "recipe.yaml").write_text(RECIPE)
    texts = [{"text": "xyz"[number % 3] * length} for number, length in enumerate(LENGTHS)]
    (directory / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    with contextlib.chdir(directory), contextlib.redirect_stderr(said):
        train("recipe.yaml")
    return directory, said.getvalue()


@pytest.fixture
def project(trained, tmp_path, monkeypatch):
    """A copy of it in the working directory."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return trained[1]


def records(run, kind="train"):
    return [record for record in read_records(Path(run) / "metrics.jsonl") if record["kind"] == kind]


def test_a_run_has_the_losses_of_one_without_buckets(project):
    """In two micro-batches on two devices, beside one of each."""
    index = order(40, seed=0, shuffle=True)
    tokens = [[LENGTHS[index(4 * step + row)] + 1 for row in range(4)] for step in range(6)]
    lengths = [32 if max(rows) <= 32 else 128 for rows in tokens]
    assert set(lengths) == {32, 128}
    assert "rows of 32 or 128 tokens: 2 train steps are compiled\n" in project
    assert re.findall(r"compiling train step for batches of \[2, 2, (\d+)\]", project) == ["128", "32"]
    assert re.findall(r"compiling eval step for batches of \[4, (\d+)\]", project) == ["128", "32"]
    assert "compiles the" not in project  # as if batches varied by mistake
    found = records("run")
    padding = [1 - sum(rows) / (4 * length) for rows, length in zip(tokens, lengths, strict=True)]
    assert [record["padding"] for record in found] == pytest.approx(padding)
    assert {record["compilations"] for record in found} == {2}
    train("recipe.yaml", ["data.buckets=false", "output_dir=plain", "train.micro_batch_size=4", "mesh.data=1"])
    assert all(record["padding"] > 0.75 for record in records("plain"))
    for kind in ("train", "eval"):
        pairs = zip(records("run", kind), records("plain", kind), strict=True)
        assert all(one["loss"] == pytest.approx(other["loss"], rel=1e-5) for one, other in pairs)


@pytest.mark.usefixtures("project")
def test_predictions_are_in_order_and_continue_after_a_kill(monkeypatch):
    """Windows of 16 examples, in which the long prompts come first."""
    settings = ["data.eval.limit=40", "mesh.data=1"]
    plain = predict("run", [*settings, "data.buckets=false", "predict.batch_size=40"], output="plain.jsonl")
    called, sizes = predictor.call_output, []

    def killing(*arguments):
        sizes.append(arguments[-1])
        if len(sizes) == 12:
            raise KeyboardInterrupt
        return called(*arguments)

    monkeypatch.setattr(predictor, "call_output", killing)
    with pytest.raises(KeyboardInterrupt):
        predict("run", settings, output="out.jsonl")
    assert len(Path("out.jsonl.partial").read_text().splitlines()) == 16
    found = predict("run", settings, output="out.jsonl")
    assert sum(sizes[12:]) == 40 - 16
    assert found.read_text() == plain.read_text()
    assert [json.loads(line)["index"] for line in found.read_text().splitlines()] == list(range(40))


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_run_is_continued_exactly():
    settings = ["train.schedule=constant", "eval.every=null"]
    train("recipe.yaml", [*settings, "train.steps=3", "output_dir=part"])
    train("recipe.yaml", [*settings, "output_dir=part"])
    train("recipe.yaml", [*settings, "output_dir=once"])
    part, once = final_state("part", 6), final_state("once", 6)
    assert part.keys() == once.keys()
    for name, value in once.items():
        np.testing.assert_array_equal(part[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("project")
def test_two_processes_pad_alike():
    """Each holds a row of each micro-batch only, and prompts of the other decide where its own are predicted."""
    run_several(["train", "recipe.yaml", "output_dir=many"], 2, 1)
    same("many", "run")
    run_several(["predict", "many"], 2, 1)
    found = Path("many/predictions/eval_examples.jsonl").read_text()
    assert found == predict("run", output="one.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_auto_chooses_by_the_texts_and_validate_says_so():
    document, _ = validate("recipe.yaml", ["data.buckets=auto", "output_dir=other"])
    found = document["encoded"]["train"]
    assert found["padded_to"] == [32, 64]
    assert 0.2 < found["filled"] < 0.6
    assert "input_ids int32[2, 64]" in document["batch"]


def test_lengths_need_an_encode_fn():
    data = DataSection(buckets=[32])
    job = SimpleNamespace(data=data)
    plugin = SimpleNamespace(encode_fn=None, file="own.py")
    with pytest.raises(RecipeError) as refused:
        refuse_unencoded(job, plugin, {}, lambda key: f"recipe.yaml:7: {key}")
    assert str(refused.value) == (
        "recipe.yaml:7: data.buckets: (32,) given, but own.py has no encode_fn, and pads and cuts by itself\n"
        "  -> leave it out, or define encode_fn(ctx, example) in the plugin"
    )
