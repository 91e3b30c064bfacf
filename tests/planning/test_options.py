"""The ways to run a workload: what the paper trained fits by plan, and the choice keeps its rules."""

import dataclasses
import json

import jax
import pytest

from redco_cli.chips.target import parse_target, targeting
from redco_cli.console.numbers import format_bytes
from redco_cli.errors import DeviceError, ModelError
from redco_cli.planning import options as planning_options
from redco_cli.planning.devices import FAST_LINK, SLOW_LINK, WAIT, Devices
from redco_cli.planning.options import Planner
from redco_cli.planning.search.remedies import remedies_for
from redco_cli.planning.search.ways import meshes, options
from redco_cli.planning.workload import Workload, find_workload
from redco_cli.sharding.predict.collectives import PER_PASS
from redco_cli.sharding.program.flops import count_products
from redco_cli.sharding.rings import sent_bytes
from tests.projects import LLAMA

GiB = 2**30
TINY = json.dumps(LLAMA)


@pytest.fixture(scope="module")
def tiny() -> Workload:
    return find_workload(TINY, batch_size=16, seq_length=24, dtype="float32")


SLOWLY = pytest.mark.slow
PAPER = [
    ("opt-66b", 512, 64, 32),
    ("opt-13b", 1024, 8, 32),
    ("llama-7b", 1024, 4, 40),
    ("gptj-6b", 1024, 4, 40),
    ("gpt2-large", 512, 2, 10),
    ("t5-11b", 512, 8, 32),
    ("bart-large", 1024, 2, 10),
]


@SLOWLY
@pytest.mark.parametrize(("model", "seq_length", "count", "gib"), PAPER)
def test_what_the_paper_trained_fits_by_plan(model: str, seq_length: int, count: int, gib: int) -> None:
    """Full fine-tuning in float32 with Adam, on the paper's devices, with a batch of one example for each."""
    hosts = -(-count // 8)
    workload = find_workload(model, batch_size=count, seq_length=seq_length)
    ways, _ = options(workload, Devices(count, hosts, gib * GiB))
    best = ways[0]
    assert best.fits(gib * GiB)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(workload.abstract.params))
    state = best.memory.parameters + best.memory.gradients + best.memory.optimizer
    assert 16 * parameters / count <= state < 1.05 * 16 * parameters / count * best.plan.mesh["data"]
    assert all(count // hosts % way.plan.mesh["tensor"] == 0 for way in ways)


@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (8, 1), (64, 8), (12, 3), (8, 8)])
def test_meshes_take_all_devices_and_keep_tensor_within_a_host(count: int, hosts: int) -> None:
    found = [tuple(mesh.values()) for mesh in meshes(Devices(count, hosts, None))]
    expected = {
        (data, fsdp, tensor)
        for data in range(1, count + 1)
        for fsdp in range(1, count + 1)
        for tensor in range(1, count // hosts + 1)
        if data * fsdp * tensor == count and count // hosts % tensor == 0
    }
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.slow
def test_an_axis_that_spans_hosts_moves_its_bytes_slowly(tiny: Workload) -> None:
    """Two hosts of four devices: which axes reach over both depends on what stands inside them."""
    spanning = {
        (8, 1, 1): {"data"},
        (1, 8, 1): {"fsdp"},
        (2, 4, 1): {"data"},
        (2, 1, 4): {"data"},
        (4, 1, 2): {"data"},
        (1, 2, 4): {"fsdp"},
        (1, 4, 2): {"fsdp"},
    }
    ways, _ = options(tiny, Devices(8, 2, None))
    found = {tuple(way.plan.mesh.values()): way for way in ways}
    for mesh, axes in spanning.items():
        way = found[mesh]
        moved = [(one.axis.split("+"), sent_bytes(one, way.plan.mesh)) for one in way.plan.collectives]
        slow = sum(sent for over, sent in moved if set(over) & axes)
        assert (way.slow, way.fast) == (slow, sum(sent for _, sent in moved) - slow), mesh
        assert slow > 0
    one_host, _ = options(tiny, Devices(8, 1, None))
    assert {way.slow for way in one_host} == {0}


def test_time_is_computation_and_what_each_link_moves(tiny: Workload) -> None:
    forward = count_products(
        lambda variables, batch: tiny.loss(variables, batch, jax.random.key(0)).sum, tiny.abstract, tiny.batch(16)
    )
    for way in options(tiny, Devices(8, 2, None))[0]:
        assert way.products.flops == pytest.approx(3 * forward.flops, rel=0.01)
        compute = way.products.flops / (8 * 150e12)
        waits = sum(one.count for one in way.plan.collectives if one.what not in PER_PASS)
        expected = compute + way.slow / SLOW_LINK + way.fast / FAST_LINK + waits * WAIT
        assert way.seconds == pytest.approx(expected)


@pytest.mark.slow
def test_what_fits_comes_first_and_the_fastest_of_that(tiny: Workload) -> None:
    ways, _ = options(tiny, Devices(8, 1, 650_000))
    fits = [way.fits(650_000) for way in ways]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    seconds = [way.seconds for way in ways[: sum(fits)]]
    assert seconds == sorted(seconds)
    rest = [way.memory.total for way in ways[sum(fits) :]]
    assert rest == sorted(rest)
    best = ways[0]
    assert (best.workload.remat, best.micro_batch_size < 16) == ("attention", True)
    plenty = options(tiny, Devices(8, 1, GiB))[0]
    assert plenty[0].plan.mesh == {"data": 8, "fsdp": 1, "tensor": 1}
    assert {(way.workload.remat, way.micro_batch_size) for way in plenty} == {("none", 16)}


SOME = [None, *(pytest.param(memory, marks=SLOWLY) for memory in (650_000, 700_000, GiB))]


@pytest.mark.parametrize("memory", SOME)
def test_the_best_few_are_those_of_all_ways(tiny: Workload, memory: int | None) -> None:
    """Whatever fits: everything or some of it; and fewer ways are estimated for them."""
    every, refused = options(tiny, Devices(8, 2, memory))
    few, also_refused = options(tiny, Devices(8, 2, memory), wanted=4)
    figures = [
        [(way.plan.mesh, way.workload.remat, way.micro_batch_size, way.seconds, way.memory.total) for way in ways[:4]]
        for ways in (every, few)
    ]
    assert figures[0] == figures[1]
    assert len(few) < len(every)
    assert refused == also_refused


@pytest.mark.slow
@pytest.mark.parametrize(("count", "examples"), [(8, 16), (12, 36)])
def test_a_program_of_fewer_groups_needs_the_memory_of_one_for_each_device(
    count: int, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = find_workload(json.dumps(LLAMA | {"vocab_size": 32768}), batch_size=examples, seq_length=24)
    devices = Devices(count, 1, None)
    found = options(workload, devices)[0]
    monkeypatch.setattr(planning_options, "_fewest", lambda groups: groups)
    exact = options(workload, devices)[0]
    assert [one.plan.mesh for one in found] == [one.plan.mesh for one in exact]
    assert [one.memory.total for one in found] == [one.memory.total for one in exact]
    assert [one.products.summed for one in found] == pytest.approx([one.products.summed for one in exact], rel=1e-3)
    monkeypatch.setattr(planning_options, "_fewest", lambda groups: examples)
    more = options(workload, devices)[0]
    assert [one.memory.total for one in found] != [one.memory.total for one in more]


@pytest.mark.parametrize("target", ["h100:8", "v6e:2x4"])
@pytest.mark.parametrize("sizes", [{"data": 4, "fsdp": 1, "tensor": 2}, {"data": 2, "fsdp": 4, "tensor": 1}])
def test_micro_batches_of_a_plan_need_what_they_need_by_themselves(sizes: dict[str, int], target: str) -> None:
    """What of a step does not depend on their size, such as a second copy of all gradients, is not scaled with it."""
    chips = parse_target(target, "--target")
    devices = Devices(8, 1, None, chip=chips.chip)
    with targeting(chips):
        workload = find_workload(json.dumps(LLAMA | {"hidden_size": 256}), batch_size=64, seq_length=256)
        whole, apart = (Planner(workload, devices, size) for size in (64, 16))
        scaled, traced = (
            planner.option(planner.plan(sizes), 16, reshard_after_forward=False).memory for planner in (whole, apart)
        )
    assert scaled.total == pytest.approx(traced.total, rel=0.01)


def test_where_no_state_fits_only_what_recomputes_most_is_estimated(tiny: Workload) -> None:
    every, refused = options(tiny, Devices(8, 2, 1000))
    few, also_refused = options(tiny, Devices(8, 2, 1000), wanted=4)
    assert {way.workload.remat for way in few} == {"full"}
    least = every[0]
    assert (few[0].plan.mesh, few[0].memory) == (least.plan.mesh, least.memory)
    assert refused == also_refused


def test_a_model_that_cannot_recompute_is_estimated_though_no_state_fits(tiny: Workload) -> None:
    def recomputing(remat: str) -> Workload:
        raise ModelError(remat, "it cannot", "leave it out")

    ways, _ = options(dataclasses.replace(tiny, recomputing=recomputing), Devices(8, 2, 1000), wanted=4)
    assert len(ways) >= 4
    assert {way.workload.remat for way in ways} == {"none"}


@pytest.mark.slow
def test_where_a_program_needs_more_than_its_plan_a_way_with_less_is_the_remedy(tiny: Workload) -> None:
    machine = Devices(8, 1, GiB)
    best = options(tiny, machine, wanted=1)[0][0]
    fitting = options(tiny, Devices(8, 1, best.memory.total * 7 // 8))[0][0]
    assert fitting.memory.total <= best.memory.total * 7 // 8
    mesh = ",".join(f"{axis}={size}" for axis, size in fitting.plan.mesh.items())
    how = f"remat {fitting.workload.remat}, micro-batch {fitting.micro_batch_size}"
    assert remedies_for(tiny, best, machine)[0] == (
        f"mesh {mesh} with {how} needs {format_bytes(fitting.memory.total)} by plan"
    )


@pytest.mark.slow
def test_the_less_memory_the_less_is_kept() -> None:
    """On GPUs, whose attention is one kernel: what recomputes it runs it twice."""
    target, sizes = parse_target("h100:8", "--target"), {"data": 1, "fsdp": 8, "tensor": 1}
    config = {**LLAMA, "max_position_embeddings": 256}
    order = ("none", "dots", "attention", "full", "offload")
    with targeting(target):
        plain = find_workload(json.dumps(config), batch_size=8, seq_length=256)
        found = {}
        for remat in order:
            planner = Planner(plain.recomputing(remat), Devices(8, 1, None, chip=target.chip), 8)
            found[remat] = planner.option(planner.plan(sizes), 8, reshard_after_forward=False)
        totals = [found[remat].memory.total for remat in order]
        assert totals == sorted(totals, reverse=True)
        for remat, total in zip(order, totals, strict=True):
            assert options(plain, Devices(8, 1, total, chip=target.chip), sizes)[0][0].workload.remat == remat
        unknown = options(plain, Devices(8, 1, totals[-1]), sizes)[0]  # devices whose link to the host nobody knows
    assert [way.workload.remat for way in unknown] == ["full", "attention", "dots", "none"]
    kernels = {remat: option.products.attention for remat, option in found.items()}
    assert kernels["none"] == kernels["dots"] == kernels["attention"] == kernels["full"] / 2 == kernels["offload"] / 2
    width, heads = config["hidden_size"], config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    kept = 2 * 256 * config["num_hidden_layers"] * (width + heads * width // config["num_attention_heads"])
    assert {remat: option.memory.on_host for remat, option in found.items() if option.memory.on_host} == {
        "offload": kept
    }


def test_micro_batches_and_gathering_again_take_less_memory_and_move_more(tiny: Workload) -> None:
    planner = Planner(tiny, Devices(8, 1, None), 16)
    plan = planner.plan({"data": 1, "fsdp": 4, "tensor": 2})
    whole, halves = (
        planner.option(plan, 16, reshard_after_forward=False),
        planner.option(plan, 8, reshard_after_forward=False),
    )
    again = planner.option(plan, 8, reshard_after_forward=True)
    assert halves.memory.activations < 0.6 * whole.memory.activations
    assert halves.memory.batch == whole.memory.batch

    def gathered(way):
        return sum(one.bytes for one in way.plan.collectives if one.kind == "all-gather" and "fsdp" in one.axis)

    def over_tensor(way):
        return sum(one.bytes for one in way.plan.collectives if one.axis == "tensor" and one.kind == "all-reduce")

    assert gathered(halves) == 2 * gathered(whole)
    assert gathered(again) == 2 * gathered(halves)
    assert over_tensor(halves) == pytest.approx(over_tensor(whole), rel=1e-3)
    assert again.memory.total <= halves.memory.total


def test_what_is_decided_is_kept(tiny: Workload) -> None:
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    ways, _ = options(dataclasses.replace(tiny, mesh=sizes, micro_batch_size=8, recomputing=None), Devices(8, 1, 1000))
    assert [(dict(way.plan.mesh), way.micro_batch_size, way.workload.remat) for way in ways] == [(sizes, 8, "none")]
    given = {"data": 1, "fsdp": 1, "tensor": 8}
    assert {tuple(way.plan.mesh.values()) for way in options(tiny, Devices(8, 1, 1000), given)[0]} == {(1, 1, 8)}


def test_a_batch_that_nothing_divides_is_refused(tiny: Workload) -> None:
    with pytest.raises(DeviceError) as refused:
        options(tiny, Devices(7, 1, None))
    problem = str(refused.value).partition(": --mesh: ")[2]
    assert problem == (
        "no mesh of 7 devices is possible: a batch of 16 examples cannot be split evenly over 7 devices\n"
        "  -> take another number of devices, or another batch"
    )
    with pytest.raises(DeviceError) as refused:
        options(tiny, Devices(32, 4, None), {"data": 32, "fsdp": 1, "tensor": 1})
    assert str(refused.value).endswith(
        "--batch-size: a batch of 16 examples cannot be split evenly over 32 devices\n  -> take a multiple of 32"
    )
    ways, refusals = options(tiny, Devices(32, 4, None))
    assert {way.plan.mesh["data"] * way.plan.mesh["fsdp"] for way in ways} <= {4, 8, 16}
    assert "a batch of 16 examples cannot be split evenly over 32 devices" in refusals
