"""Runs that train an adapter: what is updated, saved and continued, and that meshes and cuts change nothing."""

import json
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from redco_cli import load_model
from redco_cli.adapters.rates import relative_rates
from redco_cli.errors import ModelError, RecipeError, StorageError
from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict, train
from redco_cli.trained import export
from redco_cli.training.records.metrics import read_records
from tests.training.tiny import final_state

CUBE = "mesh={data: 2, fsdp: 2, tensor: 2}"
RECIPE = """
model: {name: base, tokenizer: byte}
adapter: {rank: 4}
data:
  train: {path: json, data_files: train.jsonl}
  eval: {path: json, data_files: train.jsonl, limit: 7}
  max_length: 16
plugin: {module: causal_lm}
train: {global_batch_size: 8, micro_batch_size: 8, steps: 6, learning_rate: 1e-2, schedule: constant, warmup: 0}
eval: {every: 3, predict: false, at_start: false}
predict: {generation: {max_new_tokens: 3}}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A recipe, its data, and the weights of a small Llama as PyTorch saves them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=260, eos_token_id=257)
    LlamaForCausalLM(config).save_pretrained("base")
    Path("recipe.yaml").write_text(RECIPE)
    texts = [{"text": "abcxyz"[number % 6] * (number * 7 % 15 + 2)} for number in range(40)]
    Path("train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return tmp_path


def losses(run):
    return [row["loss"] for row in read_records(Path(run) / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_every_mesh_and_cut_trains_the_same(kind):
    train("recipe.yaml", [f"adapter.type={kind}", "output_dir=one"])
    train("recipe.yaml", [f"adapter.type={kind}", CUBE, "train.micro_batch_size=4", "output_dir=cube"])
    assert losses("one")[0] > losses("one")[-1]
    np.testing.assert_allclose(losses("cube"), losses("one"), rtol=1e-5)
    plan = json.loads(Path("cube/sharding.json").read_text())["parameters"]
    rows = {row["path"]: row["spec"] for row in plan}
    name = "layers/attention/q/kernel"
    assert rows[f"adapter/{name}/A"][-1:] != ["tensor"]
    assert rows[f"adapter/{name}/B"][-1] == "tensor+fsdp"
    assert all(rows[f"adapter/{path}/A"][2:] == [] for path in (name, "layers/mlp/down/kernel"))


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_and_not_its_base():
    train("recipe.yaml", ["adapter={rank: 2, targets: ['.*/(q|v)/kernel']}"])
    parameters = {path for path in final_state("run", 6) if path.startswith("['params']")}
    paths = [f"['params']['adapter']['layers']['attention']['{name}']['kernel']" for name in "qv"]
    assert parameters == {f"{path}['{factor}']" for path in paths for factor in "AB"}
    base = load_model("base")[1]
    params = load_model("run")[1]
    same = jax.tree.map(lambda one, other: bool((one == other).all()), base, params)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): one for path, one in jax.tree.leaves_with_path(same)
    }
    changed = {path for path, one in flat.items() if not one}
    assert changed == {"layers/attention/q/kernel", "layers/attention/v/kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["adapter.dropout=0.3", "adapter.type=dora"])
def test_a_run_that_is_continued_ends_as_if_it_had_not_stopped(setting):
    train("recipe.yaml", [setting, "output_dir=whole"])
    train("recipe.yaml", [setting, "train.steps=3"])
    train("recipe.yaml", [setting])
    assert losses("run") == losses("whole")
    one, other = (predict(run, output=f"{run}.jsonl").read_text() for run in ("run", "whole"))
    assert one == other


@pytest.mark.slow
def test_another_base_is_refused():
    train("recipe.yaml", ["train.steps=3"])
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaForCausalLM.from_pretrained("base").config).save_pretrained("base")
    with pytest.raises(ModelError, match=r"its parameters are not those that .*checkpoint-3 was trained with"):
        train("recipe.yaml")
    with pytest.raises(ModelError, match="its parameters are not those that"):
        predict("run", output="predictions.jsonl")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("adapter.targets=[q_proj]", "'q_proj' matches no parameter path"),
        ("adapter.targets=[mlp]", "did you mean .*mlp.*? it must match whole paths"),
        ("adapter.targets=['.*norm/scale']", "only products with activations and lookups can carry an adapter"),
        ("adapter={type: dora, targets: [embedding]}", "a table of which rows are looked up, which DoRA does not know"),
        ("adapter.rank_pattern={mlp/x: 3}", "adapter.rank_pattern"),
        ("adapter.targets=[]", "an empty list adapts nothing"),
        ("adapter.rank=0", "adapter.rank"),
        ("adapter={rank: 32, init: pissa}", "it has 8 singular values, and rank 32 is asked for"),
        ("adapter={init: pissa, targets: [embedding]}", "a table of which rows are looked up, which PiSSA does not"),
        ("adapter={init: pissa, dropout: 0.1}", "a share of the model's own weights would be dropped"),
        ("adapter.init=olora", "one of default, pissa, pissa_niter_N"),
        ("train.optimizer=adamw8bit", "moments of 8 bits, which no library for JAX that is kept up offers"),
    ],
)
def test_what_cannot_be_adapted_is_refused(override, problem):
    with pytest.raises(RecipeError) as refused:
        train("recipe.yaml", [override])
    assert problem in str(refused.value)


@pytest.mark.slow
def test_a_reference_is_the_model_without_its_adapter():
    plugin = """
from redco_cli.plugin.parts import builtin
base = builtin("causal_lm")
encode_fn, collate_fn, predict_fn, output_fn, Options = (
    base.encode_fn, base.collate_fn, base.predict_fn, base.output_fn, base.Options)
def loss_fn(ctx, params, batch, rng, train):
    own = ctx.model.next_token_loss(params, **batch, rng=rng, train=train)
    other = ctx.model.next_token_loss(ctx.reference(params), **batch, rng=rng, train=train)
    own.metrics["reference"] = other.sum
    return own
"""
    Path("plugin.py").write_text(plugin)
    train("recipe.yaml", ["plugin.module=plugin.py", "data.packing=false", "train.global_batch_size=40"])
    rows = [row for row in read_records(Path("run/metrics.jsonl")) if row["kind"] == "train"]
    np.testing.assert_allclose([row["reference"] for row in rows], rows[0]["reference"], rtol=1e-5)
    assert rows[0]["loss"] == pytest.approx(rows[0]["reference"], rel=1e-6)
    assert rows[-1]["loss"] < rows[-1]["reference"]
    with pytest.raises(Exception, match=r"ctx.reference was called, but the recipe has no adapter"):
        train("recipe.yaml", ["plugin.module=plugin.py", "adapter=null", "output_dir=other"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_path_that_begins_with_its_weights(kind):
    """The same on every mesh and when continued, and for others a plain path of twice the rank."""
    setting = f"adapter={{type: {kind}, rank: 4, init: pissa, base_dtype: float32}}"
    train("recipe.yaml", [setting, "output_dir=whole"])
    train("recipe.yaml", [setting, CUBE, "train.micro_batch_size=4", "output_dir=cube"])
    train("recipe.yaml", [setting, "train.steps=3"])
    train("recipe.yaml", [setting])
    np.testing.assert_allclose(losses("cube"), losses("whole"), rtol=1e-4)
    assert losses("run") == losses("whole")
    kernel = "['params']['adapter']['layers']['attention']['v']['kernel']"
    states = [final_state("run", step) for step in (3, 6)]
    np.testing.assert_array_equal(*(state[f"{kernel}['initial_A']"] for state in states))
    assert np.abs(states[1][f"{kernel}['A']"] - states[1][f"{kernel}['initial_A']"]).max() > 1e-3
    assert not any("opt_state" in path and "initial" in path for path in states[1])
    assert len(predict("cube", output="predictions.jsonl").read_text().splitlines()) == 7
    export("run", output="adapter", adapter=True)
    assert json.loads(Path("adapter/adapter_config.json").read_text())["r"] == 8
    model, params = load_model("run")
    ids = np.arange(24).reshape(2, 12)
    theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "adapter").eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model(params, ids), expected, atol=1e-5)
    base = load_model("base")[1]["layers"]["attention"]["v"]["kernel"]
    assert float(np.abs(params["layers"]["attention"]["v"]["kernel"] - base).max()) > 1e-3


def test_rates_of_their_own_are_those_of_the_recipe_s_optimizer(tiny_project):
    plugin = (tiny_project / "plugin.py").read_text()
    added = "\nimport optax\ndef optimizer_fn(ctx, schedule): return optax.adam(schedule)\n"
    (tiny_project / "plugin.py").write_text(plugin + added)
    with pytest.raises(RecipeError, match=r"plugin.py has an optimizer_fn, which alone says how large its steps are"):
        train("recipe.yaml", ["adapter={rank: 2, lr_ratio: 4}", "train.steps=2", "mesh.data=1"])


def test_which_parameters_have_a_rate_of_their_own():
    recipe = load_recipe(
        "recipe.yaml",
        ["adapter={rank: 2, lr_ratio: 4, targets: [embedding, '.*/q/kernel'], modules_to_save: [head]}"],
    )
    job = prepare(recipe, stages=())
    rates = relative_rates(job.model, job.recipe, job.where, None)
    assert rates == pytest.approx(
        {"adapter/embedding/A": 1e-4, "adapter/embedding/B": 1e-4, "adapter/layers/attention/q/kernel/B": 4}
    )


@pytest.mark.slow
def test_a_base_from_a_run_stays_what_it_was():
    train("recipe.yaml", ["adapter=null", "train.steps=2", "output_dir=source"])
    train("recipe.yaml", ["model.params=source", "train.steps=3"])
    train("recipe.yaml", ["adapter=null", "train.steps=4", "output_dir=source", "checkpoint.keep=9"])
    assert "checkpoint-2" in Path("run/recipe.resolved.yaml").read_text()
    assert len(predict("run", output="a.jsonl").read_text().splitlines()) == 7
    assert train("recipe.yaml", ["model.params=source"]).step == 6
    assert load_model("run", dtype="bfloat16")[1]
    with pytest.raises(StorageError, match="run trained an adapter, and holds no parameters of a model"):
        train("recipe.yaml", ["model.params=run", "adapter=null", "output_dir=third"])


@pytest.mark.slow
def test_a_model_of_a_plugin_is_adapted_under_its_names(tiny_project):
    plugin = (tiny_project / "plugin.py").read_text()
    (tiny_project / "plugin.py").write_text(plugin + NAMED)
    train("recipe.yaml", ["adapter={rank: 2, targets: ['hidden/kernel']}", "train.steps=2", "mesh.data=1"])
    trained = {path for path in final_state("run", 2) if path.startswith("['params']['adapter']")}
    assert trained == {f"['params']['adapter']['hidden']['kernel']['{factor}']" for factor in "AB"}


NAMED = """
_build, _loss, _predict = build_model, loss_fn, predict_fn
def build_model(ctx): return {"model": _build(ctx)}
def loss_fn(ctx, params, *rest): return _loss(ctx, params["model"], *rest)
def predict_fn(ctx, params, *rest): return _predict(ctx, params["model"], *rest)
"""
