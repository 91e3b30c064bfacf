"""A lease of a directory: one holder at a time, whoever crashes, freezes or comes at the same moment."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from redco_cli.runtime.holder import NAME, Holder, read_chain
from redco_cli.runtime.lease import HeldError, Lease, holder_of, take
from redco_cli.runtime.liveness import is_running, this_process

HERE = this_process()
ELSEWHERE = replace(HERE, host="elsewhere", boot="another")
DEAD = replace(HERE, pid=2**22 + 1)
HOLDS = """
import sys, time
from pathlib import Path
from redco_cli.runtime.lease import take
take(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(60)
"""


def taken(directory: Path, patience: float = 0.2, said: list[str] | None = None, **identity: object) -> Lease:
    return take(directory, (said if said is not None else []).append, patience=patience, **identity)  # type: ignore[arg-type]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_one_holds_it_and_the_next_after_its_end(tmp_path: Path) -> None:
    said: list[str] = []
    lease = take(tmp_path, said.append, processes=4)
    assert names(tmp_path) == [NAME]
    with pytest.raises(HeldError) as refused:
        taken(tmp_path)
    holder = refused.value.holder
    assert holder == lease.holder
    assert str(holder).startswith(f"host {HERE.host}, pid {os.getpid()}, process 0 of 4, since 20")
    assert holder_of(tmp_path) == (lease.holder, True)
    assert lease.state() == "held"
    lease.release()
    lease.release()
    assert names(tmp_path) == []
    assert holder_of(tmp_path) is None
    taken(tmp_path).release()
    assert said == []


def test_who_is_dead_is_known_at_once_and_who_cannot_be_known(tmp_path: Path) -> None:
    assert is_running(HERE) is True
    assert is_running(DEAD) is False
    assert is_running(replace(HERE, started=(HERE.started or 0) + 1)) is False  # its number is another process's now
    assert is_running(replace(HERE, pid=1, started=None)) is False
    for unknown in (ELSEWHERE, replace(HERE, boot=None), replace(HERE, namespace="pid:[1]")):
        assert is_running(unknown) is None
    said: list[str] = []
    first = taken(tmp_path, identity=DEAD)
    lease = taken(tmp_path, 9, said)
    assert said == []
    assert names(tmp_path) == [NAME]
    assert first.state() == lease.holder


def test_a_killed_holder_is_replaced_at_once(tmp_path: Path) -> None:
    """Also while nobody has asked after its end yet; not while it is only stopped."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(HeldError) as refused:
            taken(tmp_path, 9)
        assert refused.value.holder is not None
        assert refused.value.holder.identity.pid == other.pid
        other.kill()
        while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        began = time.monotonic()
        taken(tmp_path, 9).release()
        assert time.monotonic() - began < 1


def test_a_holder_elsewhere_is_watched(tmp_path: Path) -> None:
    lease, said = taken(tmp_path, identity=ELSEWHERE), []
    renewing = threading.Event()

    def renew() -> None:
        while not renewing.wait(0.05):
            lease.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    began = time.monotonic()
    with pytest.raises(HeldError) as refused:
        taken(tmp_path, 30, said)
    assert time.monotonic() - began < 5
    assert refused.value.holder == lease.holder
    assert said == [f"watching for up to 30 s whether {lease.holder} still writes {tmp_path}"]
    renewing.set()
    thread.join()
    other = taken(tmp_path, 0.3)
    assert lease.state() == other.holder  # as of one that was frozen and wakes
    before = (tmp_path / NAME).read_bytes()
    lease.renew()
    lease.release()
    assert (tmp_path / NAME).read_bytes() == before
    assert other.state() == "held"
    other.release()
    assert names(tmp_path) == []


def test_a_holder_elsewhere_that_ends_is_not_waited_for_longer(tmp_path: Path) -> None:
    lease = taken(tmp_path, identity=ELSEWHERE)
    timer = threading.Timer(0.2, lease.release)
    timer.start()
    began = time.monotonic()
    taken(tmp_path, 30).release()
    assert time.monotonic() - began < 5
    timer.join()
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"token": "../x"}\n', b"[" * 9999, b'{"token": 3, "identity": {}}'])
def test_a_lease_that_says_nothing_is_watched_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    said: list[str] = []
    lease = taken(tmp_path, 0.1, said)
    assert said == [f"watching for up to 0.1 s whether another process still writes {tmp_path}"]
    assert [link.holder for link in read_chain(tmp_path)] == [lease.holder]


@pytest.mark.parametrize("patience", [0.05, 0.0])
@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_takers_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool, patience: float
) -> None:
    """From a holder that is dead, from one that nobody knows, and from nobody; each at random moments."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    dice = random.Random(0)
    for number in range(20):
        kind = number % 3
        if kind:
            taken(tmp_path, identity=DEAD if kind == 1 else ELSEWHERE)
        won: list[Lease] = []

        def attempt(delay: float, won: list[Lease] = won) -> None:
            time.sleep(delay)
            with contextlib.suppress(HeldError):
                won.append(taken(tmp_path, patience))

        threads = [threading.Thread(target=attempt, args=(dice.uniform(0, 0.01),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [lease.state() for lease in won] == ["held"]
        won[0].release()
        assert names(tmp_path) == []


@pytest.mark.parametrize("point", range(1, 7))
def test_a_taker_that_dies_on_its_way_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
    """After each of the system calls by which it takes over."""
    taken(tmp_path, identity=DEAD)
    calls = 0

    def dying(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **named):  # type: ignore[no-untyped-def]
            nonlocal calls
            done = function(*arguments, **named)
            calls += 1
            if calls == point:
                raise KeyboardInterrupt
            return done

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "link"), (os, "fsync"), (Path, "rename"), (Path, "unlink")):
            patch.setattr(module, name, dying(getattr(module, name)))
        with contextlib.suppress(KeyboardInterrupt):
            taken(tmp_path, identity=replace(DEAD, pid=DEAD.pid + 1))
    lease = taken(tmp_path, 0)
    assert lease.state() == "held"
    assert names(tmp_path) == [NAME]
    lease.release()
    assert names(tmp_path) == []


def test_a_lease_that_is_deleted_or_moved_is_gone(tmp_path: Path) -> None:
    first = tmp_path / "run"
    first.mkdir()
    lease = taken(first)
    assert lease.is_in_place()
    (first / NAME).unlink()
    assert lease.state() == "gone"
    assert lease.is_in_place()
    lease.abandon()
    lease = taken(first)
    first.rename(tmp_path / "moved")
    assert lease.state() == "gone"
    first.mkdir()
    assert not lease.is_in_place()
    lease.abandon()
    assert names(tmp_path / "moved") == []


def test_a_copy_of_a_directory_is_not_held_by_the_run_of_the_other(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lease = taken(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    said: list[str] = []
    other = taken(tmp_path / "copy", 0.1, said)
    assert len(said) == 1
    assert (lease.state(), other.state()) == ("held", "held")
    lease.release()
    other.release()


def test_a_full_disk_keeps_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            taken(tmp_path)
    assert names(tmp_path) == []
    lease, opened = taken(tmp_path), os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: full() if flags & os.O_CREAT else opened(path, flags))
    lease.release()
    assert names(tmp_path) == []


def test_it_is_plain_json(tmp_path: Path) -> None:
    lease = taken(tmp_path)
    for _ in range(3):
        lease.renew()
    first, count = (tmp_path / NAME).read_text().splitlines()
    plain = json.loads(first)
    assert plain["identity"]["pid"] == os.getpid()
    assert count == f"{3:012d}"
    assert Holder(plain["token"], HERE, plain["since"], inode=(tmp_path / NAME).stat().st_ino) == lease.holder
    lease.release()
