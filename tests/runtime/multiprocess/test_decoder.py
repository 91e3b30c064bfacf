"""The decoder, its fused loss and its generation, on meshes whose axes span processes: equal to one process."""

from pathlib import Path

import pytest

from tests.projects import write_answers
from tests.runtime.multiprocess.processes import equal_to_one

SPANNING = ["{data: 4}", "{fsdp: 4}", "{tensor: 4}", "{data: 2, tensor: 2}", "{fsdp: 2, tensor: 2}"]
LLAMA = """
predict: {generation: {max_new_tokens: 4, do_sample: true}}
train: {global_batch_size: 8, steps: 12, learning_rate: 3e-3, schedule: constant}
eval: {every: 4, predict: true}
checkpoint: {every: 4, keep: 9}
mesh: {data: 1}
output_dir: one
"""


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny Llama that learns to answer, with answers of uneven length."""
    write_answers(tmp_path, lambda i: "xyz"[i % 3] * (1 + i * i % 7), LLAMA, num_key_value_heads=4)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("mesh", SPANNING)
def test_two_processes_equal_one(mesh: str) -> None:
    equal_to_one(mesh, 2, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("mesh", ["{data: 4}", "{fsdp: 4}", "{tensor: 4}", "{data: 2, fsdp: 2}"])
def test_four_processes_equal_one(mesh: str) -> None:
    equal_to_one(mesh, 4, 1)
