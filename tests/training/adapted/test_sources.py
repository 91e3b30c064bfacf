"""Runs that begin with an adapter which is there already, and predictions with one that was never trained here."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from redco_cli import export, load_model
from redco_cli.errors import ModelError, RecipeError, StorageError
from redco_cli.run import evaluate, predict, train, validate
from tests.training.adapted.test_runs import CUBE, RECIPE, SIZES, project
from tests.training.tiny import final_state

__all__ = ["project"]
SOURCE = ["adapter={rank: 2, alpha: 6, targets: ['.*/(q|v)/kernel']}", "train.steps=3", "output_dir=source"]
STILL = ["train.learning_rate=0.0", "train.steps=2"]
pytestmark = pytest.mark.slow


def values(run, step):
    return {name: one for name, one in final_state(run, step).items() if name.startswith("['params']['adapter']")}


def begin(source, **others):
    """The recipe, with an adapter that begins there."""
    text = RECIPE.replace("adapter: {rank: 4}", f"adapter: {{from: {source}}}").replace("output_dir: run", "")
    for key, value in others.items():
        text = text.replace(f"model: {{{key}: base", f"model: {{{key}: {value}")
    Path("next.yaml").write_text(f"{text}\noutput_dir: next\n")


def write_base(name, seed, **settings):
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=260, eos_token_id=257, **settings)
    LlamaForCausalLM(config).save_pretrained(name)


def test_a_run_goes_on_with_the_adapter_of_another_on_another_mesh_and_pins_it():
    train("recipe.yaml", SOURCE)
    begin("source")
    train("next.yaml", [*STILL, CUBE])
    expected = values("source", 3)
    assert values("next", 2).keys() == expected.keys()
    for name, one in values("next", 2).items():
        np.testing.assert_array_equal(one, expected[name])
    said = json.loads(Path("next/checkpoint-2/meta/metadata").read_text())["recipe"]["adapter"]
    assert said["from"] == str(Path("source/checkpoint-3").absolute())
    assert (said["rank"], said["alpha"], said["targets"]) == (2, 6.0, [".*/(q|v)/kernel"])
    train("recipe.yaml", [*SOURCE, "train.steps=4", "checkpoint.keep=9"])
    again = ["train.learning_rate=0.0", "train.steps=4", CUBE]
    assert train("next.yaml", again).step == 4  # of that run there is a newer checkpoint now
    with pytest.raises(RecipeError, match=r"adapter.from: .*checkpoint-4', but checkpoint-4 was trained with"):
        train("next.yaml", [*again, "adapter.from=source/checkpoint-4", "train.steps=6"])
    shutil.rmtree("source")
    with pytest.raises(StorageError, match=r"next.yaml:\d+: adapter.from: source is no directory\n.*OUTPUT_DIR"):
        train("next.yaml", [*again, "train.steps=6"])
    assert train("next", [*again[:1], "train.steps=6"]).step == 6
    Path("elsewhere").mkdir()
    Path("next").rename("elsewhere/next")
    assert len(predict("elsewhere/next", output="a.jsonl").read_text().splitlines()) == 7


def test_an_adapter_of_another_base_is_refused():
    train("recipe.yaml", SOURCE)
    write_base("other", 1)
    begin("source", name="other")
    text = (
        r"next.yaml:\d+: adapter.from: the adapter in source/checkpoint-3 was trained for a model with other parameters"
    )
    with pytest.raises(ModelError, match=text):
        train("next.yaml", STILL)
    with pytest.raises(ModelError, match=text):
        predict("next.yaml", output="a.jsonl")
    with pytest.raises(ModelError, match=r"adapter='source': the adapter in source/checkpoint-3 was trained for"):
        load_model("other", adapter="source")
    merged, own = load_model("base", adapter="source")[1], load_model("source")[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), merged, own)
    with pytest.raises(
        StorageError, match=r"adapter='base': is neither a directory of PEFT's files, or of diffusers', nor a run"
    ):
        load_model("base", adapter="base")


def test_peft_files_go_in_are_trained_and_go_out(tmp_path):
    train("recipe.yaml", [*SOURCE, "adapter.type=dora"])
    export("source", output="peft", adapter=True)
    begin("peft")
    validate("next.yaml", ["adapter.rank=2"])
    with pytest.raises(RecipeError, match=r"adapter.rank: 4 given, but peft/adapter_config.json: r says 2"):
        validate("next.yaml", ["adapter.rank=4"])
    one, other = (evaluate(name).values["loss"] for name in ("next.yaml", "source"))
    assert one == pytest.approx(other, rel=1e-5)
    train("next.yaml", ["train.steps=3"])
    shutil.rmtree("peft")
    with pytest.raises(RecipeError, match=r"adapter.from: .* holds an adapter of its own\n.*leave it out"):
        predict("next", ["adapter.from=source"], output="a.jsonl")
    train("next", ["train.steps=6"])
    export("next", output="out", adapter=True)
    trained, read = load_model("next")[1], load_model("base", adapter="out")[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), trained, read)
    assert evaluate("next").values["loss"] < one


def test_an_adapter_is_used_on_a_run_that_trained_all_parameters():
    train("recipe.yaml", ["adapter=null", "train.steps=2", "output_dir=whole"])
    train("recipe.yaml", [*SOURCE, "model.params=whole"])
    expected = predict("source", output="a.jsonl").read_text()
    assert predict("whole", ["adapter.from=source"], output="b.jsonl").read_text() == expected
    assert evaluate("whole", ["adapter.from=source"]).values == evaluate("source").values
    assert evaluate("whole").values != evaluate("source").values


@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embedding_are_trained_and_written(tied):
    write_base("base", 0, tie_word_embeddings=tied)
    whole = "[embedding]" if tied else "[head]"
    targets = "['.*/q/kernel']" if tied else "['.*/q/kernel', embedding]"
    train("recipe.yaml", [f"adapter={{rank: 2, targets: {targets}, modules_to_save: {whole}}}", "train.steps=3"])
    export("run", output="out", adapter=True)
    trained, read = load_model("run")[1], load_model("base", adapter="out")[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), trained, read)
