"""The files of leases: who holds one, written whole or not at all, and read whatever they hold."""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from redco_cli.runtime.liveness import ProcessIdentity, is_running

NAME = ".lease"
"""Of the file that says who holds a directory."""
COUNT_BYTES = 13
"""What a file ends with: how often its holder has renewed."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL})
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_CLOCK = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class Holder:
    """Who holds a lease.

    Attributes:
        token: of this lease alone.
        identity: the process.
        since: seconds since 1970, by its own clock: for a person, and for nothing else.
        processes: how many processes the run has; this is the first of them.
        inode: of the file that was made for it: in a directory that was copied it is another.
    """

    token: str
    identity: ProcessIdentity
    since: float
    processes: int = 1
    inode: int = 0

    def __str__(self) -> str:
        of = f", process 0 of {self.processes}" if self.processes > 1 else ""
        since = time.strftime(_CLOCK, time.localtime(self.since))
        return f"host {self.identity.host}, pid {self.identity.pid}{of}, since {since}"


@dataclass(frozen=True)
class Link:
    """One lease of a chain, as it was read: its token, its holder if it names one, and all of its bytes."""

    token: str
    holder: Holder | None
    content: bytes
    inode: int = 0

    @property
    def is_running(self) -> bool | None:
        """Whether the holder runs; None where that cannot be known, or where this may be a copy of its lease."""
        found = None if self.holder is None else is_running(self.holder.identity)
        return None if found and self.holder is not None and self.holder.inode != self.inode else found


def make_lease(target: Path, holder: Holder) -> tuple[Holder, int] | None:
    """Makes a lease under a name that nobody has; its holder and open file, or None where somebody has it."""
    temporary = target.with_name(f"{NAME}.{holder.token}")
    made, file = _written(temporary, holder)
    try:
        os.link(temporary, target)
    except (FileExistsError, FileNotFoundError):
        there = read_lease(target)
        if there is None or there.token != holder.token:  # else the network asked twice, and the first time it was made
            os.close(file)
            return None
    except OSError as error:
        os.close(file)
        if error.errno not in _NO_LINKS:
            raise
        try:
            return _written(target, holder)
        except FileExistsError:
            return None
    finally:
        temporary.unlink(missing_ok=True)
    return made, file


def _written(path: Path, holder: Holder) -> tuple[Holder, int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        holder = replace(holder, inode=os.fstat(file).st_ino)
        content = content_of(holder)
        while content:  # a write to a full disk may take a part and only then fail
            content = content[os.write(file, content) :]
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return holder, file


def read_chain(directory: Path) -> list[Link]:
    """The leases of a directory, each followed by its successor: the last one counts."""
    found: list[Link] = []
    link = read_lease(directory / NAME)
    while link is not None and link.token not in [one.token for one in found]:
        found.append(link)
        link = read_lease(directory / f"{NAME}-{link.token}")
    return found


def read_lease(path: Path) -> Link | None:
    """A lease, whatever its file holds; None where there is none."""
    try:
        with path.open("rb") as file:
            content, inode = file.read(), os.fstat(file.fileno()).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        plain = json.loads(content.partition(b"\n")[0])
        identity = ProcessIdentity(**plain.pop("identity"))
        counts = int(plain["processes"]), int(plain["inode"])
        holder = Holder(plain["token"], identity, float(plain["since"]), *counts)
        if holder.token.isalnum() and isinstance(identity.pid, int) and identity.pid > 0 and str(holder):
            return Link(holder.token, holder, content, inode)
        raise ValueError
    except _UNREADABLE:  # cut off, or being written where nothing can be linked
        return Link(f"unreadable{zlib.crc32(content):08x}", None, content)


def content_of(holder: Holder) -> bytes:
    """A lease that was never renewed."""
    return json.dumps(asdict(holder)).encode() + b"\n" + count_of(0)


def count_of(renewals: int) -> bytes:
    """The end of a lease."""
    return f"{renewals:0{COUNT_BYTES - 1}d}\n".encode()
