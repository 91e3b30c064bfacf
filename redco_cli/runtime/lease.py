"""A lease: one process at a time owns a directory, even where the one before it has crashed, and over a network.

The file `.lease` in the directory names its holder, who counts its renewals in it. Whoever wants it and finds one asks
whether that process still runs. Where the system cannot tell, because it is of another machine, he watches: a count
that does not change for a while, by his own clock (clocks of machines are never compared), is that of a dead holder,
or of one that holds another directory, of which this one is a copy.

So that of several takers one wins, a lease that is over is not deleted, since that might hit the one after it: it is
followed. Its successor is the file `.lease-<token of the one that is over>`, which `link` makes once, on network disks
too. Who has made it looks whether its chain still begins with `.lease`; then nobody but him may touch that name, and he
gives it to his own file. A holder that ends follows itself with an empty file, for the same right, and deletes both.

A holder renews and ends through its open file only, never through the name. So one that was frozen for so long that
another took over cannot harm that one's lease, and `state` tells it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from redco_cli.runtime.holder import (
    COUNT_BYTES,
    NAME,
    Holder,
    Link,
    content_of,
    count_of,
    make_lease,
    read_chain,
    read_lease,
)
from redco_cli.runtime.liveness import ProcessIdentity, this_process

RENEWAL = 5.0
"""Seconds between two renewals."""
PATIENCE = 30.0
"""Seconds in which the count of a holder that lives changes, on a slow disk too."""


_ATTEMPTS = 100


class HeldError(Exception):
    """Somebody else has the lease.

    Attributes:
        holder: who; None where the file does not say.
    """

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(holder)
        self.holder = holder


class Lease:
    """A lease that this process holds.

    Attributes:
        holder: this process, as others read it.
    """

    def __init__(self, directory: Path, holder: Holder, file: int) -> None:
        """Is made by `take`."""
        self.holder, self._path, self._file, self._renewals = holder, directory / NAME, file, 0
        self._is_open = True
        self._folder = os.open(directory, os.O_RDONLY)

    def renew(self) -> None:
        """Counts on, for those who watch. A disk that fails is not told of here: those who write will notice."""
        self._renewals += 1
        with contextlib.suppress(OSError):
            os.pwrite(self._file, count_of(self._renewals), len(content_of(self.holder)) - COUNT_BYTES)
            os.fsync(self._file)

    def state(self) -> Literal["held", "gone"] | Holder:
        """What the disk says now: held, or gone with its directory; or who has taken over.

        Raises:
            OSError: the disk does not answer.
        """
        chain = read_chain(self._path.parent)
        if not chain:
            return "gone"
        ours = [link.token for link in chain] == [self.holder.token]
        return "held" if ours else next((one.holder for one in reversed(chain) if one.holder), self.holder)

    def is_in_place(self) -> bool:
        """Whether the path still leads to the directory that the lease was taken of."""
        try:
            return os.path.samestat(os.stat(self._path.parent), os.fstat(self._folder))
        except OSError:
            return False

    def abandon(self) -> None:
        """Gives up a lease that is gone from its path: where its directory was moved to, none stays behind."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(NAME, dir_fd=self._folder), os.fstat(self._file)):
                os.unlink(NAME, dir_fd=self._folder)
        self._close()

    def release(self) -> None:
        """Ends the lease, and leaves nothing of it; of one that another has taken over nothing is touched."""
        if not self._is_open:
            return
        own, is_ours = self._path.with_name(f"{NAME}-{self.holder.token}"), True
        try:
            os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            is_ours = False
        except OSError:
            pass  # a full disk takes no file, but lets one go
        with contextlib.suppress(OSError):
            if is_ours and (first := read_lease(self._path)) is not None and first.token == self.holder.token:
                self._path.unlink()
        with contextlib.suppress(OSError):
            if is_ours:
                own.unlink()
        self._close()

    def _close(self) -> None:
        self._is_open = False
        os.close(self._file)
        os.close(self._folder)


def take(
    directory: Path,
    tell: Callable[[str], None],
    *,
    processes: int = 1,
    patience: float = PATIENCE,
    identity: ProcessIdentity | None = None,
) -> Lease:
    """Takes the lease of a directory, from nobody or from a holder that is dead.

    Args:
        directory: an existing one.
        tell: takes a line for the user when somebody must be watched.
        processes: of the run.
        patience: seconds in which a holder that lives has renewed.
        identity: of the holder; default: this process.

    Raises:
        HeldError: another process holds it, or takes it at this moment.
        OSError: the directory cannot be written.
    """
    holder = Holder(secrets.token_hex(8), identity or this_process(), time.time(), processes)
    chain: list[Link] = []
    for attempt in range(_ATTEMPTS):
        time.sleep(0.02 if attempt else 0)
        chain = read_chain(directory)
        if chain and not _is_over(directory, chain, tell, patience):
            continue
        target = directory / (f"{NAME}-{chain[-1].token}" if chain else NAME)
        made = make_lease(target, holder)
        if made is None:
            continue
        if not chain or _follows(directory, target, [*(link.token for link in chain), holder.token]):
            for left in directory.glob(f"{NAME}[-.]*"):
                left.unlink(missing_ok=True)
            return Lease(directory, *made)
        os.close(made[1])
    raise HeldError(chain[-1].holder if chain else None)


def holder_of(directory: Path) -> tuple[Holder, bool | None] | None:
    """Who holds the lease of a directory, and whether that process runs, None where it is unknown; None for nobody."""
    try:
        chain = read_chain(directory)
    except OSError:
        return None
    holder = chain[-1].holder if chain else None
    return None if holder is None else (holder, chain[-1].is_running)


def _is_over(directory: Path, chain: Sequence[Link], tell: Callable[[str], None], patience: float) -> bool:
    """Whether the last of a chain is dead; False where the chain changed before that was known.

    Raises:
        HeldError: it lives.
    """
    holder, known = chain[-1].holder, chain[-1].is_running
    if known is not None:
        if known:
            raise HeldError(holder)
        return True
    end = time.monotonic() + patience
    tell(f"watching for up to {patience:g} s whether {holder or 'another process'} still writes {directory}")
    while time.monotonic() < end:
        time.sleep(min(0.5, patience / 10))
        now = read_chain(directory)
        if [link.token for link in now] != [link.token for link in chain]:
            return False
        if now[-1].content != chain[-1].content:
            raise HeldError(holder)
    return True


def _follows(directory: Path, target: Path, tokens: Sequence[str]) -> bool:
    """Gives the own file, which follows a chain, the name of its beginning, if it still is that chain."""
    try:
        if [link.token for link in read_chain(directory)] == tokens:
            target.rename(directory / NAME)
            return True
        target.unlink()
    except FileNotFoundError:
        pass
    return False
