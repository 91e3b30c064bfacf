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
    "an unknown type": Case(
        ("recipe.yaml:3: model.config.model_type: 'gpt22' is no model type\n  -> did you mean gpt2?"), ("gpt2", "gpt22")
    ),
    "no type": Case(
        ("recipe.yaml:3: model.config: an inline config needs model_type\n  -> add it, such as model_type: llama"),
        ("model_type: gpt2, ", ""),
    ),
    "a misspelt setting": Case(
        ("recipe.yaml:3: model.config.n_layers: gpt2 has no such setting\n  -> did you mean n_layer?"),
        ("n_layer", "n_layers"),
    ),
    "a text for a number": Case(
        ("recipe.yaml:3: model.config.n_layer: 'one' given, but a number is expected\n  -> its default is 12"),
        ("n_layer: 1", "n_layer: one"),
    ),
    "heads that do not divide": Case(
        ("recipe.yaml:3: model.config.n_head: 3 heads do not divide the hidden size 8\n  -> correct the config"),
        ("n_head: 1", "n_head: 3"),
    ),
    "a setting that would run wrongly": Case(
        (
            "recipe.yaml:3: model.config.rope_scaling: llama with rope_scaling: {'rope_type': 'linear', "
            "'factor': 2.0} would run wrongly: its Flax class does not scale positions\n"
            "  -> choose a model without this setting"
        ),
        (GPT2, LLAMA),
        overrides=["model.implementation=hf_flax"],
    ),
    "a vocabulary too small for the tokenizer": Case(
        (
            "recipe.yaml:3: model.config.vocab_size: the tokenizer has 260 ids, but the model's "
            "vocab_size is 100\n"
            "  -> set vocab_size: 260"
        ),
        ("n_head: 1", "n_head: 1, vocab_size: 100"),
    ),
    "a task that it cannot do": Case(
        ("command line: model.task: gpt2 has no seq2seq head\n  -> it has: causal_lm"), overrides=["model.task=seq2seq"]
    ),
    "an unknown task": Case(
        (
            "command line: model.task: 'translation' given, but one of 'auto', 'causal_lm', 'masked_lm', "
            "'seq2seq', 'sequence_classification', 'token_classification', 'question_answering', "
            "'image_classification', 'vision_to_sequence', 'speech_to_sequence', 'clip' or 'text_encoder' is expected\n"
            "  -> model.task: Which head; `auto` reads it from the config's `architectures`."
        ),
        overrides=["model.task=translation"],
    ),
    "name and config": Case(
        (
            "recipe.yaml:3: model.config: model.name is given too, and the two exclude each other\n"
            "  -> keep name to load weights, or config to start from scratch"
        ),
        overrides=["model.name=gpt2"],
    ),
    "neither name nor config": Case(
        (
            "recipe.yaml:2: model: neither name nor config is given, and SHIPPED/plugins/causal_lm.py "
            "has no build_model\n"
            "  -> name a model, give a config, or define build_model(ctx)"
        ),
        overrides=["model.config=null", "model.tokenizer=null"],
    ),
    "a folder that there is not": Case(
        (
            "command line: model.name: there is no directory ./saved\n"
            "  -> give a directory with config.json, or a hub id such as openai-community/gpt2"
        ),
        overrides=["model.config=null", "model.name=./saved"],
    ),
    "a hub that cannot be reached": Case(
        (
            "command line: model.name: my/model is no local directory, and the hub cannot be reached\n"
            "  -> check the name and the network (and HF_HUB_OFFLINE), or give a local directory"
        ),
        overrides=["model.config=null", "model.name=my/model"],
    ),
    "a tokenizer that there is not": Case(
        ("command line: model.tokenizer: there is no directory ./tokenizer\n  -> check the path"),
        overrides=["model.tokenizer=./tokenizer"],
    ),
    "sequences longer than its positions": Case(
        (
            "recipe.yaml:3: model.config: input_ids has 64 tokens, but the model has positions for 32 "
            "(max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens"
        ),
        overrides=["data.max_length=64", "data.packing=false", "data.buckets=false"],
    ),
    "outputs longer than its positions": Case(
        (
            "recipe.yaml:3: model.config: input_ids has 46 tokens, but the model has positions for 32 "
            "(max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens"
        ),
        overrides=[*EVALUATED, "predict.generation.max_new_tokens=30"],
    ),
    "saved without a config": Case(
        ("command line: model.name: the directory saved has no config.json\n  -> give the directory of a saved model"),
        saved={"model.safetensors": b""},
        overrides=NAMED,
    ),
    "saved with a config that is no JSON": Case(
        (
            "command line: model.name: the config.json of saved cannot be used: It looks like the config "
            "file at 'saved/config.json' is not a valid JSON file.\n"
            "  -> repair the file, or save the model again"
        ),
        saved={"config.json": "{model_type"},
        overrides=NAMED,
    ),
    "saved with a config that is a list": Case(
        (
            "command line: model.name: the config.json of saved cannot be used: list indices must be "
            "integers or slices, not str\n"
            "  -> repair the file, or save the model again"
        ),
        saved={"config.json": "[]"},
        overrides=NAMED,
    ),
    "saved without weights": Case(
        (
            "saved: has no weights\n"
            "  -> it needs model.safetensors, model.safetensors.index.json with its files, or "
            "flax_model.msgpack"
        ),
        saved={"config.json": CONFIG},
        overrides=NAMED,
    ),
    "saved as a pickle": Case(
        (
            "saved: the weights are in PyTorch's pickle format (.bin)\n"
            "  -> convert it once where torch is installed: "
            "AutoModel...from_pretrained(DIR).save_pretrained(DIR) writes safetensors"
        ),
        saved={"config.json": CONFIG, "pytorch_model.bin": b"PK"},
        overrides=NAMED,
    ),
    "saved with weights cut off": Case(
        (
            "saved/model.safetensors: the file is truncated or damaged: Error while deserializing "
            "header: invalid header length\n"
            "  -> download or save the model again"
        ),
        saved={"config.json": CONFIG, "model.safetensors": b"\x10\0\0\0\0\0\0\0{"},
        overrides=NAMED,
    ),
    "saved with a shard missing": Case(
        ("saved/1.safetensors: the file is missing\n  -> download or save the model again"),
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
