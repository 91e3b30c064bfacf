"""Operations and bytes of single instructions, reckoned by hand."""

import pytest

from redco_cli.sharding.compiled.hlo import parse
from redco_cli.sharding.compiled.work import Work, work_of

HEAD = "HloModule step, is_scheduled=true, num_partitions=8\n\n"


def found(text, name):
    """What one instruction of a module does."""
    module = parse(HEAD + text)
    computation = module.computations[module.entry]
    return work_of(module, computation, computation[name])


def test_a_product_in_a_fusion():
    text = """%product (p0: bf16[64,32], p1: bf16[32,16]) -> f32[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  ROOT %dot = f32[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %fusion = f32[64,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
}
"""
    assert found(text, "fusion") == Work("matmul", 2 * 64 * 32 * 16, "bfloat16", 2 * (64 * 32 + 32 * 16) + 4 * 64 * 16)


@pytest.mark.parametrize(
    ("asked", "dtype"), [("", "tensorfloat32"), (", operand_precision={highest,highest}", "float32")]
)
def test_float32_is_multiplied_as_it_was_asked_for(asked, dtype):
    text = f"""ENTRY %main (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %b = f32[4,2]{{1,0}} parameter(1)
  ROOT %dot = f32[8,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{asked}
}}
"""
    assert (found(text, "dot").flops, found(text, "dot").dtype) == (2 * 8 * 4 * 2, dtype)


def test_a_batched_product_as_a_tpu_writes_it():
    """Of 4 x 4 places of the window and 4 results along its dim, one each is no padding."""
    text = """ENTRY %main (a: bf16[4,512,512,1], b: bf16[4,64,512,1]) -> bf16[4,512,4,64] {
  %a = bf16[4,512,512,1]{3,2,1,0} parameter(0)
  %b = bf16[4,64,512,1]{3,2,1,0} parameter(1)
  ROOT %conv = bf16[4,512,4,64]{3,2,1,0} convolution(%a, %b), window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, \
dim_labels=b0f1_1oi0->b01f
}
"""
    assert found(text, "conv").flops == 2 * 4 * 512 * 512 * 64 * 4


def test_a_dilated_product_as_a_tpu_writes_it():
    """`lhs_dilate=4 stride=3 size=4`: result k meets the element k with one tap alone."""
    text = """ENTRY %main (a: f32[4,4,64,32], b: f32[4,4,512,32]) -> f32[4,4,64,512] {
  %a = f32[4,4,64,32]{3,2,1,0} parameter(0)
  %b = f32[4,4,512,32]{3,2,1,0} parameter(1)
  ROOT %conv = f32[4,4,64,512]{3,2,1,0} convolution(%a, %b), window={size=4x4 stride=3x3 lhs_dilate=4x4}, \
dim_labels=01bf_01oi->01bf
}
"""
    assert found(text, "conv").flops == 2 * (4 * 4) * 64 * 512 * 32


def test_an_ordinary_convolution_leaves_out_its_padding():
    text = """ENTRY %main (a: f32[2,8,3], b: f32[3,3,5]) -> f32[2,8,5] {
  %a = f32[2,8,3]{2,1,0} parameter(0)
  %b = f32[3,3,5]{2,1,0} parameter(1)
  ROOT %conv = f32[2,8,5]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f
}
"""
    assert found(text, "conv").flops == 2 * 2 * 5 * 3 * (8 * 3 - 2)


ATTENTION = """ENTRY %main (q: bf16[1,8192,32,128]) -> (bf16[1,32,8192,128], u8[0]) {
  %q = bf16[1,8192,32,128]{3,2,1,0} parameter(0)
  ROOT %fmha = (bf16[1,32,8192,128]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": \
["1", "32", "8192", "8192"]}, "mask_type": "MASK"}}
}
"""


@pytest.mark.parametrize(
    ("target", "mask", "products", "kind"),
    [
        ("fmhaSoftmax", "NO_MASK", 2, "attention"),
        ("fmhaSoftmax", "CAUSAL", 1, "attention"),
        ("fmhaSoftmaxBackward", "PADDING_CAUSAL", 2.5, "attention backward"),
    ],
)
def test_attention_of_cudnn(target, mask, products, kind):
    work = found(ATTENTION.replace("fmhaSoftmax", target).replace('"MASK"', f'"{mask}"'), "fmha")
    size = 2 * 32 * 8192 * 128
    assert work == Work(kind, int(products * 2 * 32 * 8192 * 8192 * 128), "bfloat16", 4 * size, width=128)


def test_a_window_of_cudnn_leaves_out_what_is_far():
    text = ATTENTION.replace('"mask_type": "MASK"', '"mask_type": "CAUSAL", "sliding_window_length": 1024')
    assert found(text, "fmha").flops == 2 * 2 * 32 * 8192 * 1024 * 128


OF_A_GPU = """ENTRY %main (q: bf16[2,4096,8,128], k: bf16[2,4096,2,128]) -> bf16[2,4096,8,128] {
  %q = bf16[2,4096,8,128]{3,2,1,0} parameter(0)
  %k = bf16[2,4096,2,128]{3,2,1,0} parameter(1)
  ROOT %pallas_call.0 = bf16[2,4096,8,128]{3,2,1,0} custom-call(%q, %k, %k), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/jvp(jit(flash_attention))/NAME/pallas_call"}
}
"""


@pytest.mark.parametrize(
    ("kernel", "products", "kind"),
    [
        ("flash_forward", 1, "attention"),
        ("flash_forward_window_1024", 0.5, "attention"),
        ("flash_backward_dq", 1.5, "attention backward"),
        ("flash_backward_dkv", 2, "attention backward"),
    ],
)
def test_attention_of_our_kernels_for_gpus(kernel, products, kind):
    work = found(OF_A_GPU.replace("NAME", kernel), "pallas_call.0")
    queries = 2 * 4096 * 8 * 128
    assert work == Work(
        kind, int(products * 2 * queries * 4096), "bfloat16", 2 * 2 * (queries + queries // 4), width=128
    )


def test_of_another_kernel_of_pallas_nothing_is_known():
    work = found(OF_A_GPU.replace("NAME", "mine"), "pallas_call.0")
    assert (work.kind, work.flops, work.opaque) == ("memory", 0, True)


STACKED = """%update (p0: bf16[32,8,128], p1: s32[], p2: bf16[8,128]) -> bf16[32,8,128] {
  %p0 = bf16[32,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[8,128]{1,0} parameter(2)
  %one = bf16[1,8,128]{2,1,0} bitcast(%p2)
  %zero = s32[] constant(0)
  ROOT %dus = bf16[32,8,128]{2,1,0} dynamic-update-slice(%p0, %one, %p1, %zero, %zero)
}

%cut (p0: bf16[32,8,128], p1: s32[]) -> f32[8,128] {
  %p0 = bf16[32,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %ds = bf16[1,8,128]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,128}
  %flat = bf16[8,128]{1,0} bitcast(%ds)
  ROOT %wide = f32[8,128]{1,0} convert(%flat)
}

%around (p0: bf16[32,8,128], p1: s32[]) -> f32[8,128] {
  %p0 = bf16[32,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %within = f32[8,128]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%cut
  ROOT %less = f32[8,128]{1,0} negate(%within)
}

ENTRY %main (stack: bf16[32,8,128], at: s32[], row: bf16[8,128]) -> f32[8,128] {
  %stack = bf16[32,8,128]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %row = bf16[8,128]{1,0} parameter(2)
  %kept = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy(%row)
  %written = bf16[32,8,128]{2,1,0} fusion(%stack, %at, %row), kind=kLoop, calls=%update
  %read_within = f32[8,128]{1,0} fusion(%written, %at), kind=kLoop, calls=%around
  ROOT %read = f32[8,128]{1,0} fusion(%written, %at), kind=kLoop, calls=%cut
}
"""


def test_a_part_of_a_stack_counts_as_that_part():
    row = 8 * 128 * 2
    assert found(STACKED, "written").bytes == row + row + 4
    assert found(STACKED, "read").bytes == row + 2 * row + 4
    assert found(STACKED, "read_within").bytes == row + 2 * row + 4


IN_TILES = """%tiles (p0: bf16[32,8,128]) -> bf16[32,8,128] {
  %p0 = bf16[32,8,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copied = bf16[32,8,128]{2,1,0:T(8,128)(2,1)} copy(%p0)
}

"""


def test_a_stack_that_is_seen_in_other_tiles_is_not_read():
    """Those for tpu7x show themselves stacks of layers so, before they take one of them."""
    text = IN_TILES + STACKED.replace(
        "  %within = f32[8,128]{1,0} fusion(%p0,",
        "  %tiled = bf16[32,8,128]{2,1,0} fusion(%p0), kind=kLoop, calls=%tiles\n"
        "  %within = f32[8,128]{1,0} fusion(%tiled,",
    )
    assert text.count("calls=%tiles") == 1
    assert found(text, "read_within") == found(STACKED, "read_within")


def test_what_stays_in_the_fast_memory_of_a_tpu_costs_nothing():
    assert found(STACKED, "kept") == Work("memory", 0, "", 8 * 128 * 2)


FLASH = """ENTRY %main (q: bf16[3,32,8192,128], k: bf16[3,8,8192,128], blocks: s8[1,4,4]) -> bf16[3,32,8192,128] {
  %q = bf16[3,32,8192,128]{3,2,1,0} parameter(0)
  %k = bf16[3,8,8192,128]{3,2,1,0} parameter(1)
  %blocks = s8[1,4,4]{2,1,0} parameter(2)
  ROOT %splash_mha_KIND.5 = bf16[3,32,8192,128]{3,2,1,0} custom-call(%blocks, %q, %k, %k), \
custom_call_target="tpu_custom_call"
}
"""


@pytest.mark.parametrize(
    ("kind", "results", "products"),
    [
        ("fwd_residuals", 1, 2),
        ("dq_no_residuals", 1, 3),
        ("dkv_no_residuals", 2, 4),
        ("dkv_no_residuals", 3, 5),  # with the gradients of the queries
    ],
)
def test_flash_attention_of_a_tpu_leaves_out_masked_blocks(kind, results, products):
    """Of 4 x 4 blocks of scores, a causal mask leaves 10."""
    text = FLASH.replace("KIND.5 = bf16[3,32,8192,128]{3,2,1,0}", "KIND.5 = RESULT").replace("KIND", kind)
    result = ", ".join(["f32[3,32,8192]", *results * ["bf16[3,32,8192,128]{3,2,1,0}"]])
    work = found(text.replace("RESULT", f"({result})"), f"splash_mha_{kind}.5")
    assert (work.kind, work.opaque) == ("attention" if products == 2 else "attention backward", False)
    assert work.flops == 2 * products * 3 * 32 * 8192 * 8192 * 128 * 10 // 16
    assert work.width == 128


@pytest.mark.parametrize(("blocks", "kind"), [("4,2", "fwd_residuals"), ("2,4", "dkv_no_residuals")])
def test_within_a_window_it_leaves_out_more(blocks, kind):
    """Each block of queries has two of keys, but for the first: 7 of 16, whichever of the two comes first."""
    work = found(FLASH.replace("KIND", kind).replace("s8[1,4,4]", f"s8[1,{blocks}]"), f"splash_mha_{kind}.5")
    assert work.flops == 2 * (2 if kind == "fwd_residuals" else 5) * 3 * 32 * 8192 * 8192 * 128 * 7 // 16


def test_a_kernel_of_a_library_that_nobody_knows_is_opaque():
    text = (
        ATTENTION.replace("__cudnn$fmhaSoftmax", "my_kernel")
        .replace("cudnn_fmha", "other")
        .replace("intermediate", "x")
    )
    assert found(text, "fmha") == Work("memory", 0, "", 4 * 2 * 32 * 8192 * 128, opaque=True)


def test_the_estimate_of_the_compiler_is_read():
    text = """ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %twice = f32[8]{0} add(%a, %a), backend_config={"window_config":{"estimated_cycles":"2239"}}
}
"""
    assert found(text, "twice") == Work("memory", 0, "", 3 * 32, 2239)
