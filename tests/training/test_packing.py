"""Texts that share a row: the loss and gradient of each text alone, whatever attention; and runs that pack."""

import functools
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli import predict, train
from redco_cli.data.encoded import parallel
from redco_cli.data.encoded.child import Child
from redco_cli.data.encoded.encode import encoded_once
from redco_cli.data.encoded.outcome import outcome_of, same_outcome
from redco_cli.data.encoded.parallel import Others
from redco_cli.data.encoded.rows import Rows
from redco_cli.errors import RedcoError
from redco_cli.job import prepare
from redco_cli.models.config.tokenizer import admit_tokenizer
from redco_cli.models.decoder.model import build_decoder
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.encoder import Encoder
from redco_cli.plugin.parts import stack_rows
from redco_cli.recipe.load import load_recipe
from redco_cli.run import validate
from redco_cli.training.records.metrics import read_records
from tests.models.decoder.pairs import abstract_decoder, hf_config
from tests.training.tiny import assert_same_run, final_state, interrupted

LENGTHS = (9, 3, 14, 1, 6, 11, 2, 7)
KINDS = {
    "bloom": {},
    "gemma2": {"sliding_window": 4},
    "llama": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
    "opt": {},
    "gpt2": {},
    "mistral": {"sliding_window": 3},
    "mixtral": {},
}
"""A kind of position, window or cap of attention each."""
RECIPE = """
model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2}, task: causal_lm, tokenizer: byte}
data:
  train: {path: json, data_files: train.jsonl}
  eval: {path: json, data_files: train.jsonl, limit: 7}
  max_length: 16
plugin: {module: causal_lm}
train: {global_batch_size: 8, micro_batch_size: 8, steps: 4, learning_rate: 1e-2}
eval: {every: 2, predict: true}
predict: {generation: {max_new_tokens: 2}}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A recipe with 40 texts of 1 to 18 tokens."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    texts = [{"text": "xyz"[number % 3] * (number * 7 % 18)} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_texts_in_a_row_teach_what_they_teach_alone(family):
    module, abstract = abstract_decoder(hf_config(family, **KINDS[family]))
    model = build_decoder(
        module.config, config=None, dtype="float32", generation_config=None, where="here", kernel="plain"
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype), abstract)
    texts = [{"ids": rng.integers(24, 60, length)} for length in LENGTHS]
    ctx = SimpleNamespace(
        stage="train",
        length=16,
        tokenizer=SimpleNamespace(pad_token_id=3),
        recipe=SimpleNamespace(data=SimpleNamespace(max_length=16)),
    )

    def encode(example):
        ids = example["ids"].astype(np.int32)
        weights = (1 + ids % 3).astype(np.float32) / 2
        return {
            "input_ids": ids,
            "labels": np.where(ids % 4, ids, IGNORED_LABEL).astype(np.int32),
            "weights": weights,
        }

    def result(packed):
        encoded = encoded_once(encode, texts, measure="input_ids", where="p.py", kept_at=None, done=lambda *_: None)
        rows = Rows(encoded, 16, "truncate", packed=packed, ignored=IGNORED_LABEL)
        batch = stack_rows(ctx, list(rows))

        def loss(params):
            found = model.next_token_loss(params, **batch)
            return found.sum, (found.weight, found.metrics["accuracy"])

        return len(rows), *jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (few, one, one_gradient), (many, other, other_gradient) = result(True), result(False)
    assert (few, many) == (4, 8)
    assert one[1] == other[1]
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), one_gradient, other_gradient)


@pytest.mark.usefixtures("project")
def test_rows_are_counted_before_a_run():
    document, sequences = validate("recipe.yaml")
    found = document["encoded"]["train"]
    assert document["examples"] == {"train": 40, "eval": 7}
    assert found["packed"]
    assert 21 <= found["rows"] <= 24
    assert found["filled"] > 0.9
    assert found["tokens"] == {"least": 1, "quarter": 4, "median": 9, "three quarters": 14, "95 %": 17, "most": 18}
    assert "segment_ids int32[8, 16]" in document["batch"]
    assert [one.title for one in sequences] == ["training example 1", "training example 2"]


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_packed_run_has_the_losses_of_its_texts(capfd):
    outcome = train("recipe.yaml", ["train.steps=1 epoch"])
    assert outcome.step == 3
    assert "longer than data.max_length 16, and cut" in capfd.readouterr().err
    alone = train("recipe.yaml", ["data.packing=false", "train.steps=1", "output_dir=alone", "train.learning_rate=0"])
    first = train("recipe.yaml", ["train.steps=1", "output_dir=first", "train.learning_rate=0"])
    assert first.evaluations[-1][1] == pytest.approx(alone.evaluations[-1][1], rel=1e-6)
    assert len(predict("run").read_text().splitlines()) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_packed_run_is_continued_exactly():
    train("recipe.yaml", ["output_dir=whole", "checkpoint.every=1"])
    train("recipe.yaml", ["train.steps=2", "train.schedule=constant", "output_dir=part"])
    train("recipe.yaml", ["train.steps=4", "train.schedule=constant", "output_dir=part"])
    train("recipe.yaml", ["train.steps=4", "train.schedule=constant", "output_dir=once"])
    part, once = final_state("part", 4), final_state("once", 4)
    assert part.keys() == once.keys()
    for name, value in once.items():
        np.testing.assert_array_equal(part[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_any_mesh_gives_what_one_device_gives():
    expected = [record["loss"] for record in train_records("one", "{data: 1}")]
    for name, mesh in {
        "data": "{data: 8}",
        "cube": "{data: 2, fsdp: 2, tensor: 2}",
        "fsdp": "{fsdp: 4, data: 2}",
    }.items():
        found = [record["loss"] for record in train_records(name, mesh)]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def train_records(name, mesh):
    train("recipe.yaml", [f"output_dir={name}", f"mesh={mesh}"])
    return [record for record in read_records(Path(name, "metrics.jsonl")) if record["kind"] == "train"]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["plugin.module=python_source", "data.packing=true"],
            "data.packing: True given, but SHIPPED/plugins/python_source.py has no encode_fn, and pads and cuts by ",
        ),
        (["plugin.module=python_source", "data.overflow=drop"], "data.overflow: drop given, but "),
        (
            ["model.implementation=hf_flax", "data.packing=true"],
            "data.packing: true given, but a model takes no segment_ids: texts in a row would see each other",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(overrides, message):
    with pytest.raises(RedcoError) as caught:
        validate("recipe.yaml", overrides)
    start, _, rest = message.partition("SHIPPED")
    assert start in str(caught.value)
    assert rest in str(caught.value)


def own_plugin(body, loss="ctx.model.next_token_loss(params, **batch, rng=rng, train=train)"):
    Path("own.py").write_text(f"""
import pathlib

def encode_fn(ctx, example):
    ids = list(example["text"].encode())
    {body}

def loss_fn(ctx, params, batch, rng, train):
    return {loss}
""")
    return ["plugin.module=own.py", "eval={every: null, predict: false}"]


@pytest.mark.usefixtures("project")
def test_a_loss_that_would_let_texts_see_each_other_is_refused():
    given = own_plugin(
        'return {"input_ids": ids}', 'ctx.model.next_token_loss(params, batch["input_ids"], labels=batch["labels"])'
    )
    with pytest.raises(RedcoError, match="no call of the model has segment_ids: they would see each other"):
        validate("recipe.yaml", given)
    assert not validate("recipe.yaml", [*given, "data.packing=false"])[0]["encoded"]["train"]["packed"]


@pytest.mark.usefixtures("project")
def test_rows_may_be_longer_than_a_model_has_positions_but_texts_may_not():
    given = ["data.max_length=32", "eval={every: null, predict: false}"]
    for positions in (18, 8):
        config = f"{{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: {positions}}}"
        Path("recipe.yaml").write_text(re.sub(r"{model_type: llama.*?}", config, RECIPE, flags=re.DOTALL))
        if positions == 18:
            assert validate("recipe.yaml", given)[0]["encoded"]["train"]["packed"]
    with pytest.raises(RedcoError, match="has texts of 18 tokens, but the model has positions for 8"):
        validate("recipe.yaml", given)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("split", ["train", "eval"])
def test_data_of_which_nothing_is_left_are_refused(split):
    Path("long.jsonl").write_text(json.dumps({"text": "x" * 40}) + "\n")
    with pytest.raises(RedcoError) as caught:
        validate("recipe.yaml", ["data.overflow=drop", f"data.{split}.data_files=long.jsonl"])
    text = "nothing is left of it: 1 of 1 rows longer than data.max_length 16, and left out; 1 without a token that"
    assert f"data.{split}: {text}" in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_an_example_that_is_left_out_is_counted():
    given = own_plugin('return {"input_ids": ids} if len(ids) > 2 else None')
    rows = validate("recipe.yaml", given)[0]["rows"]["train"]
    assert rows["left out by encode_fn"]["rows"] == 7
    assert train("recipe.yaml", [*given, "train.steps=2"]).step == 2


def encoders():
    """An encode_fn that reads all that it is told, and the examples of its recipe."""
    Path("near.py").write_text("FIRST = 7")
    given = own_plugin(
        """bridge = sys.modules.get("jax._src.xla_bridge")
    found = [near.FIRST, ctx.options["extra"], ctx.model.config.hidden_size, len(ctx.tokenizer) - 1, *ids]
    return {"input_ids": found, "backends": [len(bridge._backends)] * len(found)}""",
        "ctx.model.next_token_loss(params, **{n: v for n, v in batch.items() if n != 'backends'})",
    )
    Path("own.py").write_text("import sys\nimport near\n" + Path("own.py").read_text())
    job = prepare(load_recipe("recipe.yaml", [*given, "plugin.options.extra=5"]), stages=["train"])
    return Encoder(job.plugin, job.context("train"), admit_tokenizer), list(job.train_examples)


@pytest.mark.usefixtures("project")
def test_an_encode_fn_is_loaded_again_from_its_file():
    encoder, examples = encoders()
    again = pickle.loads(pickle.dumps(encoder))
    assert again.plugin.encode_fn is not encoder.plugin.encode_fn
    assert again.ctx.options == {"extra": 5}
    assert all(same_outcome(outcome_of(again, one), outcome_of(encoder, one)) for one in examples)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_an_encode_fn_in_another_process_takes_no_device():
    encoder, examples = encoders()
    child = Child()
    child.give(pickle.dumps(encoder))
    found = child.encoded(examples)
    child.kill()
    child.close()
    for (text, _), example in zip(found, examples, strict=True):
        expected = encoder(example)
        assert text["input_ids"].tolist() == expected["input_ids"].tolist()
        assert not text["backends"].any()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_several_processes_keep_what_one_would(monkeypatch):
    lines = [{"text": "xyz"[number % 3] * (number * 7 % 18)} for number in range(6_000)]
    Path("train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = own_plugin('time.sleep(0.001)\n    return {"input_ids": ids}')
    Path("own.py").write_text("import time\n" + Path("own.py").read_text())
    rows, begun = [], []
    monkeypatch.setattr(parallel, "_EACH", 0.5)
    monkeypatch.setattr(parallel, "Child", lambda: begun.append(Child()) or begun[-1])
    for worth in (1e9, 0.0):
        monkeypatch.setenv("REDCO_CACHE", f"cache-{worth}/compiled")
        monkeypatch.setattr(Others, "__init__", functools.partialmethod(Others.__init__, worth=worth))
        job = prepare(load_recipe("recipe.yaml", given), stages=["train"])
        rows.append(job.train_rows)
    one, other = (Path(f"cache-{worth}/encoded") for worth in (1e9, 0.0))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in files)
    assert rows[0].digest == rows[1].digest
    assert len(begun) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_other_tokens_of_the_same_data_are_refused():
    """Whatever they are due to: here a file that the plugin reads."""
    Path("first.txt").write_text("a")
    given = own_plugin('return {"input_ids": [*pathlib.Path("first.txt").read_bytes(), *ids]}')
    train("recipe.yaml", [*given, "train.steps=2", "train.schedule=constant"])
    Path("first.txt").write_text("b")
    longer = [*given, "train.steps=3", "train.schedule=constant"]
    with pytest.raises(RedcoError, match=r"trained with other data: data\.train: tokens differs"):
        train("recipe.yaml", longer)
    assert train("recipe.yaml", [*longer, "checkpoint.accept=data"]).step == 3


STREAM = """
class Restarting:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 110:
            self.at += 1
            yield {"text": "abcdefg"[self.at % 7] * (1 + self.at * 7 % 18)}


class Stateful(Restarting):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Afresh:
    def __iter__(self):
        return iter(Restarting())


def load_examples(ctx, split):
    return (Stateful if ctx.options.get("state") else Afresh)() if split == "train" else None
"""


def streamed(source):
    """Overrides that stream the texts: of files, or of a plugin with or without a state."""
    given = ["data.shuffle_buffer=15", "train.global_batch_size=2", "train.micro_batch_size=2", "train.steps=20"]
    given += ["eval.every=null", "eval.predict=false", "data.eval=null"]
    if source == "files":
        return [*given, "data.streaming=true"]
    own = own_plugin('return {"input_ids": ids}')
    with Path("own.py").open("a") as file:
        file.write(STREAM)
    return [*own, *given, "data.train=null", f"plugin.options.state={json.dumps(source == 'state')}"]


@pytest.mark.usefixtures("project")
@pytest.mark.slow
@pytest.mark.parametrize("source", ["files", "state", "no state"])
def test_a_packed_stream_is_continued_exactly(source, capfd):
    """Stopped by a signal in the middle of a window, in the first epoch and in a later one."""
    given = streamed(source)
    train("recipe.yaml", ["output_dir=whole", *given])
    assert "longer than data.max_length 16, and cut" in capfd.readouterr().err
    for step in [14] if source == "files" else [5, 14]:
        interrupted(step, *given)
        place = json.loads(Path(f"run/checkpoint-{step}/meta/metadata").read_text())["data"]
        assert place["epoch"] * 30 + place["given"] > step
    train("recipe.yaml", given)
    assert_same_run("run", "whole", 20)


@pytest.mark.usefixtures("project")
def test_a_stream_is_looked_at_before_a_run():
    given = streamed("files")
    document, _ = validate("recipe.yaml", given)
    found = document["encoded"]["train"]
    assert found["of the first"] == 40
    assert found["packed"]
    assert found["tokens"]["most"] == 18
    assert found["filled"] > 0.9
    assert "segment_ids int32[2, 16]" in document["batch"]


@pytest.mark.usefixtures("project")
def test_a_model_that_cannot_is_not_packed():
    found = validate("recipe.yaml", ["model.implementation=hf_flax"])[0]["encoded"]["train"]
    assert not found["packed"]
    assert found["rows"] == 40
