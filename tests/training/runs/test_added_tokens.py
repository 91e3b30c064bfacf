"""A saved model that is trained on a chat format it did not know: template and tokens from the recipe, to the export."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from redco_cli import load_model
from redco_cli.errors import RedcoError
from redco_cli.planning.inspect import inspect_sharding
from redco_cli.run import evaluate, predict, train, validate
from redco_cli.trained import export
from tests.models.weights.test_added import save_tokenizer
from tests.training.tiny import assert_same_run, interrupted

TEMPLATE = """{% for message in messages -%}
<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}
"""
RECIPE = """
model: {name: base, chat_template: chat.jinja, added_tokens: [<|im_start|>, <|im_end|>, <|tool|>]}
data:
  train: {path: json, data_files: train.jsonl}
  eval: 10%
  max_length: 24
plugin: {module: instruct}
train: {global_batch_size: 8, micro_batch_size: 8, steps: 4, learning_rate: 1e-2}
predict: {generation: {max_new_tokens: 2}}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", 40)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w1", "eos_token": "w2"}
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [{"prompt": f"w{3 + i % 30} w7", "response": f"w{4 + i % 30} w8"} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_from_the_recipe_to_the_export(project: Path) -> None:
    train("recipe.yaml", ["output_dir=whole"])
    interrupted(2)
    train("recipe.yaml")
    assert_same_run("run", "whole", 4)
    (project / "chat.jinja").rename(project / "moved.jinja")
    evaluate("run")
    assert len(predict("run").read_text().splitlines()) == 6
    model, params = load_model("run")
    assert model.config.vocab_size == params["embedding"].shape[0] == 43
    export("run", output="out")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "w3 w7"}], add_generation_prompt=True)
    assert ids.count(40) == 2
    assert ids.count(41) == 1
    exported = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert exported.config.vocab_size == 43
    wanted = exported(torch.tensor([ids])).logits.detach().numpy()
    np.testing.assert_allclose(model(params, np.array([ids])), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("mesh", ["{data: 2, fsdp: 2, tensor: 2}", "{fsdp: 8}"])
def test_a_vocabulary_that_no_mesh_divides(mesh: str) -> None:
    one = train("recipe.yaml", ["output_dir=one"]).evaluations
    many = train("recipe.yaml", ["output_dir=many", f"mesh={mesh}"]).evaluations
    assert many[-1][1]["loss"] == pytest.approx(one[-1][1]["loss"], rel=1e-5)


@pytest.mark.slow
def test_what_changes_is_refused_by_name(project: Path) -> None:
    assert "[43, 16]" in json.dumps(inspect_sharding("recipe.yaml", devices=1))
    interrupted(1, "train.steps=2")
    (project / "chat.jinja").write_text(TEMPLATE.replace("im_start", "tool"))
    with pytest.raises(RedcoError) as caught:
        validate("recipe.yaml", ["train.steps=2", "model.added_tokens=[<|im_start|>, <|im_end|>]"])
    said = str(caught.value)
    assert "recipe.yaml:2: model.chat_template: '{% for message in messages -%}\\n<|tool|> '..., but checkpoint-1 was" in said
    assert "command line: model.added_tokens: ['<|im_start|>', '<|im_end|>'], but checkpoint-1 was trained with" in said
