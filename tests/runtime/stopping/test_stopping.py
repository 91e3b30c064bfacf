"""A signal at any moment of a run of one process, and what continues it: bit for bit the uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from redco_cli.errors import RedcoError
from redco_cli.run import predict, train
from tests.runtime.multiprocess.processes import exact
from tests.training.tiny import final_state

COLLATES = """
    import os, signal
    seen = ctx.stage, [e["id"] for e in examples]
    if os.environ.get("SIGNAL_AT") == str(seen):
        os.kill(os.getpid(), signal.SIGTERM)
"""
SMALL = ["eval.batch_size=2", "data.workers=1"]


@pytest.fixture
def signalling(project: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A signal comes when the batch named by `SIGNAL_AT` is made."""
    text = (project / "plugin.py").read_text()
    (project / "plugin.py").write_text(
        text.replace("def collate_fn(ctx, examples):", f"def collate_fn(ctx, examples):{COLLATES}")
    )
    return monkeypatch


def stopped(environment: pytest.MonkeyPatch, at: tuple[str, list[int]], *overrides: str) -> str:
    """Trains until the signal; the text of the error."""
    environment.setenv("SIGNAL_AT", str(at))
    with pytest.raises(RedcoError) as refused:
        train("recipe.yaml", [*SMALL, *overrides])
    environment.delenv("SIGNAL_AT")
    assert refused.value.exit_code == 75
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "last"), [("predict", 12), ("eval", 4), ("eval", 12), ("predict", 4)])
def test_an_evaluation_is_put_off(signalling: pytest.MonkeyPatch, stage: str, last: int) -> None:
    """In the middle of a run and at its end, by the loss and by predictions."""
    steps = ["train.steps=12", "eval.every=4" if last == 4 else "eval.every=12"]
    train("recipe.yaml", [*SMALL, "output_dir=whole", *steps])
    text = stopped(signalling, (stage, [12, 13]), *steps)
    assert text.endswith(
        f"run/checkpoint-{last}: stopped by a signal after step {last}; saved\n  -> run the same command to continue"
    )
    kinds = [(row["kind"], row["step"]) for row in map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())]
    assert kinds == [("train", step) for step in range(1, last + 1)]
    assert json.loads(Path(f"run/checkpoint-{last}/meta/metadata").read_text())["put_off"] is True
    assert stopped(signalling, (stage, [12, 13]), *steps) == text  # put off again
    train("recipe.yaml", [*SMALL, *steps])
    exact("run", "whole", 12)


@pytest.mark.slow
def test_nothing_is_saved_before_the_first_step(signalling: pytest.MonkeyPatch) -> None:
    text = stopped(signalling, ("eval", [12, 13]), "eval.at_start=true")
    assert text.startswith("training: stopped by a signal before its first step; nothing was to be saved")
    assert not list(Path("run").glob("checkpoint-*"))
    train("recipe.yaml", [*SMALL, "eval.at_start=true"])
    train("recipe.yaml", [*SMALL, "eval.at_start=true", "output_dir=whole"])
    exact("run", "whole", 12)


@pytest.mark.slow
def test_predictions_stop_between_two_batches_and_continue(signalling: pytest.MonkeyPatch) -> None:
    train("recipe.yaml", ["train.steps=4"])
    whole = predict("run", SMALL, output="whole.jsonl").read_text()
    signalling.setenv("SIGNAL_AT", str(("predict", [12, 13])))
    with pytest.raises(RedcoError, match=r"stopped by a signal after \d+ of 21 examples; kept") as refused:
        predict("run", SMALL)
    assert refused.value.exit_code == 75
    signalling.delenv("SIGNAL_AT")
    file = Path("run/predictions/eval_examples.jsonl")
    kept = Path(f"{file}.partial").read_text()
    assert 0 < kept.count("\n") < 21
    assert kept.count("\n") % 2 == 0
    assert f"after {kept.count(chr(10))} of 21" in str(refused.value)
    assert not file.exists()
    first = Path(f"{file}.partial").stat().st_ino
    assert predict("run", SMALL).read_text() == whole
    assert file.stat().st_ino == first  # the file was continued
    assert not Path(f"{file}.partial").exists()


RUN_FN = """

def run_fn(run):
    import jax, jax.numpy as jnp
    while run.step < 12:
        before = jax.tree.map(jnp.copy, run.params)
        run.train(steps=3)
        run.params = jax.tree.map(lambda a, b: (a + b) / 2, before, run.params)
        run.evaluate()
        run.save()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eval", "predict"])
def test_an_outer_loop_stops_where_it_evaluates(project: Path, signalling: pytest.MonkeyPatch, stage: str) -> None:
    (project / "plugin.py").write_text((project / "plugin.py").read_text() + RUN_FN)
    train("recipe.yaml", [*SMALL, "output_dir=whole", "eval.every=100", "checkpoint.every=100"])
    text = stopped(signalling, (stage, [12, 13]), "eval.every=100", "checkpoint.every=100")
    assert "run/checkpoint-3: stopped by a signal after step 3; saved" in text
    train("recipe.yaml", [*SMALL, "eval.every=100", "checkpoint.every=100"])
    found, wanted = final_state("run", 12), final_state("whole", 12)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


BUSY = """
import hashlib
import redco_cli.runtime.stopping.signals as signals
signals.AT_ONCE = 0.5
with signals.stop_on_signal(lambda text: print(text, flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # native code, as of a compiler: no handler of Python runs
"""


def test_native_code_keeps_no_signal_from_being_heard() -> None:
    busy(signal.SIGTERM, signal.SIGINT, code=130)


def test_a_run_that_cannot_stop_ends_within_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDCO_TIMEOUT", "0.5")
    said = busy(signal.SIGUSR1, code=75)
    assert said == (
        "no step or batch ended within 0.5 s of a signal: ending without saving; the last checkpoint remains\n"
    )


FORKS = """
import os, signal, sys, time
import redco_cli.runtime.stopping.signals as signals
from redco_cli.__main__ import hear_early
hear_early()
hearing = {
    "early": lambda: signals.stop_at_once(lambda error: print(error, flush=True)),
    "later": lambda: signals.stop_on_signal(lambda text: print(text, flush=True)),
    "before": __import__("contextlib").nullcontext,
}[sys.argv[1]]
with hearing() as request:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        born, bear = os.pipe()
        child = os.fork()
        if not child:
            os.write(bear, b".")
            time.sleep(20)
            os._exit(0)
        os.read(born, 1)
        os.kill(child, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    time.sleep(0.3)
    if sys.argv[1] == "later":
        assert request.exit_code is None
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(200):
            time.sleep(0.05 * (request.exit_code is None))
        assert request.exit_code == 75
"""


@pytest.mark.parametrize("moment", ["before", "early", "later"])
def test_signals_to_a_child_are_its_own(moment: str) -> None:
    """As of `multiprocessing`: `Process.terminate()`, and the end of a `Pool`."""
    done = subprocess.run([sys.executable, "-c", FORKS, moment], env={**os.environ}, capture_output=True, text=True)
    said = "SIGTERM: stopping and saving after this step\n" if moment == "later" else ""
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


EARLY = """
import time
from redco_cli.__main__ import hear_early
hear_early()
print("ready", flush=True)
time.sleep(20)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_command_is_being_imported_asks_for_a_requeue(number: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", EARLY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (75, f"{signal.Signals(number).name}: nothing was to be saved\n")


LATE = """
import os, signal
from redco_cli.__main__ import hear_early
hear_early()
class Late:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGTERM):
        kill(me, number)
late = Late()
print("done")
"""


def test_a_signal_while_the_interpreter_ends_leaves_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


HANGUP = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
from redco_cli.__main__ import hear_early
hear_early()
import redco_cli.runtime.stopping.signals as signals
said = []  # by a thread, which may be in the middle of a line
with signals.stop_on_signal(said.append) as request:
    os.kill(os.getpid(), signal.SIGHUP)
    for _ in range(20):
        time.sleep(0.05 * (request.exit_code is None or not said))
print(*said, request.exit_code, sep="\\n")
print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [("SIG_DFL", "SIGHUP: stopping and saving after this step\n75\nFalse\n"), ("SIG_IGN", "None\nTrue\n")],
)
def test_the_end_of_a_terminal_is_a_stop_unless_nohup_says_otherwise(before: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", HANGUP, before], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


ABORTS = """
import ctypes, sys, threading, time
from redco_cli.runtime.rendezvous.join import _put_off_aborts
from redco_cli.runtime.stopping.signals import end_now
_put_off_aborts()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()  # as gloo does: in a thread, without the GIL
time.sleep(float(sys.argv[1]))
end_now(1)
"""


@pytest.mark.parametrize(("seconds", "code"), [("0.5", 1), pytest.param("30", -signal.SIGABRT, marks=pytest.mark.slow)])
def test_an_abort_leaves_time_for_the_reason_and_no_more(seconds: str, code: int) -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ABORTS, seconds], env={**os.environ})
    assert done.returncode == code
    assert time.monotonic() - began < 15


SAVES = """
import time
import redco_cli.runtime.stopping.signals as signals
with signals.stop_on_signal(lambda text: print(text, flush=True)) as stop:
    print("ready", flush=True)
    while not stop.due():
        time.sleep(0.1)
    time.sleep(20)
"""


def test_a_save_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDCO_TIMEOUT", "1")
    said = busy(signal.SIGTERM, code=75, program=SAVES)
    assert (
        said
        == "the checkpoint was not written within 1 s of a signal: ending without saving; the last checkpoint remains\n"
    )


def busy(*numbers: int, code: int, program: str = BUSY) -> str:
    """Sends signals to a process in native code, which must end with `code`; what it says after the first."""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ})
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        began = time.monotonic()
        child.send_signal(numbers[0])
        again = "; Ctrl-C again stops at once" if numbers[0] == signal.SIGINT else ""
        name = signal.Signals(numbers[0]).name
        assert child.stdout.readline() == f"{name}: stopping and saving after this step{again}\n"
        for number in numbers[1:]:
            child.send_signal(number)
        assert child.wait(60) == code
        assert time.monotonic() - began < 20
        return child.stdout.read()
