"""Memory that runs out: the error says of what it is full, and edits that help by what it says they save."""

import contextlib
import json
import re
from pathlib import Path

import jax
import pytest

from redco_cli.errors import DeviceError, RedcoError
from redco_cli.job import prepare
from redco_cli.planning import out_of_memory
from redco_cli.planning.arguments import parse_bytes
from redco_cli.planning.choice import choose_placement
from redco_cli.planning.out_of_memory import explaining_out_of_memory
from redco_cli.recipe.load import load_recipe
from redco_cli.run import predict, train
from redco_cli.trained import export
from redco_cli.training.records.observer import Observer

RECIPE = """
model:
  implementation: decoder
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 8,
           num_key_value_heads: 8, max_position_embeddings: 64, vocab_size: 264}
  task: causal_lm
  tokenizer: byte
data: {train: {path: json, data_files: train.jsonl}, eval: {path: json, data_files: train.jsonl}, max_length: 24}
plugin: {module: causal_lm}
train: {global_batch_size: 16, micro_batch_size: 16, steps: 3}
mesh: {data: 1}
logging: {plot: false}
output_dir: one
"""
ON_A_GPU = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.\nBufferAssignment OOM Debugging.\n"
)
PLUGIN = """
import jax
import jax.numpy as jnp
import numpy as np
import flax.linen as nn
from redco_cli.plugin.contract import Loss


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="output")(x)


def build_model(ctx):
    return Net()


def load_examples(ctx, split):
    return [{"x": np.ones(3, np.float32)}] * 8


def collate_fn(ctx, examples):
    return {"x": np.stack([e["x"] for e in examples])}


def loss_fn(ctx, params, batch, rng, train):
    y = ctx.model(params, batch["x"])
    return Loss((_large(y) if ctx.options.get("large") else y).sum(), 1)


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"])


def _large(y):
    return jnp.einsum("bi,ijk->bjk", y, jnp.ones((4, 2**19, 2**19))).max((1, 2))
"""
SMALL = """
plugin: {module: plugin.py}
train: {global_batch_size: 8, steps: 1}
mesh: {data: 1}
logging: {plot: false}
output_dir: run
"""
SAVING = re.compile(r"^  -> ([\w.]+): (\S+|\{.+\}) saves about (.+)$", re.MULTILINE)


@pytest.fixture
def small() -> str:
    """A recipe that takes little time; with `plugin.options.large=true`, more memory than there is."""
    Path("plugin.py").write_text(PLUGIN)
    Path("small.yaml").write_text(SMALL)
    return "small.yaml"


def write(directory: Path) -> None:
    (directory / "train.jsonl").write_text(f"{json.dumps({'text': 'abcdef' * 20})}\n" * 40)
    (directory / "recipe.yaml").write_text(RECIPE)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)


def told(reported: str = ON_A_GPU, *overrides: str) -> str:
    """What a training says whose step fails so."""
    job, placement = choose_placement(prepare(load_recipe("recipe.yaml", overrides), stages=("train",)))
    with pytest.raises(DeviceError) as error, explaining_out_of_memory(job, placement, "train"):
        raise jax.errors.JaxRuntimeError(reported)
    return str(error.value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training of the recipe says."""
    directory = tmp_path_factory.mktemp("failing")
    write(directory)
    with contextlib.chdir(directory):
        return told()


def test_the_error_names_what_fills_the_memory_and_what_edits_save(text: str) -> None:
    assert text.startswith(
        "training: the devices ran out of memory: Out of memory while trying to allocate 68719476736 bytes\n"
        "  by plan one device needs "
    )
    held = text.splitlines()[1]
    for kind in (
        "parameters",
        "gradients",
        "optimizer state",
        r"activations of 16 examples of 24 tokens \(remat none\)",
    ):
        assert re.search(rf"{kind} \d", held), kind
    assert "(largest: embedding 66 KiB, head 66 KiB, layers/mlp/down/kernel 32 KiB)" in held
    edits = {key: saved for key, _, saved in SAVING.findall(text)}
    assert {"train.micro_batch_size", "train.remat", "data.max_length", "mesh", "train.optimizer"} >= edits.keys()
    assert {"train.micro_batch_size", "data.max_length", "mesh"} <= edits.keys()
    sizes = [parse_bytes(saved, "saved") for saved in edits.values()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
def test_an_edit_saves_what_is_said(text: str) -> None:
    """The plan of the edited recipe needs less by what the plan of the failing one promised, to the digits shown."""

    def needed(*overrides: str) -> int:
        job, placement = choose_placement(prepare(load_recipe("recipe.yaml", overrides), stages=("train",)))
        return out_of_memory._option(job, placement.plan, reshard_after_forward=False).memory.total

    before, promised = needed(), SAVING.findall(text)
    assert len(promised) >= 3
    for key, value, saved in promised:
        saving = parse_bytes(saved, "saved")
        assert before - needed(f"{key}={value}") == pytest.approx(saving, rel=0.005), key


def test_nothing_that_helps_is_left_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_TRAIN_EDITS", ())
    assert told().endswith("\n  -> take more or larger devices")


def test_a_plan_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no plan")

    monkeypatch.setattr(out_of_memory, "_option", failing)
    assert told().startswith(
        "training: the devices ran out of memory: Out of memory while trying to allocate 68719476736 bytes "
        "(and there is no plan of it: no plan)\n  -> lower train.micro_batch_size"
    )


def test_other_errors_pass() -> None:
    job, placement = choose_placement(prepare(load_recipe("recipe.yaml"), stages=("train",)))
    for error in (jax.errors.JaxRuntimeError("INTERNAL: something"), RedcoError("a", "b"), KeyError("x")):
        with pytest.raises(type(error)) as raised, explaining_out_of_memory(job, placement, "train"):
            raise error
        assert raised.value is error


def test_an_evaluation_that_does_not_fit_names_its_batch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Program` reports it; beside what helps every step."""
    monkeypatch.setattr(out_of_memory, "_TRAIN_EDITS", ())
    job, placement = choose_placement(prepare(load_recipe("recipe.yaml"), stages=("train", "eval")))
    reported = DeviceError("eval step", "too little", "less")
    reported.__cause__ = jax.errors.JaxRuntimeError(ON_A_GPU)
    with pytest.raises(DeviceError) as error, explaining_out_of_memory(job, placement, "train"):
        raise reported
    problem = text.partition("\n  -> ")[0].replace("training:", "eval step:")
    assert str(error.value) == f"{problem}\n  -> eval.batch_size: 8 saves about 32 GiB"


def test_memory_of_the_host_is_another() -> None:
    job, placement = choose_placement(prepare(load_recipe("recipe.yaml"), stages=("train",)))
    with pytest.raises(DeviceError) as error, explaining_out_of_memory(job, placement, "train"):
        raise MemoryError("Unable to allocate 7.28 TiB")
    assert str(error.value) == (
        "host memory: this process ran out of the memory of its machine: Unable to allocate 7.28 TiB\n"
        "  -> lower data.workers (now 2) or train.global_batch_size, or set data.streaming: true to hold less of the "
        "data; or give the process more"
    )


def test_a_step_that_fails_in_a_run(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the runtime reports it: behind the host, when the step's metrics are looked at."""

    def failing(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(ON_A_GPU)

    monkeypatch.setattr(Observer, "see", failing)
    with pytest.raises(DeviceError, match=r"^training: the devices ran out of memory: Out of memory while") as error:
        train(small)
    assert "train.micro_batch_size: 4 saves about " in str(error.value)


def test_a_real_allocation_that_fails(small: str) -> None:
    with pytest.raises(DeviceError) as error:
        train(small, ["plugin.options.large=true"])
    text = str(error.value)
    assert re.match(r"training: the devices ran out of memory: Out of memory allocating \d{13,} bytes\n", text)
    assert "train.micro_batch_size: 4 saves about " in text


def test_predictions_that_do_not_fit(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(small)

    def failing(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory trying to allocate 12.00GiB")

    monkeypatch.setattr("redco_cli.run.write_predictions", failing)
    with pytest.raises(DeviceError) as error:
        predict("run")
    first, held, *edits = str(error.value).splitlines()
    assert first == "prediction: the devices ran out of memory: Out of memory trying to allocate 12.00GiB"
    assert held == "  by plan one device needs 64 B: parameters 64 B (largest: output/kernel 48 B, output/bias 16 B)"
    assert edits[0] == "  -> predict.batch_size: 4 saves about 6 GiB"
    assert edits[1:] == ["  -> mesh: {fsdp: 8} saves about 56 B"]


@pytest.mark.slow
def test_exports_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    train("recipe.yaml", ["train.steps=1"])
    raised: list[Exception] = [jax.errors.JaxRuntimeError(ON_A_GPU), MemoryError()]

    def failing(*_: object, **__: object) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("redco_cli.trained.export_model", failing)
    with pytest.raises(DeviceError) as error:
        export("one", output="exported")
    first, held, remedy = str(error.value).splitlines()
    assert first.startswith("export: the devices ran out of memory: Out of memory while trying to allocate")
    parameters = re.fullmatch(r"  by plan one device needs (.*): 4 times its parameters (.*) \(largest: .*\)", held)
    assert parameters is not None
    assert parse_bytes(parameters[1], "") == pytest.approx(4 * parse_bytes(parameters[2], ""), rel=0.05)
    assert remedy == "  -> take more or larger devices"
    with pytest.raises(
        DeviceError, match=r"an export holds up to 4 times its parameters, \S+ KiB\n  -> give the process more"
    ):
        export("one", output="exported")
