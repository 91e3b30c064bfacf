"""What a person sees. The only package that draws; imports no JAX.

Results go to stdout, everything else to stderr. On a terminal there are colours and one live line at the bottom;
anywhere else (a file, a pipe, CI, `TERM=dumb`) the same is said in plain lines without control codes, fit for `grep`.

In: text, numbers, plain data, `RedcoError`s. Start with `screen`: messages, results and tables. `progress` is the
live line of training, evaluation and prediction, `plan` draws the report of `redco inspect-sharding`, `numbers` formats
numbers.
"""

from redco_cli.console.progress import CountProgress, TrainProgress
from redco_cli.console.screen import (
    hush,
    masked_tokens,
    note,
    open_console,
    prediction,
    print_error,
    result,
    stderr,
    stdout,
    table,
    warn,
    write_result,
)

__all__ = [
    "CountProgress",
    "TrainProgress",
    "hush",
    "masked_tokens",
    "note",
    "open_console",
    "prediction",
    "print_error",
    "result",
    "stderr",
    "stdout",
    "table",
    "warn",
    "write_result",
]
