"""Options of XLA's compiler: which are chosen for which devices, and what is said of those that it refuses."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src.config import EffortLevel

from redco_cli.chips import compiler
from redco_cli.chips.compiler import accepted_options, compile_fitting, compile_with, for_jax, step_options
from redco_cli.chips.table import CHIPS
from redco_cli.chips.target import parse_target, targeting
from redco_cli.errors import DeviceError, RecipeError
from redco_cli.planning.targets import compile as compiling
from redco_cli.recipe.load import load_recipe
from redco_cli.runtime.program import Program
from redco_cli.training.saving.resume import FREE_TO_CHANGE


def where(key):
    return f"recipe.yaml:7: {key}"


def test_every_chip_has_its_own():
    assert set(compiler._AUTO) == set(CHIPS)
    chosen = {}
    for name, target in {"tpu": "v6e:2x4", "older tpu": "v5e:2x4", "gpu": "h100:8", "ironwood": "tpu7x:2x2x1"}.items():
        with targeting(parse_target(target, "--target")):
            chosen[name] = step_options("auto")
            assert step_options({"xla_a": 1}) == {"xla_a": 1}
    assert chosen["tpu"]["xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"] is True
    assert chosen["older tpu"]["xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter"] is True
    assert chosen["gpu"]["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert chosen["ironwood"] == {}
    assert step_options("auto") == {}  # for CPUs


def test_levels_are_those_of_jax():
    assert {name: for_jax({"jax_optimization_level": name}) for name in compiler._LEVELS} == {
        name: {"optimization_level": EffortLevel[name].value} for name in compiler._LEVELS
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"xla_cpu_no_such": True}, "recipe.yaml:7: train.xla.xla_cpu_no_such: the compiler knows no such option"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "train.xla.xla_cpu_enable_fast_math: 'maybe' is not a valid bool"),
        ({"xla_gpu_all_gather_combine_threshold_bytes": "5k"}, "'5k' is not a valid int64 value"),
    ],
)
def test_what_the_compiler_refuses_is_told_with_its_place(options, problem):
    with pytest.raises(RecipeError) as refused:
        accepted_options(options, where)
    assert problem in str(refused.value)
    assert "-> " in str(refused.value)


def test_a_near_miss_is_named(monkeypatch):
    def refuse(self, compiler_options):
        (name,) = compiler_options
        raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    lowered = jax.jit(lambda x: x).lower(1.0)
    with pytest.raises(RecipeError, match="did you mean xla_gpu_enable_latency_hiding_scheduler"):
        compile_with(lowered, {"xla_gpu_enable_latency_hiding_schedule": True}, where)


def refusing(*messages):
    """A compiler that refuses as often as it has messages, and then says with which options it was asked."""
    left = list(messages)

    def make(options):
        if left:
            raise jax.errors.JaxRuntimeError(left.pop(0))
        return options

    return make


def test_what_does_not_fit_with_sparse_cores_is_compiled_without():
    too_large = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (34.48G)"
    assert compile_fitting(refusing(), compiler._SPARSE_CORES) == (compiler._SPARSE_CORES, compiler._SPARSE_CORES, None)
    made, used, changed = compile_fitting(refusing(too_large), compiler._SPARSE_CORES)
    assert made == used == compiler._FUSED_COLLECTIVES
    assert changed.startswith("collectives fused with products instead of on sparse cores: ")
    for messages, options in {
        (too_large, too_large): compiler._SPARSE_CORES,  # nor without
        ("INTERNAL: a bug",): compiler._SPARSE_CORES,
        (too_large, ""): compiler._FUSED_COLLECTIVES,
        ("RESOURCE_EXHAUSTED: of a CPU",): {},
        (too_large, "of a recipe"): {**compiler._SPARSE_CORES, "xla_a": True},
    }.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=messages[0][:12]):
            compile_fitting(refusing(*messages), options)


def test_a_run_says_that_its_step_was_compiled_with_other_options(monkeypatch):
    compile_lowered, asked, said = jax.stages.Lowered.compile, [], []

    def compile_once_it_fits(self, compiler_options):
        asked.append(compiler_options)
        if compiler_options == compiler._SPARSE_CORES:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 45.30G of 31.25G hbm")
        return compile_lowered(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_once_it_fits)
    program = Program("train step", jnp.sum, nullcontext, options=compiler._SPARSE_CORES, warn=said.append)
    assert [float(program(jnp.ones(3))) for _ in range(2)] == [3, 3]
    assert asked == [compiler._SPARSE_CORES, compiler._FUSED_COLLECTIVES]
    (warning,) = said
    assert warning.startswith("train step for batches of [3]: compiled with collectives fused with products ")


def test_as_a_tpu_says_it():
    said = "INVALID_ARGUMENT: Failed to parse 'maybe' into flag xla_tpu_enable_async_collective_fusion: "
    named = {"xla_tpu_enable_async_collective_fusion": "maybe"}
    assert compiler._refused(said, named) == ("xla_tpu_enable_async_collective_fusion", "Failed to parse 'maybe'")
    assert compiler._refused("RESOURCE_EXHAUSTED: Used 45.30G of 31.25G hbm", named) is None


def test_accepted_ones_are_those_that_are_there(monkeypatch):
    assert accepted_options({"xla_cpu_enable_fast_math": True, "jax_optimization_level": "O1"}, where)[1] == []
    monkeypatch.setattr(compiler, "step_options", lambda given: {"xla_old": True, "xla_cpu_enable_fast_math": False})
    assert accepted_options("auto", where) == ({"xla_cpu_enable_fast_math": False}, ["xla_old"])


def test_a_recipe_gives_them_by_name(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "plugin: {module: causal_lm}\noutput_dir: run\n"
        "train:\n  xla:\n    xla_gpu_enable_latency_hiding_scheduler: false\n    jax_optimization_level: O2\n"
    )
    given = load_recipe(tmp_path / "recipe.yaml", ["train.xla.xla_gpu_all_gather_combine_threshold_bytes=1024"])
    assert given.recipe.train.xla == {
        "xla_gpu_enable_latency_hiding_scheduler": False,
        "jax_optimization_level": "O2",
        "xla_gpu_all_gather_combine_threshold_bytes": 1024,
    }
    assert "train.xla" in FREE_TO_CHANGE
    for wrong, problem in {
        "jax_optimization_level=O7": "jax_optimization_level is one of O0, O1, O2, O3, not 'O7'",
        "--xla_gpu=1": "'--xla_gpu' is no name of an option",
        "xla_gpu=[1]": "train.xla",
    }.items():
        with pytest.raises(RecipeError) as refused:
            load_recipe(tmp_path / "recipe.yaml", [f"train.xla.{wrong}"])
        assert problem in str(refused.value)


def test_a_target_is_compiled_with_them(monkeypatch):
    """What is asked of the process that compiles, and so the key of what it keeps."""
    asked = {}
    monkeypatch.setattr(
        compiling, "_ended", lambda request, _: asked.update(request) or {"problems": [["a", "b", "c"]]}
    )
    plan = SimpleNamespace(mesh={"data": 1, "fsdp": 8, "tensor": 1})
    workload = SimpleNamespace(xla={"xla_a": True}, remat="none")
    way = SimpleNamespace(plan=plan, workload=workload, micro_batch_size=8, reshard_after_forward=False)
    with pytest.raises(DeviceError, match="a: b"):
        compiling.compile_for(parse_target("v6e:2x4", "--target"), way, {})
    assert asked["options"] == {"xla_a": True}
