"""Two runs of two processes in one output directory: one trains, and every process of the other is told why not."""

import time
from pathlib import Path

import pytest

from redco_cli.runtime.liveness import this_process
from tests.runtime.multiprocess.processes import ended, exact, free_port, run_several, start

SHORT = ["eval.predict=false", "mesh={data: 2}"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("project")
def test_the_second_run_is_refused_on_all_of_its_processes() -> None:
    run_several(["train", "recipe.yaml", "output_dir=whole", *SHORT], 2, 1)
    port, other = free_port(), free_port()
    first = [start(["train", "recipe.yaml", *SHORT], process, 2, port) for process in range(2)]
    while not Path("run/.lease").exists():
        assert all(child.poll() is None for child in first)
        time.sleep(0.01)
    ends = ended([start(["train", "recipe.yaml", *SHORT], process, 2, other) for process in range(2)])
    won = ended(first)
    assert [end.code for end in won] == [0, 0], won
    for end in ends:
        said = " ".join(end.err.split())
        if end.code == 0:  # they met only when the first had ended
            assert all("is finished" in one.err for one in ends[:1]), ends
            continue
        assert end.code == 1
        assert f"run is written by host {this_process().host}, pid {first[0].pid}, process 0 of 2, since 20" in said
    exact("run", "whole", 12)
    assert not Path("run/.lease").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("project")
def test_a_run_whose_processes_are_killed_is_continued_at_once() -> None:
    run_several(["train", "recipe.yaml", "output_dir=whole", *SHORT], 2, 1)
    port = free_port()
    first = [start(["train", "recipe.yaml", *SHORT], process, 2, port) for process in range(2)]
    while not list(Path("run").glob("checkpoint-4")):
        assert all(child.poll() is None for child in first)
        time.sleep(0.01)
    for child in first:
        child.kill()
    ended(first)
    assert not any("watching" in end.err for end in run_several(["train", "recipe.yaml", *SHORT], 2, 1))
    exact("run", "whole", 12)
