"""What processes print, as a terminal gets it: lines of text, whatever there was in it."""

import io
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.console.screen import spelled_out
from redco_cli.launch.output import pass_on


def passed_on(*parts, encoding="utf-8"):
    """What becomes of output that comes in parts."""
    source, end = os.pipe()
    held = io.BytesIO()
    target = io.TextIOWrapper(held, encoding=encoding)

    def write():
        for part in parts:
            os.write(end, part)
        os.close(end)

    thread = threading.Thread(target=write)
    thread.start()
    pass_on(source, target, 3)
    thread.join()
    return held.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"no end"], ["no end"]),
        ([b"a\n\nb\n"], ["a", "", "b"]),
        ([b"a\r\nb\r\n\r\n"], ["a", "b", ""]),
        ([b"tab\there  \n"], ["tab\there"]),
        ([b"\x1b[2J\x1b]0;title\x07\x08\x00\x9b\n"], [r"\x1b[2J\x1b]0;title\x07\x08\x00" + "\ufffd"]),
        (["\x9b31m".encode() + b"\n"], [r"\x9b31m"]),
        (["a\u202eb\u2066c\u200bd\ufeffe\u2028f\x85g\n".encode()], [r"a\u202eb\u2066c\u200bd\ufeffe\u2028f\x85g"]),
        (["क्‍ष می‌خواهم 👩‍👩‍👧 é\n".encode()], ["क्‍ष می‌خواهم 👩‍👩‍👧 é"]),
        ([b"\r 10%|#   |\r 20%|##  |\r         \r", b"done\n"], [" 10%|#   |", " 20%|##  |", "done"]),
        ([b"50%\r", b"\nnext\n"], ["50%", "next"]),
        ([b"50%\r", b"\n", b"\nnext\n"], ["50%", "", "next"]),
        ([b"\xff\xfeA\n"], ["\ufffd\ufffdA"]),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"]),
        (["é".encode()[:1]], ["\ufffd"]),
        (["Wort\xadende\xa0%\n".encode()], ["Wort\xadende\xa0%"]),
    ],
)
def test_lines(parts, lines):
    assert passed_on(*parts) == "".join(f"[3] {line}".rstrip() + "\n" for line in lines)


def test_what_a_terminal_cannot_write():
    assert passed_on("é → 中\n".encode(), encoding="latin-1") == "[3] é \\u2192 \\u4e2d\n"


def test_a_line_without_end_is_not_held_back_for_ever():
    lines = passed_on(*[b"x" * 1000] * 300).splitlines()
    assert sum(line.count("x") for line in lines) == 300_000
    assert len(lines) >= 3


@settings(deadline=None, max_examples=20)
@given(st.lists(st.binary(max_size=30), max_size=5))
def test_whatever_is_printed_a_terminal_obeys_nothing(parts):
    shown = passed_on(*parts)
    assert spelled_out(shown) == shown
    harmless = "\n\t\xa0\xad"  # a space and a hyphen of typesetters are no printable characters for Python
    assert all(character in harmless or character.isprintable() or ord(character) > 0xFF for character in shown)
