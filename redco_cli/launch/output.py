"""What the processes of `redco launch` print, passed on line by line, each behind the number of its process.

Libraries and plugins print what they like: colours, bars that return to the beginning of their line, bytes that are no
text. A terminal would obey; here such characters are spelled out, and each turn of a bar is a line.
"""

from __future__ import annotations

import codecs
import os
import re
from typing import TextIO

from redco_cli.console.screen import spelled_out

_END = re.compile("\r\n|\n|\r")
_LONGEST = 2**16
"""Characters after which a line is passed on though it has not ended."""


def pass_on(source: int, target: TextIO, process: int) -> None:
    """Writes what comes from a pipe until all that could write to it have ended; then closes it.

    Where nobody reads the target any more (`redco launch ... | head`) the pipe is still emptied, or its process waits.

    Args:
        source: the file of the pipe's end to read.
        target: standard output or error of this process.
        process: whose pipe it is.
    """
    decoder, rest, was_return = codecs.getincrementaldecoder("utf-8")("replace"), "", False
    while True:
        data = os.read(source, _LONGEST)
        text = decoder.decode(data, final=not data)
        if text:
            after_return, was_return = was_return, text.endswith("\r")
            text = text.removeprefix("\n") if after_return else text
        rest = _pass_on_lines(rest + text, target, process)
        if not data or len(rest) > _LONGEST:
            _write(rest, target, process, keeps_empty=False)
            rest = ""
        if not data:
            break
    os.close(source)


def _pass_on_lines(text: str, target: TextIO, process: int) -> str:
    """Writes the lines that have ended, and gives back what follows them."""
    start = 0
    for end in _END.finditer(text):
        _write(text[start : end.start()], target, process, keeps_empty=end[0] != "\r")
        start = end.end()
    return text[start:]


def _write(line: str, target: TextIO, process: int, *, keeps_empty: bool) -> None:
    line = line.rstrip()
    if not line and not keeps_empty:  # a bar begins, or is wiped away
        return
    encoding = target.encoding or "utf-8"
    shown = f"[{process}] {spelled_out(line)}".rstrip()
    try:
        target.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        target.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
