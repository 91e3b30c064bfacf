"""What one instruction of a compiled program computes and moves on its device: operations, and bytes of its memory.

Matrix products count two operations for each multiplication, attention of a library likewise; everything else is told
by the bytes that it reads and writes. An array that a fusion reads or writes only a part of counts as that part, one
that a TPU keeps in its fast memory, `S(1)`, as nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from redco_cli.sharding.compiled.attention import TRITON, attention_of
from redco_cli.sharding.compiled.hlo import Computation, HloModule, Instruction, size_in_bytes

Kind = Literal["matmul", "attention", "attention backward", "memory"]
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "s8": "int8", "u8": "int8", "f64": "float64"}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_ATTENTION = re.compile(r"fmha|flash|splash|attention", re.IGNORECASE)
_FREE = ("AssumeGatherIndicesInBound", "ConcatBitcast", "AllocateBuffer", "Sharding")
"""Targets of custom calls that no kernel runs for."""
_CUT = ("dynamic-slice", "slice", "gather")
_SAME = ("bitcast", "reshape", "convert", "copy", "transpose", "get-tuple-element")


@dataclass(frozen=True)
class Work:
    """What an instruction does.

    Attributes:
        kind: what it is most: products of matrices, attention of a library, or reading and writing.
        flops: operations of its products.
        dtype: of what is multiplied, as JAX calls it; `tensorfloat32` for float32 whose precision is not asked for.
        bytes: read and written.
        cycles: what the compiler estimates that it takes; 0 where it does not say.
        opaque: of a library's kernel of which nothing but its operands is known.
        width: dims of a head, of attention; 0 where that is not read.
    """

    kind: Kind
    flops: int
    dtype: str
    bytes: int
    cycles: int = 0
    opaque: bool = False
    width: int = 0


def work_of(module: HloModule, computation: Computation, instruction: Instruction) -> Work:
    """What an instruction that runs as a kernel computes and moves.

    Args:
        module: the program.
        computation: where the instruction stands.
        instruction: one that is neither a loop nor a collective.
    """
    moved = _written(module, computation, instruction) + sum(
        _read(module, computation, instruction, place) for place in range(len(instruction.operands))
    )
    estimated = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    cycles = int(estimated[1]) if estimated else 0
    if instruction.opcode == "custom-call":
        return _library(computation, instruction, moved, cycles)
    products = list(_products(module, computation, instruction))
    if not products:
        return Work("memory", 0, "", moved, cycles)
    _, dtype = max(products)
    return Work("matmul", sum(flops for flops, _ in products), dtype, moved, cycles)


def _library(computation: Computation, instruction: Instruction, moved: int, cycles: int) -> Work:
    """A kernel that is called by its name."""
    name = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    target, attributes = name[1] if name else "", instruction.attributes
    operands = [computation[name].type for name in instruction.operands if name in computation]
    named = _ATTENTION.search(target + instruction.name) or target == TRITON
    attention = attention_of(target, instruction, operands) if named else None
    if attention is not None:
        kind: Kind = "attention backward" if attention.backward else "attention"
        return Work(kind, attention.flops, attention.dtype, moved, cycles, width=attention.width)
    gemm = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', attributes)
    if gemm:
        dtype, left = _array(computation[instruction.operands[0]].type)
        summed = math.prod(left[int(dim)] for dim in re.findall(r"\d+", gemm[1]))
        result = math.prod(_array(instruction.type)[1])
        return Work("matmul", 2 * result * summed, _named(dtype, attributes), moved, cycles)
    said = re.search(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)', attributes)  # a Pallas kernel that says so
    if said:
        kind = "attention" if _ATTENTION.search(target + instruction.name + instruction.source) else "matmul"
        return Work(kind, int(said[1]), _dtype(instruction.type), moved, cycles)
    is_free = target in _FREE
    return Work("memory", 0, "", 0 if is_free else moved, cycles, opaque=not is_free)


def _products(module: HloModule, computation: Computation, instruction: Instruction) -> Iterator[tuple[int, str]]:
    """Operations of each matrix product in an instruction, with the dtype of what it multiplies."""
    if instruction.opcode in ("dot", "convolution"):
        (name, left), (other, right) = (_array(computation[one].type) for one in instruction.operands[:2])
        name = other if name == "pred" else name  # a choice by zeros and ones
        result = _array(instruction.type)[1]
        if instruction.opcode == "dot":
            dims = re.search(r"lhs_contracting_dims=\{([^}]*)\}", instruction.attributes)
            summed = math.prod(left[int(dim)] for dim in re.findall(r"\d+", dims[1])) if dims else 1
            yield 2 * math.prod(result) * summed, _named(name, instruction.attributes)
        else:
            yield _convolution(instruction.attributes, left, right, result), _named(name, instruction.attributes)
        return
    for called in instruction.called() if instruction.opcode in ("fusion", "call") else ():
        inner = module.computations.get(called, {})
        for one in inner.values():
            yield from _products(module, inner, one)


def _convolution(attributes: str, left: Sequence[int], right: Sequence[int], result: Sequence[int]) -> int:
    """Operations of a convolution, without those that would multiply padding or the zeros between dilated elements.

    A TPU computes products with batch dims as convolutions in which nearly everything is padding.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 2 * math.prod(result)
    of_left, of_right, of_result = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", attributes)
    said = dict(part.split("=") for part in window[1].split()) if window else {}

    def numbers(key: str, place: int, default: int) -> list[int]:
        return [int(one) for one in said[key].split("x")[place].split("_")] if key in said else [default, default]

    pairs = result[of_result.index("b")] * result[of_result.index("f")] * right[of_right.index("i")]
    for label in (one for one in of_left if one.isdigit()):
        place = int(label)
        pairs *= _meetings(
            size=left[of_left.index(label)],
            taps=right[of_right.index(label)],
            results=result[of_result.index(label)],
            stride=numbers("stride", place, 1)[0],
            before=numbers("pad", place, 0)[0],
            spread=numbers("lhs_dilate", place, 1)[0],
            spread_taps=numbers("rhs_dilate", place, 1)[0],
        )
    return 2 * pairs


def _meetings(*, size: int, taps: int, results: int, stride: int, before: int, spread: int, spread_taps: int) -> int:
    """How many pairs of a result and a tap of the window meet an element, along one dim of a convolution."""
    period = spread // math.gcd(stride, spread)
    found = 0
    for tap in range(taps):
        offset = tap * spread_taps - before
        first = next((one for one in range(period) if (one * stride + offset) % spread == 0), None)
        if first is None:
            continue
        least = max(0, -(-(-offset - first * stride) // (stride * period)))
        most = min(
            (results - 1 - first) // period, ((size - 1) * spread - offset - first * stride) // (stride * period)
        )
        found += max(0, most - least + 1)
    return found


def _read(module: HloModule, computation: Computation, instruction: Instruction, place: int) -> int:
    """Bytes that an instruction reads of one of its operands."""
    operand = computation.get(instruction.operands[place])
    if operand is None or operand.opcode == "constant":
        return 0
    whole = bytes_in_memory(operand.type)
    if instruction.opcode in _CUT:
        return min(whole, bytes_in_memory(instruction.type)) if place == 0 else 0
    if instruction.opcode == "dynamic-update-slice":
        return whole if place == 1 else 0
    if instruction.opcode != "fusion" or not whole:
        return whole
    return min(whole, _used_by(module, instruction, place, whole))


def _used_by(module: HloModule, fusion: Instruction, place: int, whole: int) -> int:
    """Bytes of one of its operands that a fusion looks at."""
    inner = module.computations[fusion.called()[0]]
    name = next((one.name for one in inner.values() if one.opcode == "parameter" and one.operands == (str(place),)), "")
    return _used(module, inner, name, whole)


def _used(module: HloModule, inner: Computation, name: str, whole: int) -> int:
    """Bytes of an array that the computation of a fusion looks at; a TPU's fusions hold others."""
    found = 0
    for user in inner.values():
        if name not in user.operands:
            continue
        if user.opcode in _CUT and user.operands[0] == name:
            found += size_in_bytes(user.type)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue  # written in place
        elif user.opcode == "fusion" and not user.root and _is_the_same(module, user):
            found += _used(module, inner, user.name, whole)
        elif user.opcode == "fusion":
            found += sum(_used_by(module, user, at, whole) for at, one in enumerate(user.operands) if one == name)
        elif user.opcode in _SAME and not user.root:
            found += _used(module, inner, user.name, whole)
        else:
            return whole
    return found


def _is_the_same(module: HloModule, fusion: Instruction) -> bool:
    """Whether a fusion within one only shows it an array in other tiles, as those for tpu7x do of stacks of layers."""
    return all(one.opcode in (*_SAME, "parameter") for one in module.computations[fusion.called()[0]].values())


def _written(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """Bytes of what an instruction writes."""
    if instruction.opcode == "dynamic-update-slice":
        return _written_by(computation, instruction, instruction.type)
    if instruction.opcode != "fusion":
        return bytes_in_memory(instruction.type)
    inner = module.computations[instruction.called()[0]]
    root = next(one for one in inner.values() if one.root)
    if root.opcode != "tuple":
        return _written_by(inner, root, instruction.type)
    parts = [match[0] for match in _ARRAY.finditer(instruction.type)]
    names = root.operands
    if len(parts) != len(names):
        return bytes_in_memory(instruction.type)
    return sum(_written_by(inner, inner[name], part) for name, part in zip(names, parts, strict=True))


def _written_by(inner: Computation, root: Instruction, type_text: str) -> int:
    """Bytes of one result of a fusion, those of the part that is new where the rest is there already."""
    while root.opcode in _SAME and root.operands and root.operands[0] in inner:
        root = inner[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return min(size_in_bytes(inner[root.operands[1]].type), bytes_in_memory(type_text))
    return bytes_in_memory(type_text)


def bytes_in_memory(type_text: str) -> int:
    """Bytes of the arrays of a type that lie in the device's main memory.

    >>> bytes_in_memory("(f32[8]{0:T(128)}, bf16[8]{0:T(128)S(1)}, f32[])")
    36
    """
    return sum(size_in_bytes(match[0]) for match in _ARRAY.finditer(_flat(type_text)) if "S(" not in (match[3] or ""))


def _flat(type_text: str) -> str:
    """A type without the comments that number the elements of a tuple."""
    return re.sub(r"/\*.*?\*/", "", type_text)


def _array(type_text: str) -> tuple[str, list[int]]:
    """Element type and dims of the first array of a type."""
    match = _ARRAY.search(type_text)
    return (match[1], [int(one) for one in re.findall(r"\d+", match[2])]) if match else ("", [])


def _dtype(type_text: str) -> str:
    return _named(_array(type_text)[0], "")


def _named(element: str, attributes: str) -> str:
    """What JAX calls an element type where it is multiplied."""
    if element == "f32":
        return "float32" if re.search(r"operand_precision=\{(?:high|highest)", attributes) else "tensorfloat32"
    return "float8" if element.startswith("f8") else _DTYPES.get(element, element)
