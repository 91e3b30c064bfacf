"""Several processes on this machine, with a Python program in the place of redco."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = """
import sys
import redco_cli.launch.local as local
local._PROGRAM = ("-c", sys.argv[1])
sys.exit(local.launch(["train", "x"], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3] else None))
"""
WHO = "import os, sys; me = int(os.environ['REDCO_PROCESS_ID'])\n"


def launcher(program, processes=3, devices=""):
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, WHO + program, str(processes), devices],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_process_knows_who_it_is_and_is_told_apart():
    program = """
names = ("REDCO_NUM_PROCESSES", "REDCO_COORDINATOR", "XLA_FLAGS")
print([os.environ[name] for name in names], sys.argv[1:])
print("aside", file=sys.stderr)
"""
    child = launcher(program, devices="4")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0
    lines = sorted(out.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    assert len({line[4:] for line in lines}) == 1
    assert "'3', 'localhost:" in lines[0]
    assert "--xla_force_host_platform_device_count=4" in lines[0]
    assert lines[0].endswith("['train', 'x']")
    assert sorted(err.splitlines()) == ["[0] aside", "[1] aside", "[2] aside"]


@pytest.mark.parametrize("given", [None, "0123456789abcdef"])
def test_all_have_one_secret_which_no_list_of_processes_shows(given, monkeypatch):
    monkeypatch.delenv("REDCO_SECRET", raising=False)
    if given is not None:
        monkeypatch.setenv("REDCO_SECRET", given)
    child = launcher(
        "print(os.environ['REDCO_SECRET'], open('/proc/self/cmdline').read().count(os.environ['REDCO_SECRET']))"
    )
    out, _ = child.communicate(timeout=60)
    (found,) = {line[4:] for line in out.splitlines()}
    assert re.fullmatch("0123456789abcdef 0" if given else "[0-9a-f]{64} 0", found)


@pytest.mark.parametrize(("failing", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_first_failure_is_the_exit_code(failing, code, tmp_path):
    program = f"""
import pathlib, time
fails = pathlib.Path({str(tmp_path / "fails")!r})
if me == 1:
    fails.touch()
    {failing}
while not fails.exists():
    time.sleep(0.02)
time.sleep(1)
sys.exit(3)
"""
    child = launcher(program)
    child.communicate(timeout=60)
    assert child.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_every_process(number):
    program = f"""
import signal, time
from redco_cli.__main__ import hear_early
hear_early()
signal.signal({int(number)}, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""
    child = launcher(program)
    for _ in range(3):
        child.stdout.readline()
    child.send_signal(number)
    child.communicate(timeout=60)
    assert child.returncode == 75


def test_a_signal_that_comes_before_a_process_can_hear_it_waits_until_it_can():
    program = """
import time
print("born", flush=True)
time.sleep(0.5)
from redco_cli.__main__ import hear_early
hear_early()
time.sleep(60)
"""
    child = launcher(program)
    for _ in range(3):
        child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75
    assert sorted(err.splitlines()) == [f"[{n}] SIGTERM: nothing was to be saved" for n in range(3)]


WHILE_STARTING = """
import os, signal, subprocess
class Popen(subprocess.Popen):
    count = 0
    def __init__(self, *args, **named):
        place, moment = {at}
        Popen.count += 1
        if (Popen.count, moment) == (place, "before"):
            os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*args, **named)
        if (Popen.count, moment) == (place, "after"):
            os.kill(os.getpid(), signal.SIGTERM)
import redco_cli.launch.local as local
local.subprocess.Popen = Popen
"""


@pytest.mark.parametrize("at", [(1, "before"), (1, "after"), (2, "after"), (3, "after")])
def test_a_signal_that_comes_while_processes_are_started_reaches_all(at):
    program = """
import time
from redco_cli.__main__ import hear_early
hear_early()
time.sleep(4)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", WHILE_STARTING.format(at=at) + LAUNCHER, WHO + program, "3", ""],
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75
    assert sorted(err.splitlines()) == [f"[{n}] SIGTERM: nothing was to be saved" for n in range(3)]


def test_what_the_launcher_itself_hears_is_afterwards_as_it_was():
    look = """
import signal
def heard():
    names = ("SIGINT", "SIGTERM", "SIGUSR1")
    return [signal.getsignal(getattr(signal, name)) for name in names], signal.pthread_sigmask(signal.SIG_BLOCK, ())
before = heard()
"""
    text = look + LAUNCHER.replace("sys.exit(local", "code = (local") + "sys.exit(code or before != heard())\n"
    ran = subprocess.run([sys.executable, "-c", text, WHO, "2", ""], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_processes_that_do_not_end_after_a_failure_are_ended():
    program = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
if me == 1:
    time.sleep(0.5)
    sys.exit(7)
time.sleep(60)
"""
    patient = LAUNCHER.replace("local._PROGRAM", "local._PATIENCE = (0.5, 0.5)\nlocal._PROGRAM")
    child = subprocess.Popen([sys.executable, "-c", patient, WHO + program, "3", ""], stdout=subprocess.PIPE, text=True)
    began = time.monotonic()
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 7
    assert time.monotonic() - began < 30
    for line in out.splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)


def is_gone(process):
    """Whether a process has ended; one that nobody waited for has as well."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_gone(processes, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not all(map(is_gone, processes)):
        time.sleep(0.05)
    return all(map(is_gone, processes))


SAVES_ON_SIGTERM = """
import signal, subprocess, time
from redco_cli.__main__ import hear_early
def save(*_):
    for stream in (sys.stdout, sys.stderr):
        print("x" * 300_000, file=stream, flush=True)  # more than a pipe holds, and its reader is gone
    with open(f"saved-{me}", "w") as file:
        file.write("all")
    sys.exit(75)
hear_early()
signal.signal(signal.SIGTERM, save)
inside = "import os; print('REDCO_LAUNCHER' in os.environ, len(os.listdir('/proc/self/fd')))"
found = subprocess.run([sys.executable, "-c", inside], capture_output=True, text=True, close_fds=False).stdout.strip()
print(os.getpid(), found, flush=True)
while True:
    print("on and on", flush=True)
    time.sleep(0.001)
"""


def test_processes_stop_and_save_when_their_launcher_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))))
    monkeypatch.chdir(tmp_path)
    child, found = launcher(SAVES_ON_SIGTERM), {}
    try:
        while len(found) < 3:
            prefix, first, *rest = child.stdout.readline().split()
            if first.isdecimal():
                found[prefix] = int(first), rest
    finally:
        child.kill()
        child.communicate(timeout=60)
    assert all_gone([process for process, _ in found.values()])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["saved-0", "saved-1", "saved-2"]
    assert {tuple(rest) for _, rest in found.values()} == {("False", "4")}  # its own streams, and the listing itself


def test_a_launcher_that_is_killed_before_its_processes_hear_anything(tmp_path):
    program = """
import time
print(os.getpid(), flush=True)
time.sleep(0.5)
from redco_cli.__main__ import hear_early
hear_early()
time.sleep(60)
"""
    child = launcher(program)
    processes = [int(child.stdout.readline().split()[1]) for _ in range(3)]
    child.kill()
    child.communicate(timeout=60)
    assert all_gone(processes)


@pytest.mark.parametrize("given", ["", "5", "0,1,2", "999999,a,-1", "99999999999999999999", ",,", "\u0665"])
def test_what_names_no_launcher_is_ignored(given):
    look = "import redco_cli.__main__ as m, os; m.hear_early(); print('REDCO_LAUNCHER' in os.environ)"
    ran = subprocess.run(
        [sys.executable, "-c", look],
        env={**os.environ, "REDCO_LAUNCHER": given},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")


def test_a_reader_that_has_seen_enough_holds_nobody_up(tmp_path):
    program = """
for _ in range(5000):
    print("x" * 100)
print("done", file=sys.stderr)
"""
    child = launcher(program, processes=1)
    with child:
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == "[0] done\n"
    assert child.returncode == 0
