"""What a base is kept as, and what an adapter began with, where they meet other runs, other meshes and generation."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from redco_cli import load_model
from redco_cli.errors import ModelError, RecipeError
from redco_cli.run import predict, train, validate
from redco_cli.trained import export
from tests.training.adapted.test_quantized import CUBE, LLAMA, losses, project
from tests.training.tiny import final_state

__all__ = ["project"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHORT = ["train.steps=2", "eval.every=2"]
RANDOM = f"model={json.dumps({'name': None, 'config': {'model_type': 'llama', **LLAMA}, 'tokenizer': 'byte'})}"


def begin(source, quantize, *given):
    train("recipe.yaml", [f"adapter={{from: {source}, quantize: {quantize}}}", *SHORT, *given])


def test_an_adapter_goes_on_beside_codes_or_weights_of_the_same_model(capsys):
    train("recipe.yaml", [*SHORT, "output_dir=codes"])
    train("recipe.yaml", [*SHORT, "adapter.quantize=null", "output_dir=plain"])
    capsys.readouterr()
    begin("codes", "nf4", CUBE, "output_dir=next")
    assert "is not known" not in capsys.readouterr().err
    for source, quantize in (("plain", "nf4"), ("codes", "int8"), ("codes", "null")):
        begin(source, quantize, f"output_dir={source}-{quantize}")
        said = " ".join(capsys.readouterr().err.split())
        assert f"whether {source}/checkpoint-2 was trained for this model is not known" in said
    load_model("base", adapter="codes")
    assert "whether codes/checkpoint-2 was trained for this model is not known" in " ".join(
        capsys.readouterr().err.split()
    )
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA)).save_pretrained("base")
    with pytest.raises(ModelError, match="the adapter in codes/checkpoint-2 was trained for a model with other"):
        begin("codes", "nf4", "output_dir=other")


def test_random_numbers_in_codes_are_written_once_and_go_on_on_another_mesh():
    train("recipe.yaml", [RANDOM, "output_dir=whole"])
    train("recipe.yaml", [RANDOM, "train.steps=3"])
    written = Path("run/base/manifest.json").stat().st_mtime_ns
    assert (
        sum(path.stat().st_size for path in Path("run/base").rglob("*") if path.is_file()) < 600_000
    )  # 1.4 MB in float32
    train("recipe.yaml", [RANDOM, CUBE])
    assert Path("run/base/manifest.json").stat().st_mtime_ns == written
    np.testing.assert_allclose(losses("run"), losses("whole"), rtol=1e-5)
    one, other = (predict(run, output=f"{run}.jsonl").read_text() for run in ("run", "whole"))
    assert one == other
    shutil.rmtree("whole")
    with pytest.raises(RecipeError, match=r"adapter\.quantize"):
        train("recipe.yaml", [RANDOM, "adapter.quantize=null", "train.steps=8"])


def test_a_path_that_began_with_weights_goes_on_beside_weights_only():
    train("recipe.yaml", [*SHORT, "adapter={quantize: null, init: pissa}", "output_dir=source"])
    begin("source", "null", CUBE, "train.learning_rate=0.0", "output_dir=next")
    expected = final_state("source", 2)
    for name, one in final_state("next", 2).items():
        if name.startswith("['params']"):
            np.testing.assert_array_equal(one, expected[name])
    for key, given in (("quantize", "quantize: nf4"), ("dropout", "quantize: null, dropout: 0.1")):
        said = rf"adapter.{key}: source/checkpoint-2 says init: pissa: .*\n.*redco export RUN --output DIR --adapter"
        with pytest.raises(RecipeError, match=said):
            validate("recipe.yaml", [f"adapter={{from: source, {given}}}"])
    with pytest.raises(RecipeError, match=r"adapter.init: 'default' given, but source.checkpoint-2: adapter.init says"):
        validate("recipe.yaml", ["adapter={from: source, quantize: null, init: default}"])
    export("source", output="plain", adapter=True)
    begin("plain", "nf4", "adapter.rank=8", "output_dir=codes")
    with pytest.raises(RecipeError, match=r"adapter.init: 'pissa' given, but plain/adapter_config.json"):
        validate("recipe.yaml", ["adapter={from: plain, rank: 8, quantize: null, init: pissa}"])


@pytest.mark.parametrize("given", ["quantize: null", "quantize: null, init: pissa", "quantize: nf4"])
def test_every_mesh_generates_the_same(given):
    train("recipe.yaml", [*SHORT, f"adapter={{type: dora, {given}}}"])
    generation = "predict.generation={max_new_tokens: 8}"
    one, cube = (
        predict("run", [mesh, generation], output="out.jsonl").read_text() for mesh in ("mesh={data: 1}", CUBE)
    )
    assert one == cube
