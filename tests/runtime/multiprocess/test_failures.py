"""Whole runs of several processes on this machine: equal to one process, ended together, continued."""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from redco_cli.run import predict, train
from tests.runtime.multiprocess.processes import (
    Ended,
    ended,
    equal_to_one,
    free_port,
    records,
    run_several,
    same,
    start,
)

LONG = ["train.steps=100000", "eval.every=100000", "checkpoint.every=100000", "mesh={data: 2}"]
SPANNING = [
    "{data: 4}",
    "{fsdp: 4}",
    "{tensor: 4}",
    "{data: 2, fsdp: 2}",
    "{data: 2, tensor: 2}",
    "{fsdp: 2, tensor: 2}",
]


@pytest.mark.usefixtures("project")
def test_two_processes_equal_one() -> None:
    """The batch over both, and each parameter: every collective crosses between them."""
    short = ["train.steps=6", "eval.every=3", "checkpoint.every=6"]
    train("recipe.yaml", ["output_dir=one", *short])
    ends = run_several(["train", "recipe.yaml", "output_dir=many", "mesh={data: 2, tensor: 2}", *short], 2, 2)
    same("many", "one")
    predicted = predict("one", output="one.jsonl").read_text()
    assert predict("many", ["mesh={data: 1}"], output="many.jsonl").read_text() == predicted
    assert [end.out.startswith("TrainResult") for end in ends] == [True, False]
    assert "process 1 of 2, coordinator localhost:" in ends[1].err
    for said in ("compiling train step", "step 6/6", "eval 6/6"):  # how far all have come is said once
        assert said in ends[0].err
        assert said not in ends[1].err
    assert sorted(path.name for path in Path("many").iterdir()) == sorted(path.name for path in Path("one").iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("mesh", SPANNING)
def test_two_processes_equal_one_on_every_mesh(mesh: str) -> None:
    equal_to_one(mesh, 2, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("mesh", ["{data: 4}", "{tensor: 4}", "{fsdp: 2, tensor: 2}"])
def test_four_processes_equal_one(mesh: str) -> None:
    equal_to_one(mesh, 4, 1, "train.micro_batch_size=4")


RUN_FN = """

def run_fn(run):
    import jax, jax.numpy as jnp
    while run.step < 12:
        before = jax.tree.map(jnp.copy, run.params)
        run.train(steps=3)
        averaged = jax.tree.map(lambda a, b: (a + b) / 2, before, run.params)
        averaged["output"]["bias"] = np.zeros(3)  # the same on each process, and of another type
        run.params = averaged
        run.log({"first": run.predict()[0]})
        if run.step < 12:  # the recipe's own evaluation is at the end
            run.evaluate()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["{data: 2, fsdp: 2}", "{fsdp: 2, tensor: 2}"])
def test_parameters_that_are_assigned_may_span_processes(project: Path, mesh: str) -> None:
    (project / "plugin.py").write_text((project / "plugin.py").read_text() + RUN_FN)
    apart = ["eval.every=100", "checkpoint.every=100"]
    train("recipe.yaml", ["output_dir=one", *apart])
    run_several(["train", "recipe.yaml", "output_dir=many", f"mesh={mesh}", *apart], 2, 2)
    same("many", "one")
    assert [kind for kind, _ in records("many")].count("eval") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shares"), [("{data: 2}", 4), ("{tensor: 2}", 8)])
def test_each_process_collates_only_its_share(project: Path, mesh: str, shares: int) -> None:
    text = (project / "plugin.py").read_text()
    noted = """
    import os
    if ctx.stage == "train":
        with open(f"share-{os.environ['REDCO_PROCESS_ID']}", "a") as file:
            file.write(f"{[e['id'] for e in examples]}\\n")
"""
    (project / "plugin.py").write_text(
        text.replace("def collate_fn(ctx, examples):", f"def collate_fn(ctx, examples):{noted}")
    )
    run_several(["train", "recipe.yaml", f"mesh={mesh}", "train.steps=5", "eval.predict=false"], 2, 1)
    lines = [(project / f"share-{process}").read_text().splitlines() for process in (0, 1)]
    probe = str(list(range(8)))  # the first examples, by which each process proves the plugin
    parts = [[json.loads(line) for line in part if line != probe] for part in lines]
    assert [len(part) for part in parts] == [5, 5]
    assert {len(rows) for part in parts for rows in part} == {shares}
    assert (sorted(parts[0]) == sorted(parts[1])) == (shares == 8)  # threads collate, in any order
    seen = sorted({example for part in parts for rows in part for example in rows})
    assert seen == list(range(40))


def running(directory: str, children: Sequence[object], seconds: float = 120) -> None:
    """Waits until a run has recorded a few steps."""
    metrics, deadline = Path(directory) / "metrics.jsonl", time.monotonic() + seconds
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(*overrides: str, processes: int = 2) -> list:
    port = free_port()
    return [start(["train", "recipe.yaml", *overrides], process, processes, port) for process in range(processes)]


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_to_one_process_stops_all_at_one_saved_step(process: int, number: int, code: int) -> None:
    children = started(*LONG)
    running("run", children)
    children[process].send_signal(number)
    ends = ended(children, 60)
    assert [end.code for end in ends] == [code, code], ends
    last = max(step for _, step in records("run"))
    assert [path.name for path in Path("run").glob("checkpoint-*")] == [f"checkpoint-{last}"]
    assert all(f"checkpoint-{last}: stopped by a signal after step {last}; saved" in end.err for end in ends)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_stopped_run_continues_as_if_it_had_not_stopped() -> None:
    long = ["train.steps=400", "eval.every=200", "checkpoint.every=200", "mesh={data: 2}"]
    run_several(["train", "recipe.yaml", "output_dir=whole", *long], 2, 1)
    children = started("output_dir=run", *long)
    running("run", children)
    children[1].terminate()
    assert [end.code for end in ended(children, 60)] == [75, 75]
    run_several(["train", "recipe.yaml", "output_dir=run", *long], 2, 1)
    mine, theirs = records("run"), records("whole")
    assert mine.keys() == theirs.keys()
    assert all(mine[key]["loss"] == theirs[key]["loss"] for key in theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("number", "code", "seconds"),
    [(signal.SIGTERM, 75, seconds) for seconds in (None, 0.5, 1.2, 2.0, 5.0)]
    + [(signal.SIGINT, 130, seconds) for seconds in (0.5, 1.2, 2.0, 5.0)],
)
def test_a_signal_before_training_ends_all(
    monkeypatch: pytest.MonkeyPatch, number: int, code: int, seconds: float | None
) -> None:
    """So long after it hears signals as the commands do; None while Python still imports."""
    monkeypatch.setenv("REDCO_TIMEOUT", "20")
    monkeypatch.setenv("HEARS", "hears")
    children = started(*LONG)
    if seconds is None:
        time.sleep(0.4)
    else:
        while not Path("hears-1").exists():
            time.sleep(0.01)
        time.sleep(seconds)
    children[1].send_signal(number)
    codes = [end.code for end in ended(children, 60)]
    # One that is stopped before it has met the others is not known to them, and they wait for it in vain.
    assert codes in ([code, code], *([[1, code]] if seconds in (None, 0.5) else []))


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_frozen_ends_the_others(monkeypatch: pytest.MonkeyPatch, process: int) -> None:
    monkeypatch.setenv("REDCO_TIMEOUT", "15")
    children = started(*LONG)
    running("run", children)
    began = time.monotonic()
    children[process].send_signal(signal.SIGSTOP)
    assert children[1 - process].wait(30) == 1
    assert 10 < time.monotonic() - began < 25
    children[process].send_signal(signal.SIGCONT)
    ends = ended(children, 30)
    assert [end.code for end in ends] == [1, 1]
    assert f"processes: process {process} " in ends[1 - process].err
    assert "has not been heard of for 15 s: it is stopped or frozen, or its machine is" in ends[1 - process].err
    assert "processes: process" in ends[process].err


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("process", [0, 1, 2])
def test_a_killed_process_ends_the_others_with_the_reason(process: int) -> None:
    children = started(*LONG[:-1], "mesh={data: 4}", processes=4)
    running("run", children)
    children[process].kill()
    began = time.monotonic()
    ends = ended(children, 30)
    assert time.monotonic() - began < 15
    for number, end in enumerate(ends):
        if number != process:
            assert end.code == 1, end
            assert f"processes: process {process} " in end.err
            assert "is gone" in end.err


@pytest.mark.slow
def test_a_process_whose_data_fails_ends_the_others_with_its_reason(project: Path) -> None:
    text = (project / "plugin.py").read_text()
    fails = """
    import os
    if os.environ["REDCO_PROCESS_ID"] == "1" and ctx.stage == "train" and any(e["id"] == 30 for e in examples):
        raise RuntimeError("no such row")
"""
    (project / "plugin.py").write_text(
        text.replace("def collate_fn(ctx, examples):", f"def collate_fn(ctx, examples):{fails}")
    )
    ends: list[Ended] = ended(started(*LONG), 60)
    assert [end.code for end in ends] == [1, 1]
    assert "no such row" in ends[1].err
    assert "processes: process 1 ended: " in ends[0].err
    assert "no such row" in ends[0].err


GONE = """

def run_fn(run):
    import os
    run.train(steps=3)
    if os.environ["REDCO_PROCESS_ID"] == "1":
        os._exit(3)
    run.train()
"""


@pytest.mark.slow
def test_what_fails_because_a_process_is_gone_is_not_blamed_on_the_plugin(project: Path) -> None:
    (project / "plugin.py").write_text((project / "plugin.py").read_text() + GONE)
    ends = ended(started("mesh={data: 2}"), 60)
    assert [end.code for end in ends] == [1, 3]
    assert "processes: process 1 (" in ends[0].err
    assert "is gone: it was killed, or crashed" in ends[0].err
    assert "run_fn raised" not in ends[0].err
    assert "fix the plugin" not in ends[0].err


@pytest.mark.slow
def test_shares_of_different_shapes_are_refused_on_each(project: Path) -> None:
    text = (project / "plugin.py").read_text()
    wrong = text.replace(
        '"x": np.stack([e["x"] for e in examples])', '"x": np.zeros((len(examples), SIZE), np.float32)'
    )
    wrong = wrong.replace(
        "def build_model", "import os\nSIZE = 128 + int(os.environ['REDCO_PROCESS_ID'])\n\n\ndef build_model"
    )
    (project / "plugin.py").write_text(wrong)
    ends = ended(started(*LONG), 60)
    assert [end.code for end in ends] == [1, 1]
    for end in ends:
        assert "batch['x'] is [128] float32 per example on process 0, but [129] float32 on process 1" in end.err


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.timeout(200)
def test_a_process_a_minute_late_is_waited_for() -> None:
    port, arguments = free_port(), ["train", "recipe.yaml", "mesh={data: 2}"]
    first = start(arguments, 0, 2, port)
    time.sleep(60)
    ends = ended([first, start(arguments, 1, 2, port)], 120)
    assert [end.code for end in ends] == [0, 0], ends


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_another_recipe_is_refused_on_each() -> None:
    port = free_port()
    children = [
        start(["train", "recipe.yaml", f"seed={process}"], process, 2, port, REDCO_TIMEOUT="20") for process in (0, 1)
    ]
    for process, end in enumerate(ended(children, 60)):
        assert end.code == 1
        named = f"recipe seed is {process} here, but not on process {1 - process}"
        assert f"the processes differ: {named}" in end.err
