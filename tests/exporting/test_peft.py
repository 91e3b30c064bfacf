"""PEFT loads what is written, and what PEFT writes is read: the same logits, whatever the model."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from redco_cli import load_model
from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.model import adapter_of
from redco_cli.adapters.peft import read_peft
from redco_cli.errors import ModelError
from redco_cli.exporting.adapter import export_adapter
from redco_cli.exporting.peft import peft_files
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.recipe.sections.adapter import AdapterSection

LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = {"vocab_size": 64, "num_hidden_layers": 2}
MODELS = {
    "llama": (LLAMA | LAYERS, "CausalLM", ["q_proj", "v_proj", "down_proj", "embed_tokens"]),
    "gpt2": ({"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}, "CausalLM", "all-linear"),
    "phi3": (LLAMA | LAYERS | {"pad_token_id": 0}, "CausalLM", "all-linear"),
    "mixtral": (LLAMA | LAYERS | {"num_local_experts": 4}, "CausalLM", ["q_proj", "w1", "w2", "w3"]),
    "qwen3_moe": (
        LLAMA
        | LAYERS
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "mlp_only_layers": [1],
            "head_dim": 4,
        },
        "CausalLM",
        ["q_proj", "up_proj", "down_proj"],
    ),
    "mistral": (LLAMA | LAYERS | {"pad_token_id": 0}, "SequenceClassification", ["q_proj", "down_proj"]),
    "bert": (
        LAYERS | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4},
        "SequenceClassification",
        ["query", "value"],
    ),
    "t5": (
        {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 4},
        "Seq2SeqLM",
        ["q", "wo"],
    ),
}
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
FAST = {("phi3", "dora")}
IDS = np.random.default_rng(0).integers(0, 60, (2, 9))


def torch_model(name, directory=None):
    settings, task, _ = MODELS[name]
    kind = getattr(transformers, f"AutoModelFor{task}")
    if directory is not None:
        return kind.from_pretrained(directory).eval()
    torch.manual_seed(0)
    return kind.from_config(transformers.AutoConfig.for_model(name, **settings)).eval()


def inputs_of(name):
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})


def torch_logits(model, name):
    with torch.no_grad():
        inputs = {key: torch.tensor(ids) for key, ids in inputs_of(name).items()}
        return model(**inputs).logits.float().numpy()


def written_by_peft(name, kind, directory, **settings):
    """Base and adapter as files, and the logits of both together."""
    model = torch_model(name)
    model.save_pretrained(directory / "base")
    targets = [one for one in MODELS[name][2] if kind != "dora" or one != "embed_tokens"]
    targets = targets if isinstance(MODELS[name][2], list) else MODELS[name][2]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "gpt2", **KINDS[kind], **settings
    )
    adapted = peft.get_peft_model(model, config).eval()
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(directory / "adapter")
    return torch_logits(adapted, name)


CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in FAST else [pytest.mark.slow])
    for name in MODELS
    for kind in KINDS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_adapter_goes_in_and_out(name, kind, tmp_path):
    expected = written_by_peft(name, kind, tmp_path)
    model, params = load_model(tmp_path / "base")
    adapter, own = read_peft(tmp_path / "adapter", model)
    run = adapting(lambda params, inputs: model(params, **inputs), adapter.adapters)
    inputs = {key: jnp.asarray(ids) for key, ids in inputs_of(name).items()}
    found = jax.jit(run)(params, adapter.factors(own), None, inputs)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    merged = load_model(tmp_path / "base", adapter=tmp_path / "adapter")[1]
    np.testing.assert_allclose(model(merged, **inputs), expected, atol=1e-5)
    done = export_adapter(adapter, own, params, model, tmp_path / "out", name=str(tmp_path / "base"))
    assert {file.name for file in done.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert done.difference < 1e-5
    again = peft.PeftModel.from_pretrained(torch_model(name, tmp_path / "base"), tmp_path / "out").eval()
    np.testing.assert_allclose(torch_logits(again, name), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_in_bfloat16_it_is_as_near_as_under_autocast(kind, tmp_path):
    expected = written_by_peft("llama", kind, tmp_path)
    base = torch_model("llama", tmp_path / "base")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch_logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval().float(), "llama")
    model, params = load_model(tmp_path / "base", dtype="bfloat16")
    adapter, own = read_peft(tmp_path / "adapter", model)
    run = adapting(lambda params: model(params, input_ids=IDS), adapter.adapters)
    ours = np.asarray(jax.jit(run)(params, adapter.factors(own), None), np.float32)
    far, near = (np.abs(one - expected).max() for one in (theirs, ours))
    assert 0 < near < 2 * far
    assert near < 2**-6 * np.abs(expected).max()


@pytest.mark.filterwarnings("ignore")
def test_ranks_and_scales_that_differ(tmp_path):
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.v_proj": 3}}
    expected = written_by_peft("llama", "lora", tmp_path, layers_to_transform=None, **patterns)
    model, params = load_model(tmp_path / "base")
    adapter, own = read_peft(tmp_path / "adapter", model)
    np.testing.assert_allclose(model(adapter.merged(params, own), input_ids=IDS), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "saved"), [("bert", {"classifier/kernel", "classifier/bias"}), ("mistral", {"score"})]
)
def test_a_head_that_is_trained_itself(name, saved, tmp_path):
    expected = written_by_peft(name, "lora", tmp_path, task_type="SEQ_CLS")
    model, params = load_model(tmp_path / "base")
    adapter, own = read_peft(tmp_path / "adapter", model)
    assert set(adapter.saved) == saved
    np.testing.assert_allclose(model(adapter.merged(params, own), input_ids=IDS), expected, atol=1e-5)
    export_adapter(adapter, own, params, model, tmp_path / "out", name=str(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(torch_model(name, tmp_path / "base"), tmp_path / "out").eval()
    np.testing.assert_allclose(torch_logits(again, name), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 is not read"),
        ({"bias": "all"}, "bias all is not read"),
        ({"lora_bias": True}, "lora_bias is not read"),
        ({"target_parameters": ["x"]}, "target_parameters is not read"),
    ],
)
def test_what_is_not_read_is_refused(change, problem, tmp_path):
    written_by_peft("bert", "lora", tmp_path)
    file = Path(tmp_path / "adapter/adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change, "unknown_key": 1}))
    model, _ = load_model(tmp_path / "base")
    with pytest.raises(ModelError, match=problem):
        read_peft(tmp_path / "adapter", model)
    file.write_text("{")
    with pytest.raises(ModelError, match="holds no adapter that can be read"):
        read_peft(tmp_path / "adapter", model)


def test_experts_in_one_tensor_have_no_form(tmp_path):
    """Of gpt-oss; other weights of it have one."""
    sizes = LLAMA | LAYERS | {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = resolve_model(ModelSection(config={"model_type": "gpt_oss", **sizes}), where=str)
    section = AdapterSection(targets=("layers/experts/down",), rank=2)
    adapter = adapter_of(model, section, str)
    own = adapter.init(jax.random.key(0))
    with pytest.raises(ModelError, match="PyTorch keeps all experts of layers/experts/down in one tensor"):
        peft_files(adapter, own, model.abstract, model, None)
