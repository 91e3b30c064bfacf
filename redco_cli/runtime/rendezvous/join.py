"""Joins the processes of a run before anything else happens, and parts from them at the end, whatever the end is."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from redco_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, Interrupted, RedcoError, Requeue
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.runtime.peers.addresses import listening_address
from redco_cli.runtime.peers.cluster import Cluster, detect_cluster, timeout
from redco_cli.runtime.peers.connection import Connection, PeerFailure
from redco_cli.runtime.peers.multihost import connected
from redco_cli.runtime.peers.secret import find_secret, insecure_warning
from redco_cli.runtime.platforms import spare_threads
from redco_cli.runtime.rendezvous.client import meet
from redco_cli.runtime.rendezvous.facts import compared, facts
from redco_cli.runtime.rendezvous.relay import open_relay
from redco_cli.runtime.stopping.signals import AT_ONCE, EarlyStop, end_now, stop_at_once

_HEARTBEAT = 100  # seconds that JAX waits longer than the link, which says what happened
_LAST = 10.0  # seconds in which a process that failed must end


@contextlib.contextmanager
def joined(
    loaded: LoadedRecipe,
    tell: Callable[[str], None],
    show: Callable[[RedcoError], None],
    hush: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Within it this process is one of a run's, as its environment says, and JAX has the devices of all.

    On process 0 alone, standard output is what it was: results appear once. When another process dies or fails, so does
    this one, with the reason. Signals end it at once, until `stop_on_signal` takes them over.

    Args:
        loaded: the recipe, whose values must be the same on all.
        tell: takes lines for the user.
        show: takes the error when another process has ended this one, from any thread.
        hush: called on all but process 0, whose progress is that of all.

    Raises:
        RedcoError: the processes do not meet, or differ; or may not meet without a secret.
    """
    with stop_at_once(show) as early, contextlib.ExitStack() as stack:
        cluster = detect_cluster(os.environ)
        if cluster is None:
            with _ending_soon():
                yield
            return
        secret, seconds = find_secret(os.environ, cluster.host), timeout(os.environ)
        tell(str(cluster))
        if warning := insecure_warning(secret, cluster.host):
            tell(f"warning: {warning}")
        known = facts(cluster, compared(loaded.recipe, secret))
        connection = meet(cluster, known, seconds, early, secret)
        early.tell = lambda reason, code: connection.leave(peaceful=False, code=code, reason=reason)
        stack.enter_context(connected(connection))
        connection.listen(lambda end: _give_up(end, show))
        stack.enter_context(_results_of(cluster.process))
        if cluster.process:
            hush()
        stack.push(lambda _kind, error, _trace: _leave(error, connection, early))
        _start_jax(cluster, connection, seconds)
        yield


@contextlib.contextmanager
def _results_of(process: int) -> Iterator[None]:
    """Keeps standard output for results, and for those of process 0: what native code prints there is no result."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") if process == 0 else open(os.devnull, "w") as results:
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(results):
                yield
        finally:
            results.flush()
            os.dup2(kept, 1)
            os.close(kept)


def _start_jax(cluster: Cluster, connection: Connection, seconds: float) -> None:
    import jax

    spare_threads()
    _put_off_aborts()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    at = listening_address(cluster.host)
    own = f"[{at}]:{cluster.port}" if ":" in at else f"{at}:{cluster.port}" if at else None
    address = own or cluster.coordinator if cluster.process == 0 else open_relay(cluster.host, cluster.port)
    try:
        jax.distributed.initialize(
            address,
            cluster.processes,
            cluster.process,
            _own_devices(connection),
            cluster_detection_method="deactivate",
            coordinator_bind_address=own,
            initialization_timeout=int(seconds),
            heartbeat_timeout_seconds=int(seconds) + _HEARTBEAT,
        )
        counts = connection.gather("devices", jax.local_device_count())
    except RuntimeError as error:
        problem = f"JAX cannot start: {str(error).splitlines()[0]}"
        raise RedcoError(str(cluster), problem, f"is port {cluster.port} of {cluster.host} free and open?") from error
    if len(set(counts)) > 1:
        shown = ", ".join(f"{count} on process {process}" for process, count in enumerate(counts))
        raise RedcoError(str(cluster), f"the processes have different numbers of devices: {shown}", "give each as many")


def _put_off_aborts() -> None:
    """Gives the link a few seconds to say why, where native code aborts because another process is gone.

    gloo does, in a thread of its own: of the collective that failed it meets leftovers in the next. The handler is a
    function of C, since none of Python's would run: `sleep` is safe there, takes the number of the signal for seconds,
    and when it returns the process ends as it would have.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _own_devices(connection: Connection) -> list[int] | None:
    """GPUs of this process where several processes on one machine see the same ones; None for all it sees."""
    hosts = connection.gather("hosts", socket.gethostname())
    here = [process for process, host in enumerate(hosts) if host == hosts[connection.process]]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    gpus = len(visible.split(",")) if visible else len(nodes)
    chosen = "JAX_LOCAL_DEVICE_IDS" in os.environ or os.environ.get("JAX_PLATFORMS") == "cpu"
    if chosen or len(here) == 1 or gpus < len(here) or gpus % len(here):
        return None
    each, place = gpus // len(here), here.index(connection.process)
    return list(range(place * each, (place + 1) * each))


def _leave(error: BaseException | None, connection: Connection, early: EarlyStop) -> None:
    """Parts from the others, in peace or with a reason, and raises it where another process is the cause."""
    early.is_over = True
    if error is None:
        _part(connection)
        return
    cause = _parted(error, connection)
    if cause is not error:
        raise cause from error


def _part(connection: Connection) -> None:
    """The peaceful end: nobody leaves before all have come to it."""
    import jax

    connection.gather("end", None)
    jax.distributed.shutdown()
    connection.leave(peaceful=True)


def _parted(error: BaseException, connection: Connection) -> BaseException:
    """The error to end with: that of another process where it is the cause of this one's."""
    if isinstance(error, Requeue | Interrupted) and connection.stop_at is not None:
        _part(connection)
        return error
    if not isinstance(error, RedcoError | KeyboardInterrupt) or _is_of_a_collective(error):
        end = connection.wait_for_failure(5.0)
        if end is not None:
            error = end.error()
    code = error.exit_code if isinstance(error, RedcoError) else EXIT_FAILED
    code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else code
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error).partition("\n")[0]
    connection.leave(peaceful=False, code=code, reason=reason or type(error).__name__)
    # JAX would wait at the end for processes that do not come; so would threads that save.
    atexit.register(end_now, code)
    _end_within(AT_ONCE if isinstance(error, KeyboardInterrupt) else _LAST, code)
    return error


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether an error may come from computing together, which fails when another process is gone."""
    import jax

    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _ending_soon() -> Iterator[None]:
    """After Ctrl-C, no thread that waits for what does not come keeps the process alive."""
    try:
        yield
    except KeyboardInterrupt:
        _end_within(AT_ONCE, EXIT_INTERRUPTED)
        raise


def _end_within(seconds: float, code: int) -> None:
    watch = threading.Timer(seconds, end_now, args=(code,))
    watch.daemon = True
    watch.start()


def _give_up(end: PeerFailure, show: Callable[[RedcoError], None]) -> None:
    show(end.error())
    end_now(end.exit_code)
