"""Runs on several streams with weights: continued exactly, and the same on several processes."""

import json
from pathlib import Path

import pytest

from redco_cli import train
from redco_cli.run import validate
from tests.runtime.multiprocess.processes import run_several, same
from tests.training.tiny import assert_same_run, interrupted

RECIPE = """
model: {config: {model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
  num_attention_heads: 2}, task: causal_lm, tokenizer: byte}
data:
  streaming: true
  train:
    - {path: json, data_files: a.jsonl}
    - {path: text, data_files: b.txt, weight: 2}
    - {path: json, data_files: c.jsonl, weight: 0.5}
  max_length: 64
  shuffle_buffer: 9
plugin: {module: causal_lm}
train: {global_batch_size: 4, micro_batch_size: 2, steps: 24, learning_rate: 1e-2}
logging: {every: 1, plot: false}
mesh: {data: 2}
output_dir: run
"""
UNPACKED = ["data.packing=false", "data.buckets=[32]"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Three sources, the first of which a stream has nearly twice in 24 unpacked steps."""
    texts = ["xyz"[number % 3] * (number * 7 % 50 + 1) for number in range(60)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "a.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "b.txt").write_text("".join(f"{text}\n" for text in texts[30:36]))
    (tmp_path / "c.jsonl").write_text("".join(lines[36:]))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("given", [[], UNPACKED], ids=["packed", "in buckets"])
def test_a_run_is_continued_exactly(given):
    train("recipe.yaml", ["output_dir=whole", *given])
    for step in (3, 10, 20):
        interrupted(step, *given)
        place = json.loads(Path(f"run/checkpoint-{step}/meta/metadata").read_text())["data"]
        assert place["epoch"] * 54 + place["given"] > step
    train("run")
    assert_same_run("run", "whole", 24)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("given", [[], UNPACKED], ids=["packed", "in buckets"])
def test_several_processes_read_the_same(given):
    several = [*given, "output_dir=several", "train.schedule=constant"]
    run_several(["train", "recipe.yaml", *several, "train.steps=3"], 2, 1)
    run_several(["train", "recipe.yaml", *several, "train.steps=8"], 2, 1)
    train("recipe.yaml", [*given, "output_dir=once", "train.schedule=constant", "train.steps=8"])
    same("several", "once")


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_shares_are_shown_before_a_run():
    examples = validate("recipe.yaml")[0]["examples"]
    assert examples["train"] == "streamed"
    assert [examples[f"data.train.{number}"] for number in range(3)] == ["about 56%", "about 22%", "about 22%"]
