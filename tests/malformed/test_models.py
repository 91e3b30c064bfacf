"""Models that are not there, not whole, or not what the recipe says: found before a weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

RECIPE = """plugin: {module: causal_lm}
model:
  config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 32}
  tokenizer: byte
data: {train: {path: json, data_files: train.jsonl}, max_length: 16}
train: {global_batch_size: 2, steps: 2}
mesh: {data: 1}
output_dir: run
"""
CONFIG = """{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 32, "vocab_size": 260}"""
NAMED = ["model.config=null", "model.name=saved"]
LLAMA = (
    "model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1, "
    "num_key_value_heads: 1, rope_scaling: {rope_type: linear, factor: 2.0}"
)
GPT2 = "model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 32"
EVALUATED = ["data.eval.path=json", "data.eval.data_files=train.jsonl", "eval.predict=true"]


@dataclass(frozen=True)
class Case:
    """A change of the config or a saved model, overrides, and the whole error."""

    error: str
    config: tuple[str, str] = ("", "")
    saved: dict[str, str | bytes] = field(default_factory=dict)
    overrides: Sequence[str] = ()


CASES = {
    "an unknown type": Case("TODO-0-", ("gpt2", "gpt22")),
    "no type": Case("TODO-1-", ("model_type: gpt2, ", "")),
    "a misspelt setting": Case("TODO-2-", ("n_layer", "n_layers")),
    "a text for a number": Case("TODO-3-", ("n_layer: 1", "n_layer: one")),
    "heads that do not divide": Case("TODO-4-", ("n_head: 1", "n_head: 3")),
    "a setting that would run wrongly": Case("TODO-5-", (GPT2, LLAMA)),
    "a vocabulary too small for the tokenizer": Case("TODO-6-", ("n_head: 1", "n_head: 1, vocab_size: 100")),
    "a task that it cannot do": Case("TODO-7-", overrides=["model.task=seq2seq"]),
    "an unknown task": Case("TODO-8-", overrides=["model.task=translation"]),
    "name and config": Case("TODO-9-", overrides=["model.name=gpt2"]),
    "neither name nor config": Case("TODO-10-", overrides=["model.config=null", "model.tokenizer=null"]),
    "a folder that there is not": Case("TODO-11-", overrides=["model.config=null", "model.name=./saved"]),
    "a hub that cannot be reached": Case("TODO-12-", overrides=["model.config=null", "model.name=my/model"]),
    "a tokenizer that there is not": Case("TODO-13-", overrides=["model.tokenizer=./tokenizer"]),
    "sequences longer than its positions": Case("TODO-14-", overrides=["data.max_length=64"]),
    "outputs longer than its positions": Case(
        "TODO-15-", overrides=[*EVALUATED, "predict.generation.max_new_tokens=30"]
    ),
    "saved without a config": Case("TODO-16-", saved={"model.safetensors": b""}, overrides=NAMED),
    "saved with a config that is no JSON": Case("TODO-17-", saved={"config.json": "{model_type"}, overrides=NAMED),
    "saved with a config that is a list": Case("TODO-18-", saved={"config.json": "[]"}, overrides=NAMED),
    "saved without weights": Case("TODO-19-", saved={"config.json": CONFIG}, overrides=NAMED),
    "saved as a pickle": Case("TODO-20-", saved={"config.json": CONFIG, "pytorch_model.bin": b"PK"}, overrides=NAMED),
    "saved with weights cut off": Case(
        "TODO-21-", saved={"config.json": CONFIG, "model.safetensors": b"\x10\0\0\0\0\0\0\0{"}, overrides=NAMED
    ),
    "saved with a shard missing": Case(
        "TODO-22-",
        saved={"config.json": CONFIG, "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}'},
        overrides=NAMED,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_refused(folder, name: str) -> None:
    case = CASES[name]
    old, new = case.config
    assert old in RECIPE
    folder.write(recipe__yaml=RECIPE.replace(old, new) if old else RECIPE, train__jsonl='{"text": "hello"}\n' * 4)
    for file, content in case.saved.items():
        folder.write(**{f"saved___{file.replace('.', '__')}": content})
    for command in ("validate", "train"):
        assert folder.refused(command, "recipe.yaml", *case.overrides) == case.error
