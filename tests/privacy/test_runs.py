"""Private runs from end to end: on any mesh, in any cut, stopped and continued, with LoRA on a language model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.planning.compiled import compile_step
from redco_cli.planning.devices import Devices
from redco_cli.planning.search.ways import options
from redco_cli.planning.workload import recipe_workload
from redco_cli.run import train, validate
from redco_cli.training.records.metrics import read_records
from tests.training.tiny import PLUGIN, final_state, interrupted, recorded, write_project

CUBE = "mesh={data: 2, fsdp: 2, tensor: 2}"
PRIVATE = "privacy={noise_multiplier: 1.0, delta: 1e-3, clip: 0.5, accountant: rdp}"
LESS = ("train.global_batch_size=8", "eval.predict=false", "eval.at_start=false", "eval.every=null")


@pytest.fixture
def project(tmp_path, monkeypatch):
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_records(run):
    return [record for record in read_records(Path(run) / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.slow
def test_a_private_run_says_what_it_spends_and_is_the_same_on_every_mesh_and_in_every_cut(project, capsys):
    arguments = [PRIVATE, *LESS, "train.steps=4", "train.warmup=0", "checkpoint.every=4"]
    train("recipe.yaml", [*arguments, "output_dir=one"])
    told = capsys.readouterr().err
    assert "privacy: epsilon " in told
    assert "training losses and metrics are not private" in told
    one = train_records("one")
    spent = [record["epsilon"] for record in one]
    assert spent == sorted(spent)
    assert f"epsilon {spent[-1]:.4g} at delta 0.001 after 4 steps (rdp accountant" in told
    assert f"epsilon {spent[0]:.3f}" in told
    assert len({record["weight"] for record in one}) > 1  # examples of a batch: their number is random
    train("recipe.yaml", [*arguments, CUBE, "train.micro_batch_size=4", "output_dir=cube"])
    for name in ("loss", "grad_norm", "weight", "epsilon"):
        np.testing.assert_allclose([r[name] for r in train_records("cube")], [r[name] for r in one], rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_as_one_that_is_not_and_keeps_its_length(project):
    train("recipe.yaml", [PRIVATE, "output_dir=whole"])
    interrupted(5, PRIVATE, "output_dir=stopped")
    train("recipe.yaml", [PRIVATE, "output_dir=stopped"])
    assert recorded("stopped") == recorded("whole")
    whole, stopped = final_state("whole", 12), final_state("stopped", 12)
    for path, array in whole.items():
        np.testing.assert_array_equal(array, stopped[path], err_msg=path)
    with pytest.raises(RedcoError, match="beside privacy a run keeps its length: the noise of checkpoint-12 was drawn"):
        train("stopped", ["train.steps=20"])


def test_validate_shows_the_guarantee(project):
    summary, _ = validate("recipe.yaml", [PRIVATE, *LESS])
    found = summary["privacy"]
    assert found["noise_multiplier"] == 1.0
    assert found["expected_batch"] == 8
    assert found["largest_batch"] == 20
    assert found["epsilon"] > 0
    assert summary["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [4, 8])
def test_a_plan_counts_a_gradient_for_each_example(project, micro_batch_size):
    Path("plugin.py").write_text(PLUGIN.replace("nn.Dense(16,", "nn.Dense(4096,"))
    workload = recipe_workload("recipe.yaml", [PRIVATE, *LESS, f"train.micro_batch_size={micro_batch_size}"])
    best = options(workload, Devices(1, 1, None, eager=True))[0][0]
    assert best.memory.activations >= micro_batch_size * best.memory.gradients
    assert compile_step(best).memory == pytest.approx(best.memory.total, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_digits_are_told_apart_though_none_of_them_shows(seed, tmp_path):
    result = train("private", [f"seed={seed}", "mesh.data=1", f"output_dir={tmp_path}"])
    assert train_records(tmp_path)[-1]["epsilon"] == pytest.approx(8, abs=1e-2)
    assert result.evaluations[-1][1]["accuracy"] >= 0.85


@pytest.mark.slow
def test_lora_on_a_language_model_is_private(tmp_path, monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=260, eos_token_id=257)).save_pretrained(
        "base"
    )
    texts = [{"text": "abcxyz"[number % 6] * (number * 7 % 15 + 2)} for number in range(40)]
    Path("train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    Path("recipe.yaml").write_text(
        """
model: {name: base, tokenizer: byte}
adapter: {rank: 4, dropout: 0.1}
privacy: {noise_multiplier: 0.2, delta: 1e-3, clip: 1.0, accountant: rdp}
data: {train: {path: json, data_files: train.jsonl}, eval: {path: json, data_files: train.jsonl}, max_length: 16}
plugin: {module: causal_lm}
train: {global_batch_size: 8, micro_batch_size: 8, steps: 8, learning_rate: 3e-2, schedule: constant}
logging: {every: 1, plot: false}
eval: {every: 4}
mesh: {data: 1}
output_dir: one
"""
    )
    train("recipe.yaml")
    train("recipe.yaml", [CUBE, "train.micro_batch_size=4", "output_dir=cube"])
    for name in ("loss", "grad_norm"):
        one, cube = ([record[name] for record in train_records(run)] for run in ("one", "cube"))
        np.testing.assert_allclose(cube, one, rtol=1e-4)
    evaluated = [record["loss"] for record in read_records(Path("one/metrics.jsonl")) if record["kind"] == "eval"]
    assert evaluated[-1] < evaluated[0]
    summary, _ = validate("recipe.yaml", ["output_dir=other"])
    assert summary["encoded"]["train"]["packed"] is False


@pytest.mark.slow
def test_without_the_extra_it_is_told_and_nothing_else_needs_it(project):
    """In a process of its own, in which the libraries are not there."""
    code = (
        "import sys\n"
        "for name in ('jax_privacy', 'dp_accounting'): sys.modules[name] = None\n"
        "from redco_cli.__main__ import main\n"
        "sys.argv = ['redco', *sys.argv[1:]]\n"
        "main()\n"
    )

    def run(*arguments):
        command = [sys.executable, "-c", code, "validate", "recipe.yaml", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    missing = run(PRIVATE)
    assert missing.returncode == 1
    assert "the package jax_privacy is not installed" in missing.stderr
    assert "pip install 'redco[privacy]'" in missing.stderr
