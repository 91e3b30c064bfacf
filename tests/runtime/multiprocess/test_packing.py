"""Packed streams in runs of several processes: the rows of one."""

import json
from pathlib import Path

import pytest

from redco_cli.run import train
from tests.runtime.multiprocess.processes import run_several, same
from tests.training.test_packing import RECIPE

STREAMED = ["data.streaming=true", "data.shuffle_buffer=15", "data.eval=null", "eval={every: null, predict: false}"]


@pytest.mark.slow
def test_a_packed_stream_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    texts = [{"text": "xyz"[number % 3] * (number * 7 % 18)} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    several = [*STREAMED, "output_dir=several", "mesh.data=4"]
    ends = run_several(["train", "recipe.yaml", *several, "train.steps=3", "train.schedule=constant"], 2, 2)
    told = [end.err + end.out for end in ends]
    assert sum("longer than data.max_length 16, and cut" in text for text in told) == 1
    train("recipe.yaml", [*STREAMED, "output_dir=once", "train.steps=8", "train.schedule=constant"])
    run_several(["train", "recipe.yaml", *several, "train.steps=8", "train.schedule=constant"], 2, 2)
    same("several", "once")
