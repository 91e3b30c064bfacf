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
from redco_cli.job import prepare
from redco_cli.prediction import predictor
from redco_cli.recipe.data import DataSection
from redco_cli.recipe.load import load_recipe
from redco_cli.run import validate
from redco_cli.runtime.mesh import make_mesh
from redco_cli.training.input_pipeline import compile_ahead, device_batches
from redco_cli.training.records.metrics import read_records
from redco_cli.training.records.speed import Meter
from tests.runtime.multiprocess.processes import run_several, same
from tests.training.tiny import assert_same_run, final_state, interrupted

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


@pytest.mark.slow
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


@pytest.mark.slow
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


STREAMED = ["data.streaming=true", "data.shuffle_buffer=7", "data.eval=null", "eval.every=null"]


@pytest.mark.usefixtures("project")
def test_a_stream_is_compiled_ahead_for_its_lengths_and_padded_by_them(capfd):
    """As a run does, up to its step; in two micro-batches on two devices."""
    job = prepare(load_recipe("recipe.yaml", STREAMED, {}), stages=["train"])
    mesh = make_mesh({"data": 2, "fsdp": 1, "tensor": 1}, str)
    compiled = []
    step = SimpleNamespace(lengths=set(), compiled=lambda _state, batch, length: compiled.append((batch, length)))
    compile_ahead(job, mesh, step, None, job.train_rows, range(6), 0)
    assert [(batch["input_ids"].shape, length) for batch, length in compiled] == [((2, 2, 128), 128), ((2, 2, 32), 32)]
    assert "rows of 32 or 128 tokens: 2 train steps are compiled" in capfd.readouterr().err
    with contextlib.closing(device_batches(job, mesh, Meter(), job.train_rows, range(12), 0)) as batches:
        found = [(batch, counts) for batch, counts in batches]
    lengths = [batch["input_ids"].shape[-1] for batch, _ in found]
    assert set(lengths) == {32, 128}
    longest = [int(np.asarray(batch["attention_mask"]).sum(-1).max()) for batch, _ in found]
    assert lengths == [32 if most <= 32 else 128 for most in longest]
    assert [positions for _, (_, _, positions) in found] == [4 * length for length in lengths]


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_streamed_run_has_the_losses_of_one_without_buckets_and_is_continued_exactly(capfd):
    settings = [*STREAMED, "data.buckets=auto", "train.schedule=constant"]
    train("recipe.yaml", [*settings, "output_dir=whole"])
    said = capfd.readouterr().err
    assert "rows of 32, 64 or 128 tokens, chosen by the first 40 examples: 3 train steps are compiled\n" in said
    assert len(re.findall(r"compiling train step", said)) == 3
    for step in (2, 5):
        interrupted(step, *settings, "output_dir=part")
    train("recipe.yaml", [*settings, "output_dir=part"])
    assert_same_run("part", "whole", 6)
    others = ["train.micro_batch_size=4", "mesh={data: 1, fsdp: 2, tensor: 2}"]
    train("recipe.yaml", [*settings, "data.buckets=false", "output_dir=plain", *others])
    pairs = zip(records("whole"), records("plain"), strict=True)
    assert all(one["loss"] == pytest.approx(other["loss"], rel=1e-5) for one, other in pairs)
    assert max(record["padding"] for record in records("whole")) < min(record["padding"] for record in records("plain"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("project")
def test_two_processes_pad_a_stream_alike():
    run_several(["train", "recipe.yaml", *STREAMED, "output_dir=many"], 2, 1)
    train("recipe.yaml", [*STREAMED, "output_dir=once"])
    same("many", "once")


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
