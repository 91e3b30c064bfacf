"""What a kernel of fused attention computes, as a compiled program tells: cuDNN's, and those of Pallas."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from redco_cli.sharding.bands import causal_share, flash_share, window_share
from redco_cli.sharding.compiled.hlo import Instruction

_FORWARD, _BACKWARD = 2, 5
"""Matrix products of flash attention: Q·K and P·V; in the backward pass Q·K again, dV, dP, dQ and dK (FlashAttention-2,
arXiv:2307.08691, section 3)."""
_OF_A_KERNEL = {"": _FORWARD, "queries": 3, "keys and values": 4, "all": _BACKWARD}
"""Where the backward pass is two kernels, both compute Q·K and dP."""
_SCORES = r'"intermediate_tensor_shape": ?\{"element_type": ?"\w+", ?"dimensions": ?\[([^\]]*)\]'
TRITON = "__gpu$xla.gpu.triton"
"""What a custom call to a Pallas kernel of a GPU has as its target, whichever it is."""
_FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Attention:
    """A kernel of attention.

    Attributes:
        backward: it computes gradients.
        flops: operations of its products.
        dtype: of what is multiplied.
        width: dims of a head.
    """

    backward: bool
    flops: int
    dtype: str
    width: int


def attention_of(target: str, instruction: Instruction, operands: Sequence[str]) -> Attention | None:
    """What a custom call computes as attention; None where that cannot be told.

    Args:
        target: of the call.
        instruction: the call.
        operands: types of what it takes.
    """
    shape = re.search(_SCORES, instruction.attributes)
    if shape:
        return _of_cudnn(
            target, instruction, _arrays(operands[0])[0][1], [int(one) for one in re.findall(r"\d+", shape[1])]
        )
    if target == TRITON:
        return _of_a_gpu(instruction, operands)
    return _of_a_tpu(instruction, operands) if target == "tpu_custom_call" else None


def triton_kernel(instruction: Instruction) -> str:
    """The name of the Pallas kernel that a call of `TRITON` runs."""
    return instruction.source.removesuffix("/pallas_call").rpartition("/")[2]


def _of_cudnn(target: str, instruction: Instruction, queries: list[int], scores: list[int]) -> Attention:
    is_backward = target.endswith("Backward")
    flops = 2 * (_BACKWARD if is_backward else _FORWARD) * math.prod(scores) * queries[-1]
    dtype = next((_FLOATS[element] for element, _ in _arrays(instruction.type) if element in _FLOATS), "bfloat16")
    return Attention(is_backward, int(flops * _seen(instruction.attributes, scores[-1])), dtype, queries[-1])


def _seen(attributes: str, length: int) -> float:
    """Which share of its scores an attention of cuDNN computes."""
    if not re.search(r'"mask_type": ?"(?:PADDING_)?CAUSAL', attributes):
        return 1.0
    window = re.search(r'"sliding_window_length": ?"?([1-9]\d*)', attributes)
    return causal_share(length, int(window[1]) if window else None)


def _of_a_gpu(instruction: Instruction, operands: Sequence[str]) -> Attention | None:
    """A kernel of `models/kernels/flash`, on [batch, length, heads, head_dim] with the queries first."""
    name = triton_kernel(instruction)
    dtype, queries = _arrays(operands[0])[0]
    share = flash_share(name, queries[1])
    if share is None:
        return None
    gradients = "keys and values" if "dkv" in name else "queries" if "dq" in name else ""
    flops = 2 * _OF_A_KERNEL[gradients] * math.prod(queries) * queries[1] * share
    return Attention(bool(gradients), int(flops), _FLOATS[dtype], queries[-1])


def _of_a_tpu(instruction: Instruction, operands: Sequence[str]) -> Attention | None:
    """A Pallas kernel of flash attention, on [..., heads, length, head_dim] with the queries first.

    Which blocks of scores it leaves out stands in arrays of their numbers, whose values no program says, but their dims
    do, [.., blocks of queries, those of keys that one of them has]: as many as there are under a causal mask, which
    leaves (n + 1) / 2n of the blocks, fewer within a window.

    Its backward pass is two kernels, for keys and values and for queries, each of which computes the scores and the
    gradients of their softmax anew; or one, that has the gradients of the queries among its results too.
    """
    types = [array for operand in operands for array in _arrays(operand)[:1]]
    wide = [dims for element, dims in types if element in _FLOATS and len(dims) >= 3]
    if len(wide) < 2:
        return None
    queries, keys = wide[:2]
    gradients = _gradients_of(instruction)
    flops = 2 * _OF_A_KERNEL[gradients] * math.prod(queries) * keys[-2]
    blocks = next((dims[-2:] for element, dims in types if element in ("s8", "s32") and len(dims) == 3), None)
    if blocks is not None:
        flops = int(flops * window_share(max(blocks), min(blocks)))
    return Attention(bool(gradients), flops, "bfloat16", queries[-1])


def _gradients_of(instruction: Instruction) -> str:
    """Whose gradients a Pallas kernel computes; empty for the forward pass."""
    found = re.search(r"dkv|dq|bwd|backward", instruction.name)
    if found is None or found[0] == "dq":
        return "" if found is None else "queries"
    halves = [element for element, _ in _arrays(instruction.type) if element in ("bf16", "f16")]
    return "keys and values" if found[0] == "dkv" and len(halves) == 2 else "all"


def _arrays(type_text: str) -> list[tuple[str, list[int]]]:
    """Element type and dims of each array of a type."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", re.sub(r"/\*.*?\*/", "", type_text))
    return [(element, [int(one) for one in re.findall(r"\d+", dims)]) for element, dims in found]
