"""A compiled program as events: in order, loops kept, transfers with the devices that they join."""

import json

import pytest

from redco_cli.sharding.compiled.events import Arrival, Loop, Span, Transfer, from_json, to_json
from redco_cli.sharding.compiled.timeline import timeline
from redco_cli.sharding.compiled.work import Work
from redco_cli.sharding.rings import ring_bytes

MESH = {"data": 2, "fsdp": 4, "tensor": 1}
GPU = """HloModule step, is_scheduled=true, num_partitions=8

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%product (p0: bf16[64,32], p1: bf16[32,32]) -> bf16[64,32] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,32]{1,0} parameter(1)
  ROOT %dot = bf16[64,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], bf16[64,32], bf16[8,32])) -> (s32[], bf16[64,32], bf16[8,32]) {
  %s = (s32[], bf16[64,32]{1,0}, bf16[8,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %h = bf16[64,32]{1,0} get-tuple-element(%s), index=1
  %w = bf16[8,32]{1,0} get-tuple-element(%s), index=2
  %start = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) all-gather-start(%w), replica_groups=[2,4]<=[8], dimensions={0}
  %halved = bf16[64,32]{1,0} multiply(%h, %h)
  %done = bf16[32,32]{1,0} all-gather-done(%start)
  %out = bf16[64,32]{1,0} fusion(%halved, %done), kind=kCustom, calls=%product
  ROOT %t = (s32[], bf16[64,32]{1,0}, bf16[8,32]{1,0}) tuple(%i, %out, %w)
}

%condition (s: (s32[], bf16[64,32], bf16[8,32])) -> pred[] {
  %s = (s32[], bf16[64,32]{1,0}, bf16[8,32]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (h: bf16[64,32], w: bf16[8,32]) -> f32[128] {
  %h = bf16[64,32]{1,0} parameter(0)
  %w = bf16[8,32]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %t = (s32[], bf16[64,32]{1,0}, bf16[8,32]{1,0}) tuple(%zero, %h, %w)
  %loop = (s32[], bf16[64,32]{1,0}, bf16[8,32]{1,0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %wide = f32[128]{0} iota(), iota_dimension=0
  ROOT %sum.1 = f32[128]{0} all-reduce(%wide), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum
}
"""
PLACES = [(number // 4, ()) for number in range(8)]


def test_a_program_of_a_gpu():
    gathered = 32 * 32 * 2
    turn = (
        Transfer("start", "all-gather", ("fsdp",), gathered * 3 // 4, Span(4, 1, ())),
        Work("memory", 0, "", 3 * 64 * 32 * 2),
        Arrival("start"),
        Work("matmul", 2 * 64 * 32 * 32, "bfloat16", gathered + 2 * 64 * 32 * 2),
    )
    summed = (Transfer("sum.1", "all-reduce", ("data",), 512, Span(2, 2, ())), Arrival("sum.1"))
    found = timeline(GPU, MESH, PLACES)
    assert found == (Loop(12, True, turn), Work("memory", 0, "", 512), *summed)
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_a_loop_whose_turns_nobody_knows_counts_once():
    (loop, *_) = timeline(GPU.replace('"known_trip_count":{"n":"12"}', ""), MESH, PLACES)
    assert (loop.times, loop.known) == (1, False)


TPU = """HloModule step, is_scheduled=true, num_partitions=4

%start_gather (p: bf16[8,32]) -> (bf16[8,32], bf16[32,32], u32[]) {
  %p = bf16[8,32]{1,0} parameter(0)
  %gather = bf16[32,32]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %begin = (bf16[8,32]{1,0}, bf16[32,32]{1,0}, u32[]{:S(2)}) custom-call(%gather), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (q0: bf16[32,32], q1: bf16[64,32], q2: bf16[32,32]) -> (bf16[64,32], bf16[32,32]) {
  %q0 = bf16[32,32]{1,0} parameter(0)
  %q1 = bf16[64,32]{1,0} parameter(1)
  %q2 = bf16[32,32]{1,0} parameter(2)
  %dot = bf16[64,32]{1,0} dot(%q1, %q2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %both = (bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%dot, %q0)
}

%end_gather (r: bf16[32,32]) -> bf16[32,32] {
  %r = bf16[32,32]{1,0} parameter(0)
  ROOT %ended = bf16[32,32]{1,0} custom-call(%r), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: bf16[8,32], h: bf16[64,32], v: bf16[32,32], far: f32[16]) -> bf16[32,32] {
  %w = bf16[8,32]{1,0} parameter(0)
  %h = bf16[64,32]{1,0} parameter(1)
  %v = bf16[32,32]{1,0} parameter(2)
  %far = f32[16]{0} parameter(3)
  %copy-start = (f32[16]{0:S(5)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%far)
  %async-collective-start = (bf16[8,32]{1,0}, bf16[32,32]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, \
calls=%start_gather
  %under = bf16[32,32]{1,0} get-tuple-element(%async-collective-start), index=1
  %step = (bf16[64,32]{1,0}, bf16[32,32]{1,0}) fusion(%under, %h, %v), kind=kOutput, calls=%async_collective_fusion.1
  %handed = bf16[32,32]{1,0} get-tuple-element(%step), index=1
  %copy-done = f32[16]{0:S(5)} copy-done(%copy-start)
  ROOT %async-collective-done = bf16[32,32]{1,0} fusion(%handed), kind=kCustom, calls=%end_gather
}
"""


def test_a_program_of_a_tpu():
    places = [(0, (number % 2, number // 2)) for number in range(4)]
    host, gather, work, back, arrived = timeline(TPU, {"data": 1, "fsdp": 4, "tensor": 1}, places)
    assert host == Transfer("copy-start", "host copy", (), 64, Span(1, 1, ()))
    assert gather == Transfer("async-collective-start", "all-gather", ("fsdp",), 1536, Span(4, 1, (2, 2)))
    assert (work.kind, work.flops) == ("matmul", 2 * 64 * 32 * 32)
    assert (back, arrived) == (Arrival("copy-start"), Arrival("async-collective-start"))


def test_among_a_single_device_nothing_moves():
    alone = TPU.replace("{{0,1,2,3}}", "{{0},{1},{2},{3}}")
    assert [one.kind for one in timeline(alone) if isinstance(one, Transfer)] == ["host copy"]


def test_what_a_ring_sends():
    assert ring_bytes("reduce-scatter", 100, 4) == 300
    assert ring_bytes("all-to-all", 100, 4) == 75


CHOICE = """HloModule step, is_scheduled=true, num_partitions=1

%near (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %once = f32[8]{0} negate(%x)
}

%far (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %first = f32[8]{0} negate(%y)
  ROOT %second = f32[8]{0} negate(%first)
}

ENTRY %main (i: s32[], z: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %z = f32[8]{0} parameter(1)
  ROOT %either = f32[8]{0} conditional(%i, %z, %z), branch_computations={%near, %far}
}
"""
ONE = Work("memory", 0, "", 64)


def test_branches_count_by_how_often_they_are_taken():
    assert timeline(CHOICE) == (ONE, ONE)
    assert timeline(CHOICE, shares={2: (0.75, 0.25)}) == (Loop(0.75, True, (ONE,)), Loop(0.25, True, (ONE, ONE)))
    swapped = CHOICE.replace("branch_computations={%near, %far}", "true_computation=%near, false_computation=%far")
    assert timeline(swapped, shares={2: (1.0, 0.0)}) == (Loop(1.0, True, (ONE, ONE)),)


MEGASCALE = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[64]) -> bf16[64] {
  %x = bf16[64]{0} parameter(0)
  %token = token[] after-all()
  %send.1 = (bf16[64]{0}, u32[]{:S(2)}, token[]) send(%x, %token), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="sum_0",\
_xla_megascale_target="{1:2}x{0:1}",_xla_megascale_transfer_type="TYPE"}
  %recv.1 = (bf16[64]{0}, u32[]{:S(2)}, token[]) recv(%token), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="sum_0",\
_xla_megascale_target="{1:2}x{0:1}",_xla_megascale_transfer_type="TYPE"}
  %send-done.1 = token[] send-done(%send.1), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %recv-done.1 = (bf16[64]{0}, token[]) recv-done(%recv.1), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %there = bf16[64]{0} get-tuple-element(%recv-done.1), index=0
}
"""


@pytest.mark.parametrize(
    ("said", "kind", "sent"),
    [
        ("ALL_REDUCE", "all-reduce", 128),
        ("ALL_GATHER", "all-gather", 128),
        ("REDUCE_SCATTER", "reduce-scatter", 64),
        ("ALL_TO_ALL", "all-to-all", 64),
    ],
)
def test_slices_send_each_other_what_their_hosts_hand_on(said, kind, sent):
    found = timeline(
        MEGASCALE.replace("TYPE", said), {"data": 2, "fsdp": 2, "tensor": 1}, [(0, ())] * 2 + [(1, ())] * 2
    )
    assert found == (Transfer("sum_0", kind, ("data",), sent, Span(2, 2, ())), Arrival("sum_0"))
