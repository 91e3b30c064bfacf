"""What is waited for is said, again after a while, and nothing is said once it is there."""

import io
import time

from redco_cli.console.screen import open_console
from redco_cli.console.waiting import waiting


def test_plain_lines():
    file = io.StringIO()
    with waiting(open_console(file, terminal=False), every=0.05) as tell:
        tell("tracing the step")
        deadline = time.monotonic() + 5
        while "(" not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        tell("compiling the step")
    lines = file.getvalue().splitlines()
    assert lines[0] == "tracing the step"
    assert lines[1].startswith("tracing the step (")
    assert "compiling the step" in lines
    time.sleep(0.1)
    assert file.getvalue().splitlines() == lines
