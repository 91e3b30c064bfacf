"""The decoder, its fused loss and its generation, on meshes whose axes span processes: equal to one process."""

import json
from pathlib import Path

import pytest

from tests.runtime.multiprocess.processes import equal_to_one

SPANNING = ["{data: 4}", "{fsdp: 4}", "{tensor: 4}", "{data: 2, tensor: 2}", "{fsdp: 2, tensor: 2}"]
LLAMA = """
model:
  implementation: decoder
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 8,
           num_key_value_heads: 4, max_position_embeddings: 64, vocab_size: 264}
  task: causal_lm
  tokenizer: byte
data:
  train: {path: json, data_files: train.jsonl}
  eval: {path: json, data_files: train.jsonl, split: "train[:11]"}
  max_length: 24
plugin: {module: instruct}
predict: {generation: {max_new_tokens: 4, do_sample: true}}
train: {global_batch_size: 8, steps: 12, learning_rate: 3e-3, schedule: constant}
eval: {every: 4, predict: true}
checkpoint: {every: 4, keep: 9}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: one
"""


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny Llama that learns to answer, with answers of uneven length."""
    lines = [{"prompt": "ab"[: 1 + i % 2], "response": "xyz"[i % 3] * (1 + i * i % 7)} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "recipe.yaml").write_text(LLAMA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDCO_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("mesh", SPANNING)
def test_two_processes_equal_one(mesh: str) -> None:
    equal_to_one(mesh, 2, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("mesh", ["{data: 4}", "{fsdp: 4}", "{tensor: 4}", "{data: 2, fsdp: 2}"])
def test_four_processes_equal_one(mesh: str) -> None:
    equal_to_one(mesh, 4, 1)
