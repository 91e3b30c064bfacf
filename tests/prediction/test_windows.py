"""Prompts sorted by length within windows: each once, and wherever one begins, the same batches."""

from types import SimpleNamespace

import numpy as np
import pytest

from redco_cli.data.loader import predict_batches
from redco_cli.prediction import windows as module
from redco_cli.prediction.windows import Windows

LENGTHS = [5 + 20 * (index % 3) + 40 * (index % 7 == 3) for index in range(43)]
EXAMPLES = [{"n": length} for length in LENGTHS]


@pytest.fixture
def arranged(monkeypatch):
    """Makes windows for batches of 2, with what measures and collates examples."""
    monkeypatch.setattr(module, "bound_measure", lambda plugin, ctx: lambda examples: [one["n"] for one in examples])

    def collate(examples, length):
        return {"length": np.array([length] * len(examples)), "n": np.array([one["n"] for one in examples])}

    def made(**changed):
        data = SimpleNamespace(max_length=100, buckets=changed.pop("buckets", (16, 32)))
        plugin = SimpleNamespace(**{"encode_fn": len, "build_model": None, **changed})
        job = SimpleNamespace(recipe=SimpleNamespace(data=data), plugin=plugin, collate_place="p.py")
        job.collate, job.context = (lambda stage: collate), (lambda stage: None)
        return Windows(job, EXAMPLES, 2)

    return made


def batches(windows, start=0):
    """Places, indices and length of each batch, and whether a window ends with it."""
    found = predict_batches(EXAMPLES, windows.arrange, 2, start, where="p.py", workers=3)
    return [(places, list(indices), int(batch["length"][0]), windows.ends(places)) for places, indices, batch in found]


def test_each_window_has_its_examples_once_the_longest_first(arranged):
    windows = arranged()
    assert windows.size == 16
    found = batches(windows)
    assert [places.start for places, *_ in found if places.start % 16 == 0] == [0, 16, 32]
    for first, last in ((0, 16), (16, 32), (32, 43)):
        inside = [batch for batch in found if first <= batch[0].start < last]
        assert sorted(index for _, indices, _, _ in inside for index in indices) == list(range(first, last))
        lengths = [length for _, _, length, _ in inside]
        assert lengths == sorted(lengths, reverse=True)
        assert set(lengths) == {16, 32, 100}
        assert [ends for *_, ends in inside] == [False] * (len(inside) - 1) + [True]
    assert all(max(LENGTHS[index] for index in indices) <= length for _, indices, length, _ in found)
    assert not windows._known  # a window that is done is forgotten


def test_who_continues_meets_the_same_batches(arranged):
    whole = batches(arranged())
    assert batches(arranged(), start=16) == whole[8:]
    assert batches(arranged(), start=32) == whole[16:]


@pytest.mark.parametrize("changed", [{"buckets": False}, {"encode_fn": None}, {"buckets": "auto", "build_model": len}])
def test_otherwise_a_window_is_a_batch_as_long_as_any(arranged, changed):
    windows = arranged(**changed)
    assert windows.size == 2
    found = batches(windows, start=4)
    assert [indices for _, indices, _, _ in found] == [
        *([first, first + 1] for first in range(4, 42, 2)),
        [42],
    ]
    assert {(length, ends) for *_, length, ends in found} == {(100, True)}
