"""Rows padded to a few lengths: the same losses from fewer positions, by the programs that were announced."""

import json
import re
from pathlib import Path

import pytest

from redco_cli import train
from redco_cli.data.loader import order
from redco_cli.training.records.metrics import read_records

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


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A recipe with 40 texts, most of which are short."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    texts = [{"text": "xyz"[number % 3] * length} for number, length in enumerate(LENGTHS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(run, kind="train"):
    return [record for record in read_records(Path(run) / "metrics.jsonl") if record["kind"] == kind]


def test_a_run_has_the_losses_of_one_without_buckets(project, capfd):
    """In two micro-batches on two devices, beside one of each."""
    train("recipe.yaml")
    said = capfd.readouterr().err
    index = order(40, seed=0, shuffle=True)
    tokens = [[LENGTHS[index(4 * step + row)] + 1 for row in range(4)] for step in range(6)]
    lengths = [32 if max(rows) <= 32 else 128 for rows in tokens]
    assert set(lengths) == {32, 128}
    assert "rows of 32 or 128 tokens: 2 train steps are compiled\n" in said
    assert re.findall(r"compiling train step for batches of \[2, 2, (\d+)\]", said) == ["128", "32"]
    assert re.findall(r"compiling eval step for batches of \[4, (\d+)\]", said) == ["128", "32"]
    assert "compiles the" not in said  # as if batches varied by mistake
    found = records("run")
    padding = [1 - sum(rows) / (4 * length) for rows, length in zip(tokens, lengths, strict=True)]
    assert [record["padding"] for record in found] == pytest.approx(padding)
    assert {record["compilations"] for record in found} == {2}
    train("recipe.yaml", ["data.buckets=false", "output_dir=plain", "train.micro_batch_size=4", "mesh.data=1"])
    assert all(record["padding"] > 0.75 for record in records("plain"))
    for kind in ("train", "eval"):
        pairs = zip(records("run", kind), records("plain", kind), strict=True)
        assert all(one["loss"] == pytest.approx(other["loss"], rel=1e-5) for one, other in pairs)
