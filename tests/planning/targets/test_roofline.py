"""A step as a plan knows it, in the form of a compiled one."""

from types import SimpleNamespace

import pytest

from redco_cli.chips.target import parse_target
from redco_cli.planning.targets.roofline import ATTENTION_BACKWARD, TOUCHED, TOUCHED_BY_TENSOR, planned_events
from redco_cli.sharding.compiled.events import HOST, Arrival, Transfer
from redco_cli.sharding.compiled.work import Work
from redco_cli.sharding.program.flops import Products

CHIPS = parse_target("v6e:2x4", "--target")
FORWARD = Products(flops=8000, attention=800, written=1600, width=64)
STEP = Products(flops=3 * 7200 + 800, attention=800, written=0, width=64, summed=4000)


def option(tensor=1, on_host=0):
    memory = SimpleNamespace(on_host=on_host, parameters=10, optimizer=20, gradients=10)
    plan = SimpleNamespace(mesh={"data": 1, "fsdp": 8 // tensor, "tensor": tensor}, collectives=[])
    workload = SimpleNamespace(dtype="bfloat16", passes=lambda size: 2)
    return SimpleNamespace(
        workload=workload, plan=plan, memory=memory, products=STEP, update_flops=0, micro_batch_size=8
    )


def done(events, kind):
    return [event for event in events if isinstance(event, Work) and event.kind == kind]


def test_products_and_attention_are_those_of_both_passes():
    events = planned_events(option(), FORWARD, 3, CHIPS)
    assert [one.flops for one in done(events, "matmul")] == [7200 // 8, 2 * 7200 // 8]
    assert sum(one.flops for one in done(events, "attention")) == 800 // 8
    assert [one.flops for one in done(events, "attention backward")] == [ATTENTION_BACKWARD["tpu"] * 800 // 8]
    assert {one.width for one in done(events, "attention")} == {64}


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_what_all_devices_along_tensor_have_is_read_and_written_by_each(tensor):
    moved = sum(one.bytes for one in done(planned_events(option(tensor), FORWARD, 3, CHIPS), "memory"))
    elementwise, updated = (TOUCHED["tpu"] + TOUCHED_BY_TENSOR * tensor) * 1600 / 8, 2 * (10 + 20 + 10)
    assert moved == pytest.approx(elementwise + 2 * 4000 / 8 + updated, abs=2)


def test_what_waits_on_the_host_leaves_in_the_forward_pass_and_comes_back_in_the_other():
    events = planned_events(option(on_host=100), FORWARD, 3, CHIPS)
    copies = [event for event in events if isinstance(event, Transfer) and event.kind == HOST]
    assert [one.bytes for one in copies] == [2 * 100, 2 * 100]
    backward = events.index(done(events, "attention backward")[0])
    leaves, comes = (events.index(one) for one in copies)
    arrived = [events.index(Arrival(one.name)) for one in copies]
    assert leaves < arrived[0] < comes < backward < arrived[1]
