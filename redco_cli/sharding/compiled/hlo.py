"""The text of an HLO module as computations of instructions, and the trip counts of its loops."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^ +(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_METADATA = re.compile(r', metadata=\{(?:"(?:\\.|[^"\\])*"|[^}"])*\}')
_CALLED = r"{}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))"
_CALLS = "(?:calls|to_apply|called_computations|branch_computations|true_computation|false_computation)"
_MOST_TRIPS, _OVERFLOW = 10_000, 2**31
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "maximum": max,
    "minimum": min,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_UNCHANGED = ("copy", "convert", "bitcast", "reshape")
_STRUCTURAL = ("tuple", "get-tuple-element", "fusion", "call", "compare", *_UNCHANGED)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: without its `%`.
        type: of its result, `f32[8]{0}` or a tuple of such.
        opcode: such as `all-reduce`.
        operands: names of them, or for a constant and a parameter the text in its brackets.
        attributes: everything behind the operands, without metadata.
        source: `op_name` of its metadata.
        root: whether it is the result of its computation.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    source: str
    root: bool

    def called(self, attribute: str = _CALLS) -> list[str]:
        """Names of the computations that it calls by an attribute, such as `body`; by any that is no loop's."""
        found = re.findall(r"\b" + _CALLED.format(attribute), self.attributes)
        return [name for several, one in found for name in re.findall(r"[\w.\-]+", several or one)]

    def branches(self) -> list[str]:
        """Names of a conditional's computations, in the order of their numbers; what is false is number 0."""
        return self.called()[:: -1 if "true_computation=" in self.attributes else 1]


Computation = Mapping[str, Instruction]
"""Instructions by name, in their order."""


@dataclass(frozen=True)
class HloModule:
    """A module.

    Attributes:
        computations: by name.
        entry: name of the computation where it starts.
        devices: how many run it together.
    """

    computations: Mapping[str, Computation]
    entry: str
    devices: int


def parse(text: str) -> HloModule:
    """Reads the text of an optimised module, as `compiled.as_text()` returns it."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if start := _COMPUTATION.match(line):
            current = computations[start[2]] = {}
            entry = start[2] if start[1] else entry
        elif match := _INSTRUCTION.match(line):
            current[match[2]] = _instruction(match, line)
    devices = 1
    for count in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]):
        devices *= int(count)
    return HloModule(computations, entry, devices)


def _instruction(match: re.Match[str], line: str) -> Instruction:
    source = re.search(r'op_name="((?:\\.|[^"\\])*)"', line)
    operands, attributes = _closed(_METADATA.sub("", match[5]))
    return Instruction(
        name=match[2],
        type=match[3],
        opcode=match[4],
        operands=tuple(part.split()[-1].lstrip("%") for part in operands.split(", ") if part.strip()),
        attributes=attributes,
        source=source[1] if source else "",
        root=match[1] is not None,
    )


def _closed(text: str) -> tuple[str, str]:
    """What stands before the bracket that closes the operands, and behind it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth:
            return text[:place], text[place + 1 :]
    return text, ""


def result_type(instruction: Instruction) -> str:
    """The type of what a collective yields. One that is started yields its operands too, and sometimes counters."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.type
    return _elements(instruction.type)[1]


def _elements(tuple_type: str) -> list[str]:
    found, depth = [""], 0
    for letter in tuple_type[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [element.strip() for element in found]


def size_in_bytes(type_text: str) -> int:
    """Bytes of an array of a type, or of all arrays of a tuple."""
    size = 0
    for name, dims in re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", type_text):
        bits = re.match(r"[a-z]+(\d+)", name)
        width = int(bits[1]) if bits else 8 if name == "pred" else 0
        size += math.ceil(width * math.prod(int(dim) for dim in re.findall(r"\d+", dims)) / 8)
    return size


def trip_count(module: HloModule, loop: Instruction, inside: str) -> int | None:
    """How often the body of a loop runs; None when its text does not say.

    Where XLA has not noted it, the loop's counter is followed until its condition no longer holds.

    Args:
        module: the program.
        loop: a `while` instruction.
        inside: name of the computation that it stands in.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    state = _evaluate(module, module.computations[inside], loop.operands[0], [], {})
    condition, body = (module.computations[loop.called(part)[0]] for part in ("condition", "body"))
    for number in range(_MOST_TRIPS):
        holds = _result(module, condition, [state])
        if holds is None:
            return None
        if not holds:
            return number
        state = _result(module, body, [state])
    return None


def _result(module: HloModule, computation: Computation, arguments: list[Any]) -> Any:
    root = next(name for name, instruction in computation.items() if instruction.root)
    return _evaluate(module, computation, root, arguments, {})


def _evaluate(
    module: HloModule, computation: Computation, name: str, arguments: list[Any], known: dict[str, Any]
) -> Any:
    """The value of an instruction where it is an integer that can be told, a list for a tuple of them; else None.

    Args:
        module: the program.
        computation: where the instruction stands.
        name: of the instruction.
        arguments: what the computation is called with; empty when that cannot be told.
        known: the values of its instructions found so far, to which this one is added.
    """
    if name not in known:
        instruction = computation[name]
        if instruction.opcode == "parameter":
            known[name] = arguments[int(instruction.operands[0])] if arguments else None
        elif instruction.opcode == "constant":
            known[name] = _constant(instruction.operands[0])
        elif _is_array(instruction) or instruction.opcode not in (*_STRUCTURAL, *_OPERATIONS):
            known[name] = None
        else:
            values = [_evaluate(module, computation, one, arguments, known) for one in instruction.operands]
            known[name] = _applied(module, instruction, values)
    return known[name]


def _applied(module: HloModule, instruction: Instruction, values: list[Any]) -> Any:
    opcode = instruction.opcode
    if opcode == "tuple":
        return values
    if opcode == "get-tuple-element":
        index = int(re.findall(r"index=(\d+)", instruction.attributes)[0])
        return values[0][index] if isinstance(values[0], list) else None
    if opcode in ("fusion", "call"):
        return _result(module, module.computations[instruction.called()[0]], values)
    if opcode in _UNCHANGED:
        return values[0]
    if opcode == "compare":
        opcode = re.findall(r"direction=(\w+)", instruction.attributes)[0]
    if not all(isinstance(value, int) for value in values):
        return None
    value = int(_OPERATIONS[opcode](*values))
    return value if abs(value) < _OVERFLOW else None


def _is_array(instruction: Instruction) -> bool:
    """Whether it is an array of some length, of which nothing can be told."""
    return re.search(r"\[\d", instruction.type) is not None and not instruction.type.startswith("(")


def _constant(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
