"""Predicted beside compiled: the real train step on eight fake devices, for our decoder and a Flax class."""

import json
import math

import jax
import pytest

from redco_cli.errors import RedcoError
from redco_cli.planning.compiled import compile_step
from redco_cli.planning.devices import Devices
from redco_cli.planning.inspect import inspect
from redco_cli.planning.search.ways import options
from redco_cli.planning.workload import find_workload
from tests.projects import LLAMA

BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "vocab_size": 264,
    "max_position_embeddings": 64,
    "num_labels": 4,
    "architectures": ["BertForMaskedLM"],
}


def over_tensor(collectives) -> int:
    return sum(one.bytes for one in collectives if one.axis == "tensor")


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param(BERT, {"data": 2, "fsdp": 1, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param(LLAMA, {"data": 1, "fsdp": 8, "tensor": 1}, marks=pytest.mark.slow),
        pytest.param(LLAMA, {"data": 2, "fsdp": 1, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param(BERT, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["model_type"] if "model_type" in value else "x".join(map(str, value.values())),
)
def test_what_is_predicted_is_what_is_compiled(config, mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and the traffic of activations within a quarter; what parameters and their state take, exactly.

    Gradients of one array, such as those of queries, keys and values, are added up before they are moved on GPUs and
    TPUs (`tests/chips/test_results.py` compares these), and one by one on a CPU, which moves more then.
    """
    analyses = []
    analysis = jax.stages.Compiled.memory_analysis
    monkeypatch.setattr(
        jax.stages.Compiled, "memory_analysis", lambda self: analyses.append(analysis(self)) or analyses[-1]
    )
    workload = find_workload(json.dumps(config), batch_size=16, seq_length=32, dtype="float32")
    ways, _ = options(workload, Devices(8, 1, None, eager=True), mesh)
    way = ways[0]
    compiled = compile_step(way)
    assert compiled.memory == pytest.approx(way.memory.total, rel=0.25)
    counters = 3 * 4  # step, skipped and streak of the state
    arguments = way.memory.parameters + way.memory.optimizer + way.memory.batch + counters
    assert analyses[0].argument_size_in_bytes == arguments
    predicted = over_tensor(way.plan.collectives)
    apart = 1.6 if config is LLAMA else 1.3
    assert over_tensor(compiled.collectives) == pytest.approx(apart * predicted, rel=0.25)
    assert (predicted > 0) == (mesh["tensor"] > 1)


def test_too_few_devices_to_compile_for() -> None:
    with pytest.raises(RedcoError) as refused:
        inspect(json.dumps(LLAMA), devices=16, batch_size=16, seq_length=16, mesh={"fsdp": 16}, compile_it=True)
    assert math.prod((16, 1)) > jax.device_count()
    assert str(refused.value) == (
        "--compile: 16 devices are wanted, and JAX runs with 8\n"
        "  -> set XLA_FLAGS=--xla_force_host_platform_device_count=16 before JAX starts, as the command does"
    )
