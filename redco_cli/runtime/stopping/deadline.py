"""`train.max_time`: a run whose time is over is asked to stop, as by a signal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from redco_cli.errors import EXIT_REQUEUE
from redco_cli.recipe.durations import WallTime
from redco_cli.runtime.stopping.signals import StopRequest


@contextlib.contextmanager
def stop_in_time(
    request: StopRequest, limit: WallTime | None, began: float, tell: Callable[[str], None]
) -> Iterator[None]:
    """Asks a run to stop and be requeued once its time is over; all its processes stop together, as on a signal.

    Args:
        request: the run's.
        limit: `train.max_time`; None for none.
        began: when its time began, by `time.monotonic()`.
        tell: says to the user that it is over.
    """
    if limit is None:
        yield
        return

    def ask() -> None:
        if not request.is_asked:
            request.reason = f"train.max_time {limit}"
            tell(f"{request.reason} is over: stopping and saving after this step")
            request.ask(EXIT_REQUEUE)

    timer = threading.Timer(max(began + limit.seconds - time.monotonic(), 0.0), ask)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
