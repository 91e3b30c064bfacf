"""Traces read: whose operations, what is a collective, what lasts how long; as CPUs, GPUs and TPUs lay them out."""

import io
from types import SimpleNamespace

import pytest

from redco_cli.console import open_console
from redco_cli.console.profile import show_profile
from redco_cli.errors import RecipeError
from redco_cli.recipe.load import load_recipe
from redco_cli.training.records.trace import as_json, of_planes, summarise
from redco_cli.training.timeline import make_timeline


def event(name, start, duration, **stats):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=list(stats.items()))


def plane(name, **lines):
    named = [SimpleNamespace(name=line.replace("_", " "), events=events) for line, events in lines.items()]
    return SimpleNamespace(name=name, lines=named)


def op(name, start, duration, device=0):
    return event(name, start, duration, hlo_op=name, hlo_module="jit_train_step", device_ordinal=device)


CPU = [
    plane(
        "/host:CPU",
        python=[
            event("train", 0, 30, step_num=21),
            event("input wait", 30, 10),
            event("train", 40, 20, step_num=22),
            event("PjitFunction(train_step)", 0, 30),
        ],
        pool_1=[
            event("ThunkExecutor::Execute", 5, 45),
            op("while.7", 5, 45),
            op("dot.2", 5, 20),
            op("all-reduce.1", 25, 25),
            event("end: dot.2", 25, 0.1),
        ],
        pool_2=[op("dot.2", 10, 20, 1), op("fusion.3", 45, 10, 1), op("all-reduce.1", 50, 50, 1)],
    )
]


def test_a_cpu_has_its_operations_among_the_threads_of_the_host():
    found = summarise(of_planes(CPU), {"dot.2": "jvp(net)/dot_general"})
    assert (found.steps, found.devices, found.seconds) == (2, 2, pytest.approx(50e-9))  # until the last operation ended
    assert found.compute == pytest.approx((20 + 30) / 2 / 100)
    assert found.collectives == pytest.approx((25 + 50) / 2 / 100)
    assert found.overlapped == pytest.approx(5 / 75)
    assert found.idle == pytest.approx(0.4)
    assert found.input_wait == pytest.approx(0.1)
    longest, product, _ = found.operations
    assert (longest.name, longest.kind, longest.times) == ("all-reduce.1", "collective", 0.5)
    assert longest.share == pytest.approx(0.375)
    assert (product.name, product.kind, product.source) == ("dot.2", "compute", "jvp(net)/dot_general")
    assert product.seconds == pytest.approx(10e-9)


def test_a_tpu_has_a_line_for_them():
    chip = plane(
        "/device:TPU:0",
        Steps=[event("21", 0, 100)],
        XLA_Modules=[event("jit_train_step(1)", 0, 100)],
        XLA_Ops=[
            event("%fusion.2 = bf16[8,8] fusion(%p)", 0, 40, hlo_category="convolution fusion"),
            event("%fusion.9 = f32[4] fusion(%q)", 40, 10, hlo_category="all-reduce-scatter fusion"),
        ],
        Async_XLA_Ops=[event("%all-gather-start.1 = (bf16[1], bf16[8]) all-gather-start(%p)", 10, 20)],
    )
    found = summarise(of_planes([chip, plane("/host:CPU", python=[event("train", 0, 100)])]), {})
    assert (found.compute, found.collectives, found.idle) == (0.4, pytest.approx(0.3), 0.5)
    assert found.overlapped == pytest.approx(2 / 3)
    assert [one.name for one in found.operations] == ["fusion.2", "all-gather-start.1", "fusion.9"]


def test_a_gpu_has_streams():
    chip = plane(
        "/device:GPU:1",
        **{"Stream #13(Compute)": [event("ampere_bf16_gemm", 0, 50, hlo_op="gemm_fusion.1")]},
        **{"Stream #20(NCCL)": [event("ncclDevKernel_AllGather", 20, 40, hlo_op="all-gather-start.3")]},
        Launch_Stats=[event("anything", 0, 100)],
    )
    found = summarise(of_planes([chip, plane("/host:CPU", python=[event("train", 0, 100)])]), {})
    assert (found.compute, found.collectives, found.overlapped, found.idle) == (0.5, 0.4, 0.75, pytest.approx(0.4))


def test_kernels_of_a_cuda_graph_are_told_apart():
    kernels = [
        event("gemm_fusion_dot_9", 0, 50, hlo_op="command_buffer_162"),
        event("void cudnn::convert<true>(void const*, int)", 50, 20, hlo_op="command_buffer_162"),
        event("ncclDevKernel_AllGather(int)", 70, 10, hlo_op="command_buffer_1"),
    ]
    chip = plane("/device:GPU:0", **{"Stream #14(Memset,Compute)": kernels})
    trace = of_planes([chip, plane("/host:CPU", python=[event("train", 0, 100)])])
    found = summarise(trace, {"gemm_fusion_dot.9": "jvp(net)/dot_general"})
    assert [(one.name, one.kind, one.source) for one in found.operations] == [
        ("gemm_fusion_dot_9", "compute", "jvp(net)/dot_general"),
        ("cudnn::convert<true>", "compute", ""),
        ("ncclDevKernel_AllGather", "collective", ""),
    ]


def test_what_saw_nothing_has_no_profile():
    assert summarise(of_planes([plane("/host:CPU", python=[event("train", 0, 100)])]), {}) is None
    assert summarise(of_planes([plane("/host:CPU", pool=[op("dot.2", 0, 1)])]), {}) is None


def test_it_is_said_in_lines():
    file = io.StringIO()
    summary = {"first_step": 21, **as_json(summarise(of_planes(CPU), {"dot.2": "jvp(net)/dot_general"}))}
    show_profile(summary, "run/profile/start-20", open_console(file, terminal=False))
    lines = file.getvalue().splitlines()
    assert lines[0] == "profile of steps 21 to 22 on 2 devices: 5e-05 ms a step"
    assert lines[1] == "compute 25%  collectives 38% (7% of that beside compute)  idle 40%  input wait 10%"
    assert lines[2].split() == ["longest", "operations", "kind", "ms", "a", "step", "share", "times", "where"]
    assert lines[4].split() == ["dot.2", "compute", "1e-05", "20.0%", "0.5", "jvp(net)/dot_general"]
    assert lines[-1].startswith("trace: run/profile/start-20 (tensorboard")


def test_steps_behind_the_end_are_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "plugin: {module: causal_lm}\noutput_dir: run\ntrain:\n  steps: 24\n  profile: {start: 20, steps: 5}\n"
    )
    loaded = load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"recipe.yaml:5: train.profile: 5 steps behind step 20 are more than .* 24"):
        make_timeline(loaded.recipe, 100, loaded.where)
    assert make_timeline(load_recipe(loaded.path, ["train.steps=25"]).recipe, 100, loaded.where).steps == 25
