"""A real model class on unevenly masked text: devices, micro-batches and compute types against one device."""

from pathlib import Path

import jax
import numpy as np
import pytest

from redco_cli.job import prepare
from redco_cli.recipe.load import load_recipe
from redco_cli.run import train
from redco_cli.runtime.mesh import replicated
from redco_cli.training.records.metrics import read_records
from tests.projects import write_answers

SECTIONS = """
train: {global_batch_size: 16, steps: 4, learning_rate: 1e-2, schedule: constant}
eval: {every: 4}
mesh: {data: 1}
output_dir: run
"""
SMALLEST = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 260}
SMALLEST |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_answers(tmp_path, lambda i: "x" * (1 + i * i % 17), SECTIONS, max_length=48, **SMALLEST)
    monkeypatch.chdir(tmp_path)


def losses(directory: str) -> list[float]:
    return [record["loss"] for record in read_records(Path(directory) / "metrics.jsonl")]


def compare(devices: int, micro: int) -> None:
    train("recipe.yaml", ["output_dir=one"])
    train("recipe.yaml", [f"mesh.data={devices}", f"train.micro_batch_size={micro}", "output_dir=many"])
    assert len(losses("one")) == 5
    assert losses("one")[0] > losses("one")[3]
    np.testing.assert_allclose(losses("many"), losses("one"), rtol=1e-5)


@pytest.mark.slow
def test_eight_devices_in_two_micro_batches_equal_one_device() -> None:
    compare(8, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro"), [(1, 4), (1, 8), (2, 4), (2, 16), (8, 16), (4, 4)])
def test_every_mesh_and_micro_batch_equals_one_device(devices: int, micro: int) -> None:
    compare(devices, micro)


@pytest.mark.slow
def test_bfloat16_computes_over_float32_parameters() -> None:
    job = prepare(load_recipe("recipe.yaml", ["model.dtype=bfloat16"]), stages=("train",))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(job.model.abstract)} == {"float32"}
    ids = jax.ShapeDtypeStruct((2, 8), np.int32)
    assert jax.eval_shape(job.model, job.model.abstract, ids).dtype == "bfloat16"
    train("recipe.yaml", ["model.dtype=bfloat16", "output_dir=half"])
    train("recipe.yaml", ["output_dir=full"])
    half, full = losses("half"), losses("full")
    assert half != full
    np.testing.assert_allclose(half, full, rtol=2e-2)


def test_parameters_are_born_on_the_mesh() -> None:
    from redco_cli.models.initial import initial_params
    from redco_cli.runtime.mesh import make_mesh

    job = prepare(load_recipe("recipe.yaml", ["mesh.data=8"]), stages=("train",))
    mesh = make_mesh({"data": job.recipe.mesh.data, "fsdp": 1, "tensor": 1}, job.where)
    params, fresh = initial_params(job.model, job.recipe.model, replicated(mesh), key=jax.random.key(0), where=job.where)
    assert fresh == ()
    assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in jax.tree.leaves(params))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), job.model.abstract
    )
