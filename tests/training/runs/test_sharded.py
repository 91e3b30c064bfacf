"""Whole runs on meshes that split parameters: against one device, from loss to prediction, and what is refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli import run as main_path
from redco_cli.errors import RedcoError
from redco_cli.run import predict, train
from redco_cli.sharding.decide import tables
from redco_cli.training.records.metrics import read_records
from redco_cli.training.state import TrainState
from tests.projects import write_answers, write_classifier

CUBE = "{data: 2, fsdp: 2, tensor: 2}"
MESHES = ["{data: 8}", "{fsdp: 8}", "{tensor: 8}", CUBE, "{data: 2, tensor: 4}"]
LLAMA = """
predict: {generation: {max_new_tokens: 4}}
train: {global_batch_size: 16, steps: 4, learning_rate: 3e-3, schedule: constant}
eval: {every: 4}
mesh: {data: 1}
output_dir: one
"""


@dataclass(frozen=True)
class Run:
    """What a run left behind: its records by (kind, step), and its last state, on the mesh."""

    records: Mapping[tuple[str, int], Mapping[str, Any]]
    state: TrainState


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Trains `recipe.yaml` with overrides into a directory."""
    runs: list[Any] = []
    saved = main_path.saved_at_its_end
    monkeypatch.setattr(main_path, "saved_at_its_end", lambda run, job: runs.append(run) or saved(run, job))

    def training(directory: str, *overrides: str) -> Run:
        train("recipe.yaml", [f"output_dir={directory}", *overrides])
        records = read_records(Path(directory) / "metrics.jsonl")
        return Run({(record["kind"], record["step"]): record for record in records}, runs[-1]._state)

    return training


@pytest.fixture
def mlp(project: Path) -> Path:
    """The linear recipe of the neighbours, wide enough that every mesh divides it and Adafactor factors it."""
    write_classifier(project, wide=True)
    return project


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small decoder on made-up prompts."""
    write_answers(tmp_path, lambda i: "x" * (1 + i * i % 17), LLAMA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same(found: Run, expected: Run, *, after: int = 0) -> None:
    """Every recorded value, and every parameter as a whole, to 1e-5."""
    steps = {key: values for key, values in expected.records.items() if key[1] > after}
    assert {key for key in found.records if key[1] > after} == set(steps)
    assert len(steps) > 2
    for key, values in steps.items():
        names = {"loss", "grad_norm", "learning_rate", "weight", "accuracy", "exact", "exact_match"} & set(values)
        for name in names:
            assert found.records[key][name] == pytest.approx(values[name], rel=1e-5), (key, name)
    close(found.state.params, expected.state.params)


def close(found: Any, expected: Any) -> None:
    def compare(path: Any, a: Any, b: Any) -> None:
        error, size = np.linalg.norm(np.asarray(a) - np.asarray(b)), np.linalg.norm(np.asarray(b))
        assert error <= 1e-5 * size, (jax.tree_util.keystr(path), error, size)

    jax.tree_util.tree_map_with_path(compare, found, expected)


def held(tree: Any) -> int:
    """Bytes of a tree on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def whole(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize(
    ("micro", "meshes"),
    [(8, [CUBE]), *(pytest.param(micro, MESHES, marks=pytest.mark.slow) for micro in (8, 16))],
)
def test_every_mesh_equals_one_device(trained, micro: int, meshes: list[str]) -> None:
    batch = "train.global_batch_size=16"
    one = trained("one", batch)
    predicted = predict("one", output="one.jsonl").read_text()
    assert one.records["train", 20]["loss"] < 0.5 * one.records["train", 1]["loss"]
    for number, mesh in enumerate(meshes):
        name = f"run-{number}"
        many = trained(name, batch, f"mesh={mesh}", f"train.micro_batch_size={micro}")
        same(many, one)
        assert held(many.state.params) < whole(many.state.params) or mesh == "{data: 8}"
        assert predict(name, output=f"{name}.jsonl").read_text() == predicted


@pytest.mark.slow
@pytest.mark.usefixtures("llama")
def test_a_decoder_on_every_axis_in_micro_batches_equals_one_device(trained) -> None:
    one = trained("one")
    many = trained("many", f"mesh={CUBE}", "train.micro_batch_size=8")
    same(many, one)
    assert held(many.state.params) < 0.3 * whole(many.state.params)
    layers = many.state.params["layers"]
    assert layers["attention"]["q"]["kernel"].sharding.spec == P(None, "fsdp", "tensor")
    assert layers["attention"]["o"]["kernel"].sharding.spec == P(None, ("tensor", "fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [8, 16])
@pytest.mark.usefixtures("llama")
def test_a_decoder_on_every_mesh_equals_one_device(trained, micro: int) -> None:
    one = trained("one", "eval.predict=true")
    predicted = predict("one", output="one.jsonl").read_text()
    for number, mesh in enumerate(MESHES):
        name = f"run-{number}"
        same(trained(name, f"mesh={mesh}", f"train.micro_batch_size={micro}", "eval.predict=true"), one)
        assert predict(name, output=f"{name}.jsonl").read_text() == predicted


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.usefixtures("llama")
def test_rows_that_move_instead_of_their_table_change_nothing(trained, monkeypatch, tied: bool) -> None:
    monkeypatch.setattr(tables, "_SMALL", 0)
    settings = ("eval.predict=true", f"model.config.tie_word_embeddings={str(tied).lower()}")
    one = trained("one", *settings)
    predicted = predict("one", output="one.jsonl").read_text()
    for number, mesh in enumerate((CUBE, "{data: 2, fsdp: 4}")):
        many = trained(f"run-{number}", *settings, f"mesh={mesh}", "train.micro_batch_size=8")
        same(many, one)
        assert many.state.params["embedding"].sharding.spec[1] == "fsdp"
        assert predict(f"run-{number}", output=f"{number}.jsonl").read_text() == predicted


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "lion", "muon", "sgd"])
@pytest.mark.usefixtures("mlp")
def test_optimizer_state_lives_with_its_parameters(trained, optimizer: str) -> None:
    settings = [
        f"train.optimizer={optimizer}",
        "train.steps=6",
        "eval.every=6",
        "train.learning_rate=1e-3",
        "train.weight_decay=0.1",
    ]
    one = trained("one", *settings)
    many = trained("many", *settings, f"mesh={CUBE}")
    same(many, one)
    kernel = many.state.params["hidden"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tensor")
    state = [leaf for leaf in jax.tree.leaves(many.state.opt_state) if leaf.ndim]
    moments = [leaf for leaf in state if leaf.shape == kernel.shape]
    assert len(moments) == {"adamw": 2, "adafactor": 0, "lion": 1, "muon": 1, "sgd": 1}[optimizer]
    assert all(leaf.sharding.spec == kernel.sharding.spec for leaf in moments)
    if optimizer == "adafactor":
        assert {leaf.sharding.spec for leaf in state if leaf.shape == (128,)} == {P("fsdp")}
    else:
        assert held(state) < 0.27 * whole(state)


@pytest.mark.slow
@pytest.mark.usefixtures("mlp")
def test_a_frozen_parameter_in_shards_stays_and_has_no_state(trained) -> None:
    settings = ["train.freeze=['hidden/.*']", "train.steps=6"]
    one, many = trained("one", *settings), trained("many", *settings, "mesh={fsdp: 8}")
    same(many, one)
    start = trained("start", "train.freeze=['hidden/.*']", "train.steps=1", "train.warmup=1")  # learning rate 0
    frozen = many.state.frozen["hidden"]["kernel"]
    np.testing.assert_array_equal(frozen, start.state.frozen["hidden"]["kernel"])
    assert "fsdp" in frozen.sharding.spec
    assert not [leaf for leaf in jax.tree.leaves(many.state.opt_state) if leaf.shape == frozen.shape]


@pytest.mark.slow
@pytest.mark.usefixtures("mlp")
def test_an_override_is_where_a_parameter_lives(trained) -> None:
    one = trained("one", "train.steps=6")
    override = "sharding.override=[{path: hidden/kernel, axes: [null, tensor+fsdp]}]"
    many = trained("many", "train.steps=6", f"mesh={CUBE}", override)
    same(many, one)
    for leaf in jax.tree.leaves(many.state):
        if leaf.shape == (128, 256):  # the parameter and its two moments
            assert leaf.sharding.spec == P(None, ("tensor", "fsdp"))


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "[{path: output/kernel, axes: [null, tensor]}]",
            "command line: sharding.override.0.axes: a dim of 3 of output/kernel cannot be split into 2 equal "
            "parts\n  -> split another dim, or leave this one whole: null",
        ),
        (
            "[{path: hidden/kernel, axes: [fsdp, fsdp]}]",
            "command line: sharding.override.0.axes: fsdp is used twice for hidden/kernel\n  -> use each axis once",
        ),
        (
            "[{path: nowhere, axes: [fsdp]}]",
            "command line: sharding.override.0.path: 'nowhere' matches no parameter\n"
            "  -> redco inspect-sharding lists them; the first is hidden/bias",
        ),
    ],
)
def test_an_override_that_does_not_fit_is_refused(override: str, text: str) -> None:
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", [f"mesh={CUBE}", f"sharding.override={override}"])
    assert str(refused.value) == text
    assert not Path("run").exists()


@pytest.mark.usefixtures("mlp")
@pytest.mark.parametrize(
    "mesh", [CUBE, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("{fsdp: 8}", "{tensor: 8}"))]
)
def test_a_run_continues_on_another_mesh(trained, mesh: str) -> None:
    one = trained("one")
    resume = "checkpoint.resume=one/checkpoint-15"
    more = trained("more", f"mesh={mesh}", resume)
    assert min(step for kind, step in more.records if kind == "train") == 16
    same(more, one, after=15)
    back = trained("back", "checkpoint.resume=more/checkpoint-20", "mesh={data: 2}")
    close(back.state, more.state)


IN_PIECES = """
        x = x[:, None] * jnp.linspace(0.5, 1, 64)[:, None]
        up, gate, skip = jnp.split(nn.Dense(3 * HIDDEN + FEATURES, name="in")(x), [HIDDEN, 3 * HIDDEN], -1)
        joined = jnp.concatenate([nn.tanh(up), nn.tanh(gate), x + skip], -1)
        x = nn.Dense(FEATURES, name="out")(joined)
        return nn.Dense(3, name="output")(nn.tanh(nn.Dense(HIDDEN, name="hidden")(x))).mean(1)
"""


@pytest.mark.slow
def test_weights_that_are_taken_apart_train_save_and_resume_as_whole_ones(project: Path, trained) -> None:
    write_classifier(project, wide=True)
    before, _, after = (project / "plugin.py").read_text().partition("        return nn.Dense(3")
    (project / "plugin.py").write_text(f"import jax.numpy as jnp\n{before}{IN_PIECES}{after.partition(chr(10))[2]}")
    batch = ("train.global_batch_size=16", "train.learning_rate=1e-3")
    one = trained("one", *batch)
    predicted = predict("one", output="one.jsonl").read_text()
    micro = (*batch, "train.micro_batch_size=8")
    many = trained("many", *micro, f"mesh={CUBE}")
    assert many.state.params["out"]["kernel"].sharding.spec == P(None, ("fsdp", "tensor"))
    same(many, one)
    assert predict("many", output="many.jsonl").read_text() == predicted
    more = trained("more", *micro, "mesh={data: 2, tensor: 4}", "checkpoint.resume=many/checkpoint-15")
    assert more.state.params["out"]["kernel"].sharding.spec == P(None, "tensor")
    same(more, one, after=15)


@pytest.mark.slow
@pytest.mark.usefixtures("mlp")
def test_predictions_in_shards_are_those_of_one_device() -> None:
    train("recipe.yaml", ["train.steps=5"])
    expected = predict("run", output="one.jsonl").read_text()
    assert len({json.loads(line)["prediction"] for line in expected.splitlines()}) > 1
    for name, mesh in enumerate(["{fsdp: 8}", "{fsdp: 4, tensor: 2}"]):
        assert predict("run", [f"mesh={mesh}"], output=f"{name}.jsonl").read_text() == expected


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["model.config.num_attention_heads=4", "model.config.num_key_value_heads=4", "mesh={tensor: 8}"],
            "command line: mesh.tensor: more shards (8) than heads (4) over tensor 8; each device would compute "
            "layers/attention/k/kernel [2, 64, 64] (4 heads), layers/attention/o/kernel [2, 64, 64] (4 heads), "
            "layers/attention/q/kernel [2, 64, 64] (4 heads) and 1 more\n"
            "  -> take tensor 4 and give the other devices to fsdp or data",
        ),
        (
            ["mesh={data: 4, fsdp: 4}"],
            "recipe.yaml:10: mesh: data 4 x fsdp 4 takes 16 devices, but 8 cpu devices found\n"
            "  -> take mesh: auto, or sizes with a product of 8",
        ),
        (
            ["mesh={data: 2, fsdp: 4}", "train.micro_batch_size=4"],
            "command line: train.micro_batch_size: a micro-batch of 4 examples cannot be split evenly over 8 devices\n"
            "  -> take a multiple of 8, such as 8, or fewer devices for data and fsdp: those of tensor share "
            "every example",
        ),
        (
            ["mesh={data: 2, fsdp: 4}", "eval.batch_size=12"],
            "command line: eval.batch_size: eval.batch_size of 12 examples cannot be split evenly over 8 devices\n"
            "  -> take a multiple of 8, such as 8 or 16, or fewer devices for data and fsdp: those of tensor share "
            "every example",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(overrides: list[str], text: str) -> None:
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", overrides)
    assert str(refused.value) == text
    assert not Path("one").exists()
