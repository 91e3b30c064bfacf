"""What a compiled program does while a collective is under way, and which kernels it runs.

The text of a module that is compiled for a GPU or a TPU is in the order in which it runs. A collective there is two
instructions, `all-gather-start` and `all-gather-done`; what lies between them runs while bytes move. A TPU's may be
fusions of these names (`async-collective-start`), between which fusions `async_collective_fusion` multiply matrices and
hand the bytes on, a step each; and one that scatters what it has reduced is a fusion `all-reduce-scatter` of an
all-reduce and a slice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from redco_cli.sharding.compiled.attention import TRITON, triton_kernel
from redco_cli.sharding.compiled.hlo import Computation, HloModule, Instruction, parse, size_in_bytes, trip_count

SCATTERED = "all-reduce-scatter"
_STEP = "async_collective_fusion"
_WORK = ("dot", "convolution")
_LIBRARIES = re.compile(r'custom_call_target="([^"]*)"')
_PALLAS = "tpu_custom_call"
_ATTENTION = re.compile(r"fmha|flash|splash|attention", re.IGNORECASE)
_MATMUL = re.compile(r"gemm|matmul|cublas|triton|convolution", re.IGNORECASE)
NO_KERNEL = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
)
_LARGEST = 8


@dataclass(frozen=True)
class Written:
    """An array that a kernel writes to memory.

    Attributes:
        shape: its type as HLO writes it: `bf16[16,4096]`.
        bytes: of it.
        times: how often in a step.
        source: where in the program it comes from.
    """

    shape: str
    bytes: int
    times: int
    source: str


@dataclass(frozen=True)
class Kernels:
    """What runs in one step.

    Attributes:
        launches: how many kernels, collectives among them.
        libraries: what is not compiled but called, by the name of its target, with how often.
        largest: the largest arrays that are written, each shape of each place once, largest first.
    """

    launches: int
    libraries: dict[str, int]
    largest: tuple[Written, ...]

    @property
    def attention(self) -> tuple[str, ...]:
        """The libraries' kernels of attention; empty where it is made of products."""
        return tuple(name for name in self.libraries if _ATTENTION.search(name))


def is_start(instruction: Instruction) -> bool:
    """Whether it begins a collective, or a copy, that another instruction ends."""
    return instruction.opcode.endswith("-start") or instruction.name.startswith("async-collective-start")


def is_step(instruction: Instruction) -> bool:
    """Whether it moves on what a TPU's `async-collective-start` has begun: the same collective, beside other work."""
    return instruction.opcode == "fusion" and instruction.called()[0].startswith(_STEP)


def is_overlapped(module: HloModule, computation: Computation, start: Instruction) -> bool:
    """Whether a matrix product or attention runs between the start of a collective and its end.

    Args:
        module: the program, in the order in which it runs.
        computation: where the instruction stands.
        start: begins a collective.
    """
    if not is_start(start):
        return False
    names = {start.name}
    after = iter(computation.values())
    for one in after:
        if one.name == start.name:
            break
    for one in after:
        if names & set(one.operands):
            if one.opcode == "get-tuple-element" or is_start(one):
                names.add(one.name)
            elif one.opcode.endswith("-done") or one.name.startswith("async-collective-done"):
                return False
            elif is_step(one):
                if _is_work(module, one):
                    return True
                names.add(one.name)
        elif _is_work(module, one):
            return True
    return False


def compiled_kernels(text: str) -> Kernels:
    """The kernels of a compiled program, those of loops as often as these turn.

    Args:
        text: of an optimised HLO module.
    """
    module = parse(text)
    launches, libraries = 0, dict[str, int]()
    written: dict[tuple[str, str], Written] = {}
    for one, times in _run(module, module.entry, 1):
        launches += times
        for name in _of_libraries(one):
            libraries[name] = libraries.get(name, 0) + times
        for array in () if _is_in_place(module, one) else re.findall(r"\b[a-z]\w*\[[\d,]*\]", one.type):
            known = written.get((array, one.source))
            before = 0 if known is None else known.times
            written[array, one.source] = Written(array, size_in_bytes(array), before + times, one.source)
    largest = sorted(written.values(), key=lambda one: -one.bytes)[:_LARGEST]
    return Kernels(launches, dict(sorted(libraries.items())), tuple(largest))


def _of_libraries(instruction: Instruction) -> list[str]:
    """The kernel that an instruction calls, if any; those of Pallas have one target, and are told by name."""
    if instruction.opcode != "custom-call":
        return []
    names: list[str] = _LIBRARIES.findall(instruction.attributes)
    if names == [TRITON]:
        return [triton_kernel(instruction)]
    return [instruction.name.rpartition(".")[0] or instruction.name if name == _PALLAS else name for name in names]


def _run(module: HloModule, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
    """Each instruction that is a kernel, with how often it runs."""
    for one in module.computations[name].values():
        if one.opcode == "while":
            trips = trip_count(module, one, name) or 1
            yield from _run(module, one.called("body")[0], times * trips)
        elif one.opcode in ("call", "conditional"):
            for called in one.called()[:1]:
                yield from _run(module, called, times)
        elif one.opcode not in NO_KERNEL and not one.opcode.endswith(("-done", "-update")):
            yield one, times


def _is_in_place(module: HloModule, instruction: Instruction) -> bool:
    """Whether it writes a part of an array that is there already."""
    if instruction.opcode == "fusion":
        called = module.computations[instruction.called()[0]]
        return any(one.root and one.opcode == "dynamic-update-slice" for one in called.values())
    return instruction.opcode == "dynamic-update-slice"


def _is_work(module: HloModule, instruction: Instruction) -> bool:
    """Whether it computes a matrix product or attention."""
    if instruction.opcode in _WORK:
        return True
    if instruction.opcode == "custom-call":
        return any(_ATTENTION.search(one) or _MATMUL.search(one) for one in _of_libraries(instruction))
    called = [*instruction.called(), *(instruction.called("body") if instruction.opcode == "while" else ())]
    return any(_is_work(module, one) for name in called for one in module.computations.get(name, {}).values())
