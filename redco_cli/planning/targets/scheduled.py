"""What a TPU's compiler has settled long before it is done: the order of a program, and the memory that it needs.

Most of its time goes into how each large matrix product is cut into windows, which neither moves a byte nor takes any
memory. Order and memory are there after seconds, and are dumped (`xla_dump_to`); an 8B step is ready minutes later, a
70B step a quarter of an hour. The compilation itself cannot be stopped, only the process that it runs in.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from redco_cli.chips.compiler import Value, compile_with
from redco_cli.planning.compiled import Program

_TEXT = "*after_optimizations_after_buffer_assignment.txt"
_REPORT = "*memory-usage-report.txt"
_WRITTEN_AFTER = "*debug_options"
"""The text is whole once this is there; a program that does not fit has no text."""
_DEVICE, _HOST = 0, 5
"""Colors of memory spaces, as `S(5)` in the text."""
_SPACE = re.compile(r"Memory Space: \w+ \(color=(?P<color>\d+)\)\nTotal bytes: (?P<bytes>\d+)")
_POLL = 0.2


def schedule_with(lowered: jax.stages.Lowered, options: Mapping[str, Value], where: Callable[[str], str]) -> Program:
    """Compiles a program for a TPU up to its schedule. What is left of the compilation goes on beside the caller.

    Args:
        lowered: the program.
        options: see `step_options`.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: the compiler does not know one of the options, or not that value.
        JaxRuntimeError: it fails for another reason, such as too little memory.
    """
    beside = ThreadPoolExecutor(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        compiling = beside.submit(compile_with, lowered, {**options, "xla_dump_to": directory}, where)
        beside.shutdown(wait=False)
        while (found := _dumped(Path(directory))) is None and not compiling.done():
            time.sleep(_POLL)
        if found is None:
            compiling.result()  # or what it raised
            found = _dumped(Path(directory))
        assert found is not None, "the compiler dumped no schedule"
        return found


def _dumped(directory: Path) -> Program | None:
    """The program that a compiler has dumped; None while it is not there."""
    if not any(directory.glob(_WRITTEN_AFTER)):
        return None
    text = "".join(one.read_text() for one in directory.glob(_TEXT))
    if not text.rstrip().endswith("}"):  # not there, or not written to its end
        return None
    spaces = read_spaces(next(directory.glob(_REPORT)).read_text())
    return Program(text, spaces.get(_DEVICE), spaces.get(_HOST, 0), is_ordered=True)


def read_spaces(report: str) -> dict[int, int]:
    r"""Bytes in each memory space, by its color, of a report of memory usage.

    >>> read_spaces("Memory Space: default (color=0)\nTotal bytes: 7 (7B)")
    {0: 7}
    """
    return {int(one["color"]): int(one["bytes"]) for one in _SPACE.finditer(report)}
