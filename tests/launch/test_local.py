"""Several processes on this machine, with a Python program in the place of redco."""

import os
import signal
import subprocess
import sys
import time

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


@pytest.mark.parametrize(("failing", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_first_failure_is_the_exit_code(failing, code):
    program = f"""
import time
if me == 1:
    {failing}
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
