"""`train.profile` in whole runs: what is left behind, and a run that is stopped within the traced steps."""

import json
from pathlib import Path

import pytest

from redco_cli.run import train
from tests.training.tiny import assert_same_run, interrupted

FOLDER = Path("run/profile/start-5")
PROFILE = "train.profile={start: 5, steps: 3}"


def summary():
    return json.loads((FOLDER / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_project")
def test_a_run_with_a_trace_is_the_same_run(capfd):
    train("recipe.yaml", [PROFILE, "mesh={fsdp: 2}"])
    found = summary()
    assert (found["first_step"], found["steps"], found["devices"]) == (6, 3, 2)
    assert 0 < found["compute"] <= 1
    assert 0 < found["collectives"] <= 1
    assert 0 <= found["idle"] < 1
    assert found["operations"]
    assert any(one["source"] for one in found["operations"])  # which are longest depends on what else the machine does
    assert list(FOLDER.rglob("*.trace.json.gz"))
    assert [path.name for path in FOLDER.parent.iterdir()] == [FOLDER.name]
    said = capfd.readouterr().err
    assert "profile of steps 6 to 8 on 2 devices" in said
    assert "trace: run/profile/start-5" in said
    train("recipe.yaml", ["output_dir=plain", "mesh={fsdp: 2}"])
    assert_same_run("run", "plain")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_project")
def test_what_a_signal_cuts_off_is_traced_again(capfd):
    interrupted(7, PROFILE)
    assert not FOLDER.exists()
    train("recipe.yaml", [PROFILE])
    found = summary()
    assert (found["first_step"], found["steps"]) == (9, 3)  # not the first step of a process
    assert "the run went on behind step 5: tracing from step 9 on" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_project")
def test_a_trace_that_is_there_stays():
    interrupted(10, PROFILE)
    before = summary()
    train("recipe.yaml", [PROFILE])
    assert summary() == before
