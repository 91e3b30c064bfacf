"""One run at a time writes an output directory, and notices when the directory is taken or deleted under it.

Process 0 holds the lease of the directory (see `runtime.lease`) for all, from before anything in it is read until after
everything is written. A thread renews it. `check_owner` comes before whatever is written: a run that was frozen for so
long that another took over ends there. A directory that was deleted or moved is made anew, since to end would lose the
work; but never where another one is in its place by now.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from redco_cli.console import note, warn
from redco_cli.errors import Problem, StorageError
from redco_cli.recipe.load import shown
from redco_cli.runtime import lease as leases
from redco_cli.runtime.holder import Holder
from redco_cli.runtime.lease import HeldError, Lease, take
from redco_cli.runtime.peers.multihost import current_connection, is_main_process, process_allgather
from redco_cli.runtime.stopping.handlers import before_end
from redco_cli.training.saving.files.deletion import UNFINISHED

_OTHER_OUTPUT = "choose another output_dir, or correct its permissions"
_WAIT = "wait for its end, or stop it, and the same command continues; or choose another output_dir"
_ONE_AT_A_TIME = "let one run at a time have this output_dir; the same command continues once the other has ended"
_START_AGAIN = "put it back where it was, and the same command continues"
_GONE = "was deleted or moved while the run wrote it"

_owners: dict[Path, Owner] = {}
"""By output directory, those of this process."""


class Owner:
    """Holds the lease of an output directory while a run writes it.

    Attributes:
        on_remade: called once the directory was made anew, to write again what belongs in it.
    """

    def __init__(self, directory: Path, where: str) -> None:
        """Takes the lease, and makes the directory for it if need be.

        Args:
            directory: the output directory; absolute.
            where: the place for errors.

        Raises:
            StorageError: another process has it, or the directory cannot be written.
        """
        self.on_remade: Callable[[], None] = lambda: None
        self._directory, self._where = directory, where
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._lost: Problem | None = None
        try:
            self._lease = self._taken()
        except StorageError:
            self._remove_made()
            raise
        self._thread = threading.Thread(target=self._renew, daemon=True, name="redco-lease")
        self._thread.start()

    def check(self) -> None:
        """Looks whether this run still has its directory.

        Raises:
            StorageError: another one took over; or the directory is gone, and cannot be made anew.
        """
        with self._lock:
            if self._lost is None and not self._ended.is_set():
                self._look()
            if self._lost is not None:
                raise StorageError(self._lost.where, self._lost.problem, self._lost.remedy)

    def end(self) -> None:
        """Gives the directory back; one that was made for this run and holds nothing is gone again."""
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._lease.release()
            self._remove_made()

    def release_at_once(self) -> None:
        """Gives the lease back where the process ends in the next moment, whatever its threads do."""
        if self._lock.acquire(timeout=1.0):
            self._ended.set()
            self._lease.release()

    def _renew(self) -> None:
        while not self._ended.wait(leases.RENEWAL):
            with self._lock:
                if self._lost is not None or self._ended.is_set():
                    return
                self._lease.renew()
                self._look()
                if self._lost is not None:
                    warn(f"{self._lost.where} {self._lost.problem}; this run ends where it would write next")

    def _look(self) -> None:
        try:
            state = self._lease.state()
        except OSError:
            return  # the disk does not answer: what is written next says so
        if state == "gone":
            self._make_anew()
        elif isinstance(state, Holder):
            problem = f"was taken over by another run ({state}), as this one did not renew its lease in time: it was "
            problem += "stopped, or its host or its disk stood still"
            self._lost = Problem(shown(self._directory), problem, _ONE_AT_A_TIME)

    def _make_anew(self) -> None:
        name, directory = shown(self._directory), self._directory
        in_place = self._lease.is_in_place()
        if not in_place and _holds_others(directory):
            self._lost = Problem(name, f"{_GONE}, and another directory is in its place", _START_AGAIN)
            return
        if in_place:
            warn(f"the lease of {name} was deleted while the run wrote it; it is made anew")
        else:
            warn(f"{name} {_GONE}; it is made anew, and the next checkpoint goes there")
        self._lease.abandon()
        try:
            self._lease = self._taken()
            self.on_remade()
        except StorageError as error:
            self._lost = Problem(name, f"{_GONE}, and cannot be made anew: {error.problems[0].problem}", _START_AGAIN)

    def _taken(self) -> Lease:
        connection = current_connection()
        processes = 1 if connection is None else connection.processes
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return take(self._directory, note, processes=processes, patience=leases.PATIENCE)
        except HeldError as error:
            holder = error.holder or "a process that its lease does not name"
            raise StorageError(self._where, f"{shown(self._directory)} is written by {holder}", _WAIT) from None
        except OSError as error:
            problem = f"{shown(self._directory)} cannot be written: {error.strerror or error}"
            raise StorageError(self._where, problem, _OTHER_OUTPUT) from error

    def _remove_made(self) -> None:
        for path in self._made:
            try:
                path.rmdir()
            except OSError:
                return  # something is in it


def _holds_others(directory: Path) -> bool:
    """Whether something is in a directory that no save of this run can have put there as it went on."""
    try:
        return any(not name.endswith(UNFINISHED) for name in os.listdir(directory))
    except OSError:
        return False


def check_owner(directory: Path) -> None:
    """Proves, before a run writes to its output directory, that it still has it; nothing where no lease is held.

    Raises:
        StorageError: another run took over; or the directory was deleted, and cannot be made anew.
    """
    if directory in _owners:
        _owners[directory].check()


def is_owned(directory: Path) -> bool:
    """Whether `check_owner` has nothing against writing to an output directory."""
    try:
        check_owner(directory)
    except StorageError:
        return False
    return True


def write_again(directory: Path, action: Callable[[], None]) -> None:
    """What to do once an output directory was deleted under its run and is made anew."""
    if directory in _owners:
        _owners[directory].on_remade = action


@contextlib.contextmanager
def owning(directory: Path, where: str) -> Iterator[None]:
    """While the context lasts, this run alone writes an output directory.

    Args:
        directory: absolute; made if need be, and gone again if nothing is written to it.
        where: the place for errors.

    Raises:
        StorageError: on all processes: another run has it, and which; or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        refused: tuple[str, str, str] | None = None
        if is_main_process():
            try:
                owner = Owner(directory, where)
            except StorageError as error:
                refused = (error.problems[0].where, error.problems[0].problem, error.problems[0].remedy)
            else:
                stack.callback(owner.end)
                stack.enter_context(before_end(owner.release_at_once))
                _owners[directory] = owner
                stack.callback(_owners.pop, directory)
        told = process_allgather("output lease", refused)[0]
        if told is not None:
            failure = StorageError(*told)
            failure.on_all_processes = True
            raise failure
        yield
