"""Predictions of a model that generates: samples, log-probabilities and stop strings, from the recipe to the file."""

import json

import pytest
import yaml

from redco_cli.models.config.byte_tokenizer import BOS, EOS, PAD, VOCAB_SIZE
from redco_cli.run import predict
from tests.models.flax.tiny import config_for, save_torch

IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
DRAWN = {"do_sample": True, "num_samples": 2, "min_p": 0.01, "repetition_penalty": 1.2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "plugin", "settings"),
    [
        ("llama", "causal_lm", {**DRAWN, "log_probs": True, "stop_strings": ["\n", "zz"]}),
        ("t5", "seq2seq", {"num_beams": 3, "num_samples": 2}),
        ("bart", "seq2seq", {"log_probs": True}),
    ],
)
def test_a_predictions_file_holds_what_the_recipe_asks_for(model_type, plugin, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = "causal_lm" if plugin == "causal_lm" else "seq2seq"
    save_torch(config_for(model_type, task, **IDS), task, tmp_path / "model")
    recipe = {
        "model": {"name": "./model", "task": task, "tokenizer": "byte"},
        "data": {"max_length": 12},
        "plugin": {"module": plugin},
        "predict": {"generation": {"max_new_tokens": 4, **settings}},
        "output_dir": "run",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    column = "prompt" if plugin == "causal_lm" else "source"
    file = predict("recipe.yaml", input=[{column: text} for text in ("one", "two words", "3")])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    for line in lines:
        samples = line["prediction"] if settings.get("num_samples", 1) > 1 else [line["prediction"]]
        assert len(samples) == settings.get("num_samples", 1)
        for sample in samples:
            if not settings.get("log_probs"):
                assert isinstance(sample, str)
                continue
            assert sample.keys() == {"text", "log_probs"}
            assert 1 <= len(sample["log_probs"]) <= 4
            assert all(value <= 0 for value in sample["log_probs"])
