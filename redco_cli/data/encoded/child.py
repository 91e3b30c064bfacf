"""A process that encodes for another: examples come in on its standard input, what became of them goes out.

It takes no device, prints nothing, leaves signals to the process that began it, and ends with that process.
Nobody else can write to that input, so that what comes there is pickled.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from redco_cli.data.encoded.outcome import Encode, Outcome, is_error, outcome_of
from redco_cli.data.examples import Example

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_BEGIN = "import sys; sys.path[:] = sys.argv[1:]; from redco_cli.data.encoded.child import serve; serve()"
_LOOK = 0.5
"""Seconds between two looks at whether the process that began it is there."""
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
"""No device is touched, and each process keeps to one core."""


class Child:
    """Such a process, as the one that began it sees it."""

    def __init__(self) -> None:
        """Begins it; it has nothing to encode with yet.

        Raises:
            OSError: no process can be begun.
        """
        self._process = subprocess.Popen(  # noqa: S603 - nothing of it is from outside
            [sys.executable, "-c", _BEGIN, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
        )

    def give(self, encode: bytes) -> None:
        """Gives it the function, pickled."""
        self._send(encode)

    def encoded(self, examples: Sequence[Example]) -> list[Outcome]:
        """What became of examples, up to the first that could not be encoded.

        Raises:
            OSError: it ended, with the reason as far as there is one.
            TypeError, AttributeError, pickle.PicklingError: the examples cannot be sent.
        """
        request = pickle.dumps(examples, pickle.HIGHEST_PROTOCOL)
        answer: list[Outcome] | str
        try:
            self._send(request)
            assert self._process.stdout is not None
            answer = pickle.load(self._process.stdout)  # noqa: S301 - of a process that this one has begun
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise ChildProcessError(f"it ended {how}") from error
        if isinstance(answer, str):
            raise ChildProcessError(answer)
        return answer

    def kill(self) -> None:
        """Ends it, whatever it does; who waits for it is told."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes to it, which nobody reads or writes any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what could not be sent is of no use
                pipe.close()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()


def serve() -> None:
    """What the process does: takes a function, then examples, as long as somebody sends some."""
    for number in _HEARD:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "r+b") as nothing:  # for plugins that read or print
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)

    def answer(content: list[Outcome] | str) -> None:
        pickle.dump(content, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()

    def tell(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        first = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(OSError):
            answer(f"{kind.__name__}: {first:.200}")

    sys.excepthook = tell
    with contextlib.suppress(EOFError, BrokenPipeError):
        encode: Encode = pickle.load(requests)  # noqa: S301 - of the process that began this one
        while True:
            answer(_until_error(encode, pickle.load(requests)))  # noqa: S301 - likewise


def _end_with(parent: int) -> None:
    """Ends this process with its parent, whatever it does then: its input may end long before it looks there."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(0)


def _until_error(encode: Encode, examples: Sequence[Example]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for example in examples:
        outcomes.append(outcome_of(encode, example))
        if is_error(outcomes[-1]):
            break
    return outcomes
