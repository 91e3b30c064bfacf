"""Compiling for devices that are not there: what is asked, kept and refused. The compilers themselves: tests/chips."""

import json

import jax
import pytest
from jax.sharding import AxisType

from redco_cli.errors import DeviceError
from redco_cli.planning.inspect import inspect
from redco_cli.planning.targets import child
from redco_cli.planning.targets.child import Request, answer
from redco_cli.sharding.compiled.timeline import from_json
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
    request = Request(**{**vars(REQUEST), "target": "v5e:2x4"})
    stages = []
    found = answer(request, stages.append)
    assert stages == ["tracing the step for v5e:2x4", "compiling the step for v5e:2x4"]
    assert found["compiled"]["memory"] > 0
    assert {one["axis"] for one in found["compiled"]["collectives"]} >= {"tensor", "fsdp"}
    assert from_json(found["timeline"])
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert json.loads(json.dumps(answer(request, stages.append))) == json.loads(json.dumps(found))


@pytest.mark.slow
@pytest.mark.usefixtures("devices_of_a_cpu")
def test_products_that_triton_has_no_tiles_for_are_left_to_cublas_and_that_is_said(monkeypatch):
    compile_with = child.compile_with

    def untuned(lowered, options, where):
        if options == {"xla_gpu_enable_triton_gemm": False}:
            return compile_with(lowered, {}, where)
        raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.178")

    monkeypatch.setattr(child, "compile_with", untuned)
    asked = {**vars(REQUEST), "target": "v5e:2x4"}  # for whose attention there is a form on CPUs
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


@pytest.mark.slow
@pytest.mark.parametrize(("target", "extra"), [("v5e:2x2", "redco[tpu]"), ("h100:4", "redco[cuda]")])
def test_without_its_compiler_it_says_what_to_install(target, extra):
    with pytest.raises(DeviceError) as refused:
        inspect(json.dumps(LLAMA), target=target, batch_size=8, seq_length=16, compile_it=True)
    assert f"JAX cannot compile for {target} here" in str(refused.value)
    assert f"pip install '{extra}'" in str(refused.value)
