"""Twenty steps beside PEFT: from the same adapter, on the same batches, the same losses at every one of them."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer

from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.run import train
from redco_cli.trained import export
from redco_cli.training.records.metrics import read_records

STEPS, ROWS, RATE, DECAY = 20, 8, 3e-3, 0.1
RECIPE = f"""
model: {{name: base, tokenizer: byte}}
adapter: {{rank: 4, alpha: 6, targets: [PATHS]}}
data:
  train: {{path: json, data_files: train.jsonl}}
  max_length: 16
  packing: false
  buckets: false
  shuffle: false
plugin: {{module: causal_lm}}
train:
  global_batch_size: {ROWS}
  steps: {STEPS}
  learning_rate: {RATE}
  schedule: linear
  final_learning_rate: 0.2
  weight_decay: {DECAY}
logging: {{every: 1, plot: false}}
mesh: {{data: 1}}
output_dir: run
"""
WIDTH = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**WIDTH, **SIZES, "num_key_value_heads": 2}
GPT2 = {**WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
BASES = {
    "llama": (LLAMA, "'.*/kernel'", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "gpt2": ({**GPT2, **dict.fromkeys(DROPOUTS, 0.0)}, "'.*mlp/.*/kernel'", ["c_fc", "mlp.c_proj"]),
}
CASES = {
    "lora": ("llama", [], {}),
    "rslora": ("llama", ["adapter.rslora=true"], {"use_rslora": True}),
    "dora": ("llama", ["adapter.type=dora"], {"use_dora": True}),
    "lr_ratio": ("llama", ["adapter.lr_ratio=8"], {}),
    "lr_ratio dora": ("llama", ["adapter={type: dora, lr_ratio: 8}", "train.weight_decay=0"], {"use_dora": True}),
    "pissa": ("llama", ["adapter.init=pissa"], {"init_lora_weights": "pissa"}),
    "pissa dora": (
        "llama",
        ["adapter={init: pissa, type: dora, rslora: true}"],
        {"init_lora_weights": "pissa", "use_dora": True, "use_rslora": True},
    ),
    "gpt2": ("gpt2", [], {}),
    "gpt2 flax": ("gpt2", ["model.implementation=hf_flax"], {}),
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcd xyz"), draw.integers(3, 20))) for _ in range(STEPS * ROWS)]
    Path("train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def written(kind):
    """The recipe and the base model as files."""
    settings, paths, _ = BASES[kind]
    Path("recipe.yaml").write_text(RECIPE.replace("PATHS", paths))
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("base")


def batches(overrides):
    """What each step is given, as PyTorch tensors."""
    job = prepare(load_recipe("recipe.yaml", overrides), stages=("train",))
    rows, collate = job.train_rows, job.collate("train")
    made = (collate([rows[index] for index in range(first, first + ROWS)]) for first in range(0, len(rows), ROWS))
    return [{name: torch.tensor(np.asarray(array), dtype=torch.long) for name, array in one.items()} for one in made]


def optimizer_of(model, ratio, decay):
    if ratio is None:
        trained = [one for one in model.parameters() if one.requires_grad]
        decayed, others = [one for one in trained if one.ndim > 1], [one for one in trained if one.ndim == 1]
        groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=RATE)
    settings = {"lr": RATE, "loraplus_lr_ratio": ratio, "loraplus_weight_decay": decay}
    return create_loraplus_optimizer(model, torch.optim.AdamW, **settings)


def losses_of_peft(model, given, ratio, decay):
    """Of a step for each batch, magnitudes not decayed, as here."""
    optimizer = optimizer_of(model, ratio, decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.8 * step / STEPS)
    found = []
    for batch in given:
        inputs = {name: array for name, array in batch.items() if name in ("input_ids", "attention_mask")}
        loss = model(**inputs, labels=batch["labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_peft(name):
    kind, overrides, settings = CASES[name]
    written(kind)
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    if "init_lora_weights" in settings:
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=BASES[kind][2], **settings)
        model = peft.get_peft_model(base, config)
    else:
        train("recipe.yaml", [*overrides, "train.steps=1", "train.learning_rate=0", "output_dir=start"])
        export("start", output="adapter", adapter=True)
        model = peft.PeftModel.from_pretrained(base, "adapter", is_trainable=True)
    ratio, decay = 8 if "lr_ratio" in name else None, 0.0 if name == "lr_ratio dora" else DECAY
    expected = losses_of_peft(model, batches(overrides), ratio, decay)
    train("recipe.yaml", overrides)
    found = [row["loss"] for row in read_records(Path("run/metrics.jsonl")) if row["kind"] == "train"]
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.05
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
