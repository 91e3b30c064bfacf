"""Runs that train an adapter beside weights in four or eight bits: losses, checkpoints, merging, and refusals."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict

from redco_cli import load_model
from redco_cli.adapters.model import adapter_of
from redco_cli.adapters.quantized.base import keeping, kept_base
from redco_cli.adapters.quantized.program import dequantizing
from redco_cli.errors import RecipeError
from redco_cli.models.initial import kept_each
from redco_cli.recipe.sections.adapter import AdapterSection
from redco_cli.run import evaluate, predict, train
from redco_cli.runtime.mesh import make_mesh, replicated
from redco_cli.trained import export
from redco_cli.training.records.metrics import read_records
from tests.oracles import find_bitsandbytes
from tests.training.tiny import final_state

CUBE = "mesh={data: 2, fsdp: 2, tensor: 2}"
RECIPE = """
model: {name: base, tokenizer: byte}
adapter: {rank: 4, quantize: nf4}
data:
  train: {path: json, data_files: train.jsonl}
  eval: {path: json, data_files: train.jsonl, limit: 8}
  max_length: 16
plugin: {module: causal_lm}
train: {global_batch_size: 8, micro_batch_size: 8, steps: 6, learning_rate: 1e-2, schedule: constant, warmup: 0}
eval: {every: 3, predict: false, at_start: false}
predict: {generation: {max_new_tokens: 3}}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "vocab_size": 260, "eos_token_id": 258}
IDS = np.arange(24).reshape(2, 12) % 250


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A recipe, its data, and the weights of a small Llama as PyTorch saves them."""
    monkeypatch.chdir(tmp_path)
    save(transformers.LlamaConfig(**LLAMA))
    Path("recipe.yaml").write_text(RECIPE)
    texts = [{"text": "abcxyz"[number % 6] * (number * 7 % 15 + 2)} for number in range(40)]
    Path("train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return tmp_path


def save(config):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("base")


def losses(run):
    return [row["loss"] for row in read_records(Path(run) / "metrics.jsonl") if row["kind"] == "train"]


def in_nf4(model, params):
    """Parameters of a model as a run of it would keep them, on one device."""
    adapter = adapter_of(model, AdapterSection(quantize="nf4"), str)
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, str)
    places = jax.tree.map(lambda _: replicated(mesh), kept_base(adapter, "float32", str))
    return kept_each(params, keeping(places, "float32"))


@pytest.mark.slow
def test_a_run_over_a_quantised_base():
    train("recipe.yaml", ["train.steps=2", "eval.every=2"])
    assert {path.split("']['")[1] for path in final_state("run", 2) if path.startswith("['params']")} == {"adapter"}
    dense = flatten_dict(load_model("base")[1], sep="/")
    merged = flatten_dict(load_model("run")[1], sep="/")
    off = {path: float(np.abs(merged[path] - leaf).max()) for path, leaf in dense.items()}
    assert all((off[path] > 1e-3) == (path.startswith("layers/") and "norm" not in path) for path in off)
    with pytest.raises(RecipeError, match=r"adapter\.quantize"):
        train("recipe.yaml", ["adapter.quantize=int8", "train.steps=2"])


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["adapter.quantize=fp4"], "adapter.quantize"),
        (["adapter.quantize=float8_e4m3fn"], "adapter.quantize"),
        ([f"model={json.dumps({'name': None, 'config': {'model_type': 'llama', **LLAMA, 'hidden_size': 96}})}"],
         "layers/attention/k/kernel has 96 inputs, and every 64 of them share a scale: they do not divide"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused(overrides, problem):
    with pytest.raises(RecipeError) as refused:
        train("recipe.yaml", overrides)
    assert problem in str(refused.value)
    assert "adapter.quantize" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "quantize"), [("lora", "nf4"), ("dora", "nf4"), ("lora", "int8")])
def test_every_mesh_trains_the_same(kind, quantize):
    given = [f"adapter.type={kind}", f"adapter.quantize={quantize}"]
    train("recipe.yaml", [*given, "output_dir=one"])
    train("recipe.yaml", [*given, CUBE, "train.micro_batch_size=4", "output_dir=cube"])
    train("recipe.yaml", [*given, "mesh={fsdp: 8}", "train.remat=full", "output_dir=shards"])
    assert losses("one")[0] > losses("one")[-1]
    np.testing.assert_allclose(losses("cube"), losses("one"), rtol=1e-5)
    np.testing.assert_allclose(losses("shards"), losses("one"), rtol=1e-5)
    rows = {row["path"]: row for row in json.loads(Path("cube/sharding.json").read_text())["parameters"]}
    down = rows["model/layers/mlp/down/kernel/codes"]
    assert down["spec"] == [None, "tensor+fsdp"]
    assert down["gathered"] == [None, "tensor"]
    assert down["bytes_per_device"] * 4 == 2 * 256 * 128 // (2 if quantize == "nf4" else 1)
    assert predict("cube", ["mesh={data: 1}"], output="cube.jsonl").read_text().count("\n") == 8
    assert evaluate("one").values["loss"] == pytest.approx(evaluate("shards").values["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["weights", "random", "run"])
def test_a_run_that_is_continued_ends_as_if_it_had_not_stopped(base):
    given = []
    if base == "run":
        train("recipe.yaml", ["adapter=null", "train.steps=1", "output_dir=source"])
        given = ["model.params=source"]
    if base == "random":
        given = [f"model={json.dumps({'name': None, 'config': {'model_type': 'llama', **LLAMA}, 'tokenizer': 'byte'})}"]
    train("recipe.yaml", [*given, "output_dir=whole"])
    train("recipe.yaml", [*given, "train.steps=3"])
    train("recipe.yaml", [*given, CUBE, "train.steps=3"])
    train("recipe.yaml", given)
    assert losses("run") == losses("whole")
    one, other = (predict(run, output=f"{run}.jsonl").read_text() for run in ("run", "whole"))
    assert one == other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_merged_model_is_the_adapter_over_dequantised_weights():
    import peft

    train("recipe.yaml")
    export("run", output="merged")
    export("run", output="alone", adapter=True)
    model, params = load_model("base")
    kept = in_nf4(model, params)
    dense = {
        path: leaf.dense() if hasattr(leaf, "codes") else leaf for path, leaf in flatten_dict(kept, sep="/").items()
    }
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            _, _, layer = name.replace("self_attn", "attention").replace("_proj", "").partition(".layers.")
            number, _, rest = layer.partition(".")
            weight = np.asarray(dense[f"layers/{rest.replace('.', '/')}/kernel"][int(number)])
            module.weight.data = torch.tensor(weight.reshape(-1, weight.shape[-1]) if rest.endswith("o") else
                                              weight.reshape(weight.shape[0], -1)).T.contiguous()  # fmt: skip
    tuned = peft.PeftModel.from_pretrained(base, "alone").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    with torch.no_grad():
        logits, expected = (one(input_ids=torch.tensor(IDS)).logits for one in (merged, tuned))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


CONFIGS = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "phi3": transformers.Phi3Config(**LLAMA, pad_token_id=0),
    "mixtral": transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=260, eos_token_id=257),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_weights_that_bitsandbytes_has_quantised(name):
    bitsandbytes = find_bitsandbytes()
    if bitsandbytes is None:
        pytest.skip("bitsandbytes is fetched by make test-all")
    save(CONFIGS[name])
    reference = transformers.AutoModelForCausalLM.from_pretrained("base").eval()
    for path, module in reference.named_modules():
        linear = isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D)
        if linear and path != "lm_head" and not path.endswith("gate"):
            turned = isinstance(module, transformers.pytorch_utils.Conv1D)
            own = (module.weight.data.T if turned else module.weight.data).contiguous()
            packed = bitsandbytes.functional.quantize_4bit(own, blocksize=64, quant_type="nf4")
            back = bitsandbytes.functional.dequantize_4bit(*packed)
            module.weight.data = back.T.contiguous() if turned else back
    model, params = load_model("base")
    run = dequantizing(lambda params, ids: model(params, input_ids=ids))
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor(IDS)).logits
    np.testing.assert_allclose(jax.jit(run)(in_nf4(model, params), IDS), expected, atol=1e-5)
