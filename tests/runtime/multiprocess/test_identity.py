"""Several processes and the code and data of a run: they refuse together, and what one failed of all may repair."""

import json
from pathlib import Path

import pytest

from redco_cli.training.saving.identity import CONTINUATION_NAME
from tests.runtime.multiprocess.processes import Ended, ended, free_port, run_several, start
from tests.training.tiny import PLUGIN, write_project

TRAIN = ["train", "recipe.yaml", "eval.predict=false", "eval.at_start=false", "eval.every=12", "mesh={data: 2}"]
FAILS = """
    import os
    ctx.step == 8 and os.environ["REDCO_PROCESS_ID"] == "1" and examples["no such"]
"""


def several(*overrides: str) -> list[Ended]:
    port = free_port()
    return ended([start([*TRAIN, *overrides], process, 2, port) for process in range(2)])


@pytest.mark.slow
def test_two_processes_refuse_accept_and_repair_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    plugin, place = tmp_path / "plugin.py", "def collate_fn(ctx, examples):"
    plugin.write_text(PLUGIN.replace(place, f"{place}{FAILS}"))
    ends = several()
    assert [end.code for end in ends] == [1, 1]
    print(*ends, sep="\n")
    assert json.loads(Path("run", CONTINUATION_NAME).read_text())["failed"]["permits"] == ["plugin", "data"]
    assert not Path("run/checkpoint-8").exists()  # one that fails alone cannot save what the others hold
    plugin.write_text(PLUGIN)
    repaired = run_several([*TRAIN, "train.steps=12"], 2, 1)
    said = "checkpoint-6 goes on with other code, as the run had ended by an error of its plugin: plugin.py: collate_fn"
    assert [said in end.err for end in repaired] == [True, False]
    assert not Path("run", CONTINUATION_NAME).exists()
    plugin.write_text(PLUGIN.replace("nn.tanh", "nn.relu"))
    longer = ["train.steps=15", "checkpoint.extend=restart"]
    for end in several(*longer):
        assert (end.code, "checkpoint-12 was trained with other code: plugin.py: Net differs" in end.err) == (1, True)
    run_several([*TRAIN, *longer, "checkpoint.accept=plugin"], 2, 1)
    (_, accepted) = json.loads(Path("run/checkpoint-15/meta/metadata").read_text())["accepted"]
    assert (accepted["step"], accepted["why"]) == (12, "by checkpoint.accept=plugin")
