"""Compiling for devices that are not there: what is asked, kept and refused. The compilers themselves: tests/chips."""

import json
import threading
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from redco_cli.chips.target import parse_target
from redco_cli.errors import DeviceError, UsageError
from redco_cli.planning.inspect import inspect
from redco_cli.planning.targets import child, scheduled
from redco_cli.planning.targets.child import Request, answer
from redco_cli.sharding.compiled.events import from_json
from tests.projects import LLAMA

REQUEST = Request(
    target="h100:8",
    workload={"model": json.dumps(LLAMA), "batch_size": 8, "seq_length": 16},
    remat="full",
    mesh={"data": 2, "fsdp": 2, "tensor": 2},
    micro_batch_size=8,
    reshard_after_forward=False,
    options={},
)


@pytest.fixture
def devices_of_a_cpu(monkeypatch, tmp_path):
    """The target's program, for the fake devices of the tests: no compiler of a GPU is installed for them."""
    monkeypatch.setenv("REDCO_CACHE", str(tmp_path))
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    monkeypatch.setattr(child, "target_mesh", lambda target, sizes: mesh)


@pytest.mark.slow
@pytest.mark.usefixtures("devices_of_a_cpu")
def test_what_was_compiled_is_kept(monkeypatch):
    request = Request(**{**vars(REQUEST), "target": "v5e:2x4", "cycles": True})
    stages = []
    found = answer(request, stages.append)
    assert stages == ["tracing the step for v5e:2x4", "compiling the step for v5e:2x4"]
    assert found["compiled"]["memory"] > 0
    assert {one["axis"] for one in found["compiled"]["collectives"]} >= {"tensor", "fsdp"}
    assert from_json(found["timeline"])
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert json.loads(json.dumps(answer(request, stages.append))) == json.loads(json.dumps(found))


def test_it_is_found_by_another_process():
    """In which kernels have other addresses; one that computes something else is not."""

    def key(address, mask):
        lowered = f'%1 = stablehlo.custom_call @CustomSPMDPartitioning(%0) {{backend_config = "{address}"}}'
        traced = f"custom_partitioning[call=attend mask={mask} partition=<function _split at {hex(address)}>] a"
        return child._key(lowered, traced, parse_target("h100:8", "--target"), REQUEST)

    assert key(140663535970000, "causal") == key(140273755476304, "causal")
    assert key(140663535970000, "causal") != key(140663535970000, "padding")


@pytest.mark.slow
@pytest.mark.usefixtures("devices_of_a_cpu")
def test_products_that_triton_has_no_tiles_for_are_left_to_cublas_and_that_is_said(monkeypatch):
    compile_with = child.compile_with

    def untuned(lowered, options, where):
        if options == {"xla_gpu_enable_triton_gemm": False}:
            return compile_with(lowered, {}, where)
        raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.178")

    monkeypatch.setattr(child, "compile_with", untuned)
    asked = {**vars(REQUEST), "target": "v5e:2x4", "cycles": True}  # for whose attention there is a form on CPUs
    found = answer(Request(**asked), lambda stage: None)["compiled"]
    assert found["memory"] > 0
    assert found["changed"].startswith("xla_gpu_enable_triton_gemm=false: ")
    with pytest.raises(jax.errors.JaxRuntimeError, match="output tile sizes"):
        answer(Request(**{**asked, "options": {"xla_gpu_enable_triton_gemm": True}}), lambda stage: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "needed"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 45.30G of 31.25G hbm. Exceeded ...", 45.30),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (31.79G) "
            "exceeds available HBM (31.25G).",
            31.79,
        ),
    ],
)
@pytest.mark.usefixtures("devices_of_a_cpu")
def test_what_does_not_fit_is_no_failure(monkeypatch, said, needed):
    def refuse(self, **options):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    too_large = answer(Request(**{**vars(REQUEST), "target": "v6e:2x4"}), lambda stage: None)["too_large"]
    assert too_large == {"needed": int(needed * 2**30), "limit": int(31.25 * 2**30), "said": said}


@pytest.mark.usefixtures("devices_of_a_cpu")
def test_a_tpu_is_compiled_for_up_to_its_schedule(monkeypatch):
    """The compiler writes down what it has settled, and is not waited for; what it does not accept has no text."""
    report = "Memory Space: default (color=0)\nTotal bytes: 70 (70B)\nMemory Space: cmem (color=5)\nTotal bytes: 9 (9B)"
    ended = threading.Event()

    def compile_with(lowered, options, where):
        directory = Path(options["xla_dump_to"])
        (directory / "m.after_optimizations-memory-usage-report.txt").write_text(report)
        text = (
            "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2] parameter(0)\n}"
        )
        (directory / "m.after_optimizations_after_buffer_assignment.txt").write_text(text)
        (directory / "m.debug_options").write_text("")
        ended.wait(60)

    monkeypatch.setattr(scheduled, "compile_with", compile_with)
    found = answer(Request(**{**vars(REQUEST), "target": "v5e:2x4"}), lambda stage: None)["compiled"]
    ended.set()
    assert (found["memory"], found["host"], found["collectives"]) == (70, 9, ())


def test_without_its_text_a_program_is_what_its_compiler_says(monkeypatch):
    def refuse(lowered, options, where):
        Path(options["xla_dump_to"], "m.debug_options").write_text("")
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")

    monkeypatch.setattr(scheduled, "compile_with", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        scheduled.schedule_with(None, {}, str)


def test_cycles_are_those_of_a_tpu_that_is_compiled_for():
    for target in ("h100:4", None):
        with pytest.raises(UsageError, match="--cycles: cycles are what the compiler of a TPU says"):
            inspect(json.dumps(LLAMA), batch_size=8, seq_length=16, target=target, compile_it="cycles")
    with pytest.raises(UsageError, match="--cycles: how many cycles a second tpu7x has is not published"):
        inspect(json.dumps(LLAMA), batch_size=8, seq_length=16, target="tpu7x:2x2x1", compile_it="cycles")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "extra"), [("v5e:2x2", "redco[tpu]"), ("h100:4", "redco[cuda]")])
def test_without_its_compiler_it_says_what_to_install(target, extra):
    with pytest.raises(DeviceError) as refused:
        inspect(json.dumps(LLAMA), target=target, batch_size=8, seq_length=16, compile_it=True)
    assert f"JAX cannot compile for {target} here" in str(refused.value)
    assert f"pip install '{extra}'" in str(refused.value)
