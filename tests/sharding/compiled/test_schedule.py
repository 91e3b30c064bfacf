"""The order of a compiled program: what overlaps, what is called, what is written; as GPUs and TPUs spell it."""

from redco_cli.sharding.compiled.schedule import compiled_kernels
from redco_cli.sharding.compiled.timeline import timeline
from redco_cli.sharding.compiled.traffic import compiled_collectives

MESH = {"data": 1, "fsdp": 4, "tensor": 1}
GPU = """HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gemm_fusion_dot (p0: bf16[64,64], p1: bf16[64,64]) -> bf16[64,64] {
  %p0 = bf16[64,64]{1,0} parameter(0)
  %p1 = bf16[64,64]{1,0} parameter(1)
  ROOT %dot = bf16[64,64]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %state = (s32[], bf16[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[64,64]{1,0} get-tuple-element(%state), index=1
  %ag = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %y = bf16[64,64]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm_fusion_dot
  %gathered = bf16[64,64]{1,0} all-gather-done(%ag)
  %mixed = bf16[64,64]{1,0} custom-call(%y, %gathered), custom_call_target="__cudnn$fmhaSoftmax"
  %ar = bf16[64,64]{1,0} all-reduce-start(%mixed), replica_groups=[1,4]<=[4], to_apply=%add
  %z = bf16[64,64]{1,0} add(%x, %x)
  %reduced = bf16[64,64]{1,0} all-reduce-done(%ar)
  ROOT %next = (s32[], bf16[64,64]{1,0}) tuple(%i, %reduced)
}

%condition (state: (s32[], bf16[64,64])) -> pred[] {
  %state = (s32[], bf16[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}

ENTRY %main (p: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %p = (s32[], bf16[64,64]{1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[64,64]{1,0}) while(%p), condition=%condition, body=%body, """ + (
    'backend_config={"known_trip_count":{"n":"3"}}\n}\n'
)
TPU = """HloModule step, is_scheduled=true, num_partitions=4

%all-reduce-scatter.1 (input: bf16[64,64]) -> bf16[16,64] {
  %input = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups=[1,4]<=[4], to_apply=%add
  %which = u32[] partition-id()
  ROOT %slice = bf16[16,64]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %which), dynamic_slice_sizes={16,64}
}

%gathering (input: bf16[16,64]) -> (bf16[16,64], bf16[64,64]) {
  %input = bf16[16,64]{1,0} parameter(0)
  ROOT %ag = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%input), replica_groups=[1,4]<=[4], dimensions={0}
}

%gathered (input: (bf16[16,64], bf16[64,64])) -> bf16[64,64] {
  %input = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) parameter(0)
  ROOT %done = bf16[64,64]{1,0} all-gather-done(%input)
}

%convolution (a: bf16[64,64], b: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  ROOT %c = bf16[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (p: bf16[64,64], q: bf16[16,64]) -> bf16[16,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  %q = bf16[16,64]{1,0} parameter(1)
  %async-collective-start.1 = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) fusion(%q), kind=kCustom, calls=%gathering
  %fusion.2 = bf16[64,64]{1,0} fusion(%p, %p), kind=kOutput, calls=%convolution
  %async-collective-done.1 = bf16[64,64]{1,0} fusion(%async-collective-start.1), kind=kCustom, calls=%gathered
  ROOT %fusion.3 = bf16[16,64]{1,0} fusion(%async-collective-done.1), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
STEPS = """HloModule step, is_scheduled=true, num_partitions=4

%begin (input: bf16[64,64]) -> (bf16[64,64], bf16[16,64], u32[]) {
  %input = bf16[64,64]{1,0} parameter(0)
  %rs = bf16[16,64]{1,0} reduce-scatter(%input), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
  ROOT %both = (bf16[64,64]{1,0}, bf16[16,64]{1,0}, u32[]) custom-call(%rs), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.5 (a: bf16[64,64], b: bf16[64,64], under: bf16[64,64]) -> (bf16[64,64], bf16[16,64]) {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %under = bf16[64,64]{1,0} parameter(2)
  %c = bf16[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %rs.2 = bf16[16,64]{1,0} reduce-scatter(%under), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
  ROOT %both = (bf16[64,64]{1,0}, bf16[16,64]{1,0}) tuple(%c, %rs.2)
}

%end (input: bf16[16,64]) -> bf16[16,64] {
  %input = bf16[16,64]{1,0} parameter(0)
  ROOT %rs.3 = bf16[16,64]{1,0} reduce-scatter(%input), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

ENTRY %main (p: bf16[64,64], q: bf16[64,64]) -> bf16[16,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  %q = bf16[64,64]{1,0} parameter(1)
  %async-collective-start = (bf16[64,64]{1,0}, bf16[16,64]{1,0}, u32[]) fusion(%q), kind=kCustom, calls=%begin
  %under = bf16[64,64]{1,0} get-tuple-element(%async-collective-start), index=0
  %fusion.9 = (bf16[64,64]{1,0}, bf16[16,64]{1,0}) fusion(%p, %p, %under), kind=kOutput, calls=%async_collective_fusion.5
  %handed = bf16[16,64]{1,0} get-tuple-element(%fusion.9), index=1
  ROOT %async-collective-done = bf16[16,64]{1,0} fusion(%handed), kind=kCustom, calls=%end
}
"""  # noqa: E501 - as it is written
PALLAS = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[64,64], q: bf16[16,64]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  %q = bf16[16,64]{1,0} parameter(1)
  %ag = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%q), replica_groups=[1,4]<=[4], dimensions={0}
  %joined = bf16[64,64]{1,0:T(2,128)(2,1)S(1)} custom-call(%p, %p), custom_call_target="ConcatBitcast"
  %splash_mha_fwd_segmented_residuals.1 = bf16[64,64]{1,0} custom-call(%p, %joined), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
    "xprof_metadata": "{\\"block_q\\": 512}"
}}, metadata={op_name="jit(step)/pallas_call"}
  %gathered = bf16[64,64]{1,0} all-gather-done(%ag)
  ROOT %sum = bf16[64,64]{1,0} add(%gathered, %splash_mha_fwd_segmented_residuals.1)
}
"""  # noqa: E501 - as it is written


ON_SPARSE_CORES = """HloModule step, is_scheduled=true, num_partitions=4

%apart (p: bf16[64,64]) -> bf16[16,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %rs = bf16[16,64]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (p: bf16[64,64]) -> bf16[16,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  %start = ((bf16[64,64]{1,0}), bf16[16,64]{1,0}) async-start(%p), async_execution_thread="sparsecore", calls=%apart
  %c = bf16[64,64]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
  ROOT %done = bf16[16,64]{1,0} async-done(%start)
}
"""


def test_a_gpu_overlaps_what_lies_between_start_and_done():
    found = compiled_collectives(GPU, MESH)
    assert [(one.kind, one.axes, one.count, one.overlapped) for one in found] == [
        ("all-gather", ("fsdp",), 3, True),
        ("all-reduce", ("fsdp",), 3, False),
    ]


def test_a_tpu_spells_them_as_fusions():
    found = compiled_collectives(TPU, MESH)
    assert [(one.kind, one.shape, one.bytes, one.overlapped) for one in found] == [
        ("all-gather", "bf16[64,64]", 64 * 64 * 2, True),
        ("reduce-scatter", "bf16[16,64]", 16 * 64 * 2, False),
    ]


def test_a_step_of_a_collective_is_that_collective_beside_other_work():
    (moved,) = compiled_collectives(STEPS, MESH)
    assert (moved.kind, moved.bytes, moved.count, moved.overlapped) == ("reduce-scatter", 16 * 64 * 2, 1, True)
    idle = STEPS.replace("%c = bf16[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", "%c = copy(%a)")
    assert not compiled_collectives(idle, MESH)[0].overlapped
    sent, work, _ = timeline(STEPS, MESH)
    assert (sent.kind, sent.bytes) == ("reduce-scatter", 3 * 16 * 64 * 2)  # of the result, not of all that is handed on
    assert work.kind == "matmul"


def test_a_collective_on_the_sparse_cores_of_a_tpu_runs_beside_its_products():
    (moved,) = compiled_collectives(ON_SPARSE_CORES, MESH)
    assert (moved.kind, moved.bytes, moved.count, moved.overlapped) == ("reduce-scatter", 16 * 64 * 2, 1, True)
    idle = ON_SPARSE_CORES.replace("convolution(%p, %p), dim_labels=bf_io->bf", "copy(%p)")
    assert not compiled_collectives(idle, MESH)[0].overlapped
    assert [type(one).__name__ for one in timeline(ON_SPARSE_CORES, MESH)] == ["Transfer", "Work", "Arrival"]


def test_kernels_are_counted_with_their_loops():
    kernels = compiled_kernels(GPU)
    assert kernels.libraries == {"__cudnn$fmhaSoftmax": 3}
    assert kernels.attention == ("__cudnn$fmhaSoftmax",)
    assert kernels.launches == 3 * 5
    assert (kernels.largest[0].shape, kernels.largest[0].times) == ("bf16[64,64]", 3 * 5)
    assert compiled_kernels(TPU).attention == ()


def test_a_kernel_of_pallas_is_told_by_its_name():
    kernels = compiled_kernels(PALLAS)
    assert kernels.libraries == {"ConcatBitcast": 1, "splash_mha_fwd_segmented_residuals": 1}
    assert kernels.attention == ("splash_mha_fwd_segmented_residuals",)
    (one,) = compiled_collectives(PALLAS, MESH)
    assert one.overlapped
