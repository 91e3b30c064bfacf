"""Predictions with a model alone: no recipe and no run, but a directory that `save_pretrained` wrote, or a hub id."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.errors import ModelError, RedcoError, UsageError
from redco_cli.prediction.target import load_target
from redco_cli.run import predict, predict_examples

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 96,
}
CLASSIFIES = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 64}
BYTES = "model.tokenizer=byte"


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a config of a model without weights to `small`."""
    monkeypatch.chdir(tmp_path)

    def write(config: dict[str, Any]) -> str:
        Path("small").mkdir()
        Path("small/config.json").write_text(json.dumps(config))
        return "small"

    return write


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (LLAMA, [], ("causal_lm", 96 - 64, "runs/predict/small")),
        (LLAMA, ["predict.generation.max_new_tokens=6"], ("causal_lm", 90, "runs/predict/small")),
        (LLAMA, ["plugin.module=instruct", "data.max_length=7", "output_dir=o"], ("instruct", 7, "o")),
        (CLASSIFIES, [], ("text_classification", 96, "runs/predict/small")),
        (T5, [], ("seq2seq", 512, "runs/predict/small")),
        (BERT, ["plugin.module=mine.py"], ("mine.py", 64, "runs/predict/small")),
    ],
)
def test_the_plugin_and_the_length_fit_the_model(
    saved: Any, config: dict[str, Any], overrides: list[str], expected: tuple[str, int, str]
) -> None:
    loaded, directory = load_target(saved(config), overrides)
    recipe = loaded.recipe
    assert (recipe.plugin.module, recipe.data.max_length, recipe.output_dir) == expected
    assert (recipe.model.name, directory) == ("small", Path(expected[2]))


def test_what_the_environment_says_counts(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDCO_DATA__MAX_LENGTH", "9")
    monkeypatch.setenv("REDCO_PLUGIN__MODULE", "instruct")
    recipe = load_target(saved(LLAMA))[0].recipe
    assert (recipe.data.max_length, recipe.plugin.module) == (9, "instruct")


def refusal(*arguments: Any) -> str:
    with pytest.raises(RedcoError) as caught:
        load_target(*arguments)
    assert isinstance(caught.value, UsageError | ModelError)
    return str(caught.value)


def test_what_cannot_be_predicted_with_is_refused(saved: Any) -> None:
    saved(BERT)
    assert "small is a masked_lm model" in refusal("small")
    assert "small is the model already" in refusal("small", ["model.name=other"])
    Path("run/checkpoint-3").mkdir(parents=True)
    chosen = ["plugin.module=mine.py", "output_dir=run"]
    assert "run holds checkpoints, and their parameters would be those of small" in refusal("small", chosen)
    assert "run: is no run" in refusal("run")
    assert "no such recipe" in refusal("run/quikstart")
    assert "no such recipe" in refusal("quikstart")
    assert "nobody/nothing" in refusal("nobody/nothing")


def test_a_model_without_weights_is_an_error_of_the_command(saved: Any) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    found = CliRunner().invoke(app, ["predict", saved(LLAMA), "--input", "prompts.jsonl", BYTES])
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_pytorch_predicts_alone_and_with_an_adapter_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft, torch, transformers = map(pytest.importorskip, ("peft", "torch", "transformers"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA)).eval()
    for parameter in base.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    base.save_pretrained("base")
    prompts = [{"prompt": "one, two"}, {"prompt": "three"}]
    Path("prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
    short = [BYTES, "predict.generation.max_new_tokens=8", "mesh.data=1", "predict.generation.log_probs=true"]

    def expected(model: Any) -> list[list[float]]:
        found = []
        for one in prompts:
            ids = torch.tensor([list(one["prompt"].encode())])
            with torch.no_grad():
                made = model.generate(
                    input_ids=ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
                )
            logits = torch.stack(made.logits, 1).log_softmax(-1)
            found.append(logits.max(-1).values[0].tolist())
        return found

    def given(lines: list[dict[str, Any]]) -> list[list[float]]:
        return [line["prediction"]["log_probs"] for line in lines]

    alone = predict("base", short, input="prompts.jsonl")
    assert alone == Path("runs/predict/base/predictions/prompts.jsonl")
    lines = [json.loads(line) for line in alone.read_text().splitlines()]
    np.testing.assert_allclose(given(lines), expected(base), atol=1e-4)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear")).eval()
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data += 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained("adapter")
    beside = predict_examples("base", prompts, [*short, "adapter.from=adapter"])
    np.testing.assert_allclose(given(beside), expected(adapted), atol=1e-4)
    assert not np.allclose(given(beside), given(lines), atol=1e-2)
