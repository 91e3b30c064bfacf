"""Something that takes long and cannot say how far it is: what it does now, and for how long already."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.status import Status

from redco_cli.console.numbers import duration
from redco_cli.console.screen import say, spoken

_EVERY = 30.0
"""Seconds between two lines where there is no terminal to draw on."""


@contextlib.contextmanager
def waiting(console: Console | None = None, every: float = _EVERY) -> Iterator[Callable[[str], None]]:
    """Shows what is waited for: a moving line on a terminal, a line now and then elsewhere.

    Args:
        console: where to; default: where one process speaks for all.
        every: seconds between two lines without a terminal.

    Yields:
        A function that takes what is being done from now on.
    """
    console = console or spoken()
    now, ended = [("", time.monotonic())], threading.Event()

    def line() -> str:
        what, since = now[0]
        return f"{what} ({duration(time.monotonic() - since)})"

    status = Status("", console=console) if console.is_terminal else None

    def show() -> None:
        while not ended.wait(1.0 if status is not None else every):
            if status is not None:
                status.update(line())
            elif now[0][0]:
                say(console, line())

    def tell(what: str) -> None:
        now[0] = what, time.monotonic()
        if status is None:
            say(console, what)
        else:
            status.update(what)

    thread = threading.Thread(target=show, name="redco-waiting", daemon=True)
    with status or contextlib.nullcontext():
        thread.start()
        try:
            yield tell
        finally:
            ended.set()
            thread.join()
