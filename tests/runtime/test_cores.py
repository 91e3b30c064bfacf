"""How many processes may compute side by side, as the kernel says it."""

import pytest

from redco_cli.runtime import cores
from redco_cli.runtime.cores import processes_at_once


@pytest.mark.parametrize(
    ("quota", "memory", "expected"),
    [
        ("max 100000", "MemTotal: 1 kB\nMemAvailable:   99999999 kB\n", 8),
        ("350000 100000", "MemAvailable: 99999999 kB\n", 3),
        ("50000 100000", "MemAvailable: 99999999 kB\n", 1),
        ("max 100000", "MemAvailable: 2097152 kB\n", 2),
        (None, None, 8),
    ],
)
def test_cores_and_memory_that_are_allowed(tmp_path, monkeypatch, quota, memory, expected):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in (("_QUOTA", quota), ("_MEMORY", memory)):
        monkeypatch.setattr(cores, name, tmp_path / name)
        if text is not None:
            (tmp_path / name).write_text(text)
    assert processes_at_once(2**30) == expected
