"""A run that trains an adapter, planned and compiled: its base takes its own bytes and no more."""

from pathlib import Path

import jax
import pytest

from redco_cli.planning.compiled import compile_step
from redco_cli.planning.devices import Devices
from redco_cli.planning.inspect import inspect
from redco_cli.planning.report import as_json
from redco_cli.planning.search.ways import options
from redco_cli.planning.workload import recipe_workload
from tests.planning.test_workload import PLUGIN
from tests.projects import write_answers

TENSOR8 = {"data": 1, "fsdp": 1, "tensor": 8}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLP of 32 to 128 to 32 numbers, of which both weights are adapted with rank 4."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(
        "model: {dtype: bfloat16}\nadapter: {rank: 4, targets: ['.*/kernel']}\nplugin: {module: plugin.py}\n"
        "train: {global_batch_size: 8, steps: 2}\noutput_dir: run\n"
    )
    monkeypatch.chdir(tmp_path)
    return "recipe.yaml"


def test_base_and_adapter_are_planned_apart(recipe: str) -> None:
    report = inspect(recipe, mesh=TENSOR8)
    memory = report.memory
    base = 2 * (32 * 128 // 8 * 2 + 128 // 8 + 32)  # both kernels and the first bias are split, the last one is not
    rows, columns = 4 * (128 // 8 * 4 + 4 * 32), 4 * (32 * 4 + 4 * 128 // 8)
    assert (memory.parameters, memory.gradients) == (base + rows + columns, rows + columns)
    assert 2 * (rows + columns) <= memory.optimizer <= 2 * (rows + columns) + 16
    groups = {group["path"]: group for group in as_json(report)["groups"]}
    assert {path: group["dtype"] for path, group in groups.items()} == {
        "adapter/down/kernel/A": "float32",
        "adapter/down/kernel/B": "float32",
        "adapter/up/kernel/A": "float32",
        "adapter/up/kernel/B": "float32",
        "model/down/bias": "bfloat16",
        "model/down/kernel": "bfloat16",
        "model/up/bias": "bfloat16",
        "model/up/kernel": "bfloat16",
    }


def test_a_step_moves_the_sum_of_the_rows_and_gradients_of_the_adapter(recipe: str) -> None:
    moved = {(one.kind, one.axis, one.what): one.bytes for one in inspect(recipe, mesh=TENSOR8).collectives}
    assert moved == {
        ("all-reduce", "tensor", "partial sums of a matmul"): 2 * 7 * 4 * 8 * 32 // 8,
        ("all-reduce", "tensor", "gradients"): 2 * 7 * 4 * (32 * 4 + 4 * 32) // 8,  # of A beside columns, B beside rows
    }


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 1, "tensor": 4}], ids=str)
def test_a_compiled_step_has_no_optimizer_state_of_its_base(
    mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = "adapter: {rank: 4}\ntrain: {global_batch_size: 16, steps: 2}\noutput_dir: run\n"
    write_answers(tmp_path, str, sections)
    monkeypatch.chdir(tmp_path)
    programs = []
    analysis = jax.stages.Compiled.memory_analysis
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: programs.append(self) or analysis(self))
    workload = recipe_workload("recipe.yaml", ["model.dtype=bfloat16"])
    way = options(workload, Devices(8, 1, None, eager=True), mesh)[0][0]
    compiled = compile_step(way)
    assert compiled.memory == pytest.approx(way.memory.total, rel=0.35)
    counters = 3 * 4
    arguments = way.memory.parameters + way.memory.optimizer + way.memory.batch + counters
    assert analysis(programs[0]).argument_size_in_bytes == arguments
    adapter = sum(row.bytes_per_device for row in way.plan.rows if row.path.startswith("adapter/"))
    base = sum(row.bytes_per_device for row in way.plan.rows if row.path.startswith("model/"))
    assert way.memory.optimizer <= 2 * adapter + 16
    assert way.memory.gradients == adapter
    assert way.memory.parameters == base + adapter
