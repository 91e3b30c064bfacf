import itertools
import json
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.data.batch import BatchPlan, eval_slices
from redco_cli.data.loader import eval_batches, order, predict_batches, train_batches
from redco_cli.data.source import load_source
from redco_cli.errors import DataError, PluginError
from redco_cli.recipe.data import SourceSection

WHERE = "plugins/p.py:3: collate_fn"


def rows(n):
    return [{"id": index} for index in range(n)]


def collate(examples):
    return {"id": np.array([example["id"] for example in examples])}


class Endless:
    """An iterable without a length; each pass gives the same n examples."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(rows(self.n))


def train(examples, plan, **changed):
    settings = {"seed": 0, "shuffle": True, "shuffle_buffer": 7, "workers": 2, "where": WHERE}
    given = changed.pop("collate", collate)
    return train_batches(examples, lambda *_: given, plan, **(settings | changed))


def ids(examples, plan, **changed):
    """[steps, n_micro, share], of a run that ends."""
    with closing(train(examples, plan, **changed)) as batches:
        return np.array([batch["id"] for batch in batches])


# Order.


@settings(deadline=None)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(n, seed, epoch):
    index = order(n, seed=seed, shuffle=True)
    assert sorted(index(epoch * n + offset) for offset in range(n)) == list(range(n))


def test_each_epoch_of_very_many_examples_is_a_permutation(monkeypatch):
    monkeypatch.setattr("redco_cli.data.loader._LARGEST_TABLE", 999)
    for epoch in (0, 1, 77):
        index = order(1000, seed=5, shuffle=True)
        assert sorted(index(epoch * 1000 + offset) for offset in range(1000)) == list(range(1000))
    assert 0 <= order(10**9, seed=5, shuffle=True)(10**12) < 10**9


def test_epochs_and_seeds_differ_and_the_same_seed_does_not():
    def epoch(seed, number):
        index = order(100, seed=seed, shuffle=True)
        return tuple(index(number * 100 + offset) for offset in range(100))

    assert len({epoch(seed, number) for seed in range(8) for number in range(8)}) == 64
    assert epoch(3, 5) == epoch(3, 5)


def test_the_order_of_a_seed_never_changes(monkeypatch):
    """A run resumed under a newer redco, numpy or grain reads on where it stopped."""
    index = order(10, seed=3, shuffle=True)
    assert [index(position) for position in range(20)] == [
        *(1, 5, 9, 0, 4, 7, 2, 8, 3, 6),
        *(3, 0, 4, 8, 2, 7, 9, 6, 1, 5),
    ]
    monkeypatch.setattr("redco_cli.data.loader._LARGEST_TABLE", 9)
    index = order(10, seed=3, shuffle=True)
    assert [index(position) for position in range(20)] == [
        *(4, 6, 9, 7, 5, 3, 1, 8, 2, 0),
        *(8, 1, 3, 7, 9, 0, 5, 4, 2, 6),
    ]


def test_without_shuffling_examples_come_as_they_are():
    index = order(5, seed=0, shuffle=False)
    assert [index(position) for position in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


# Training batches.


@settings(deadline=None, max_examples=20)
@given(n=st.integers(1, 40), global_batch=st.sampled_from([4, 8]), shuffle=st.booleans())
def test_batches_run_through_epochs_without_dropping_any_example(n, global_batch, shuffle):
    steps = 2 * n  # global_batch * steps is a multiple of n: whole epochs
    seen = ids(rows(n), BatchPlan(global_batch, 4), shuffle=shuffle, stop_step=steps).reshape(-1)
    index = order(n, seed=0, shuffle=shuffle)
    assert seen.tolist() == [index(position) for position in range(global_batch * steps)]
    for epoch in seen.reshape(-1, n):
        assert sorted(epoch) == list(range(n))


def part(process, processes):
    """The contiguous rows of a process, as those of all tile a batch."""
    return lambda size: range(process * size // processes, (process + 1) * size // processes)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("make", [rows, Endless])
def test_the_global_batch_is_the_same_for_any_number_of_processes(make, processes):
    one = ids(make(30), BatchPlan(16, 8), stop_step=5)
    parts = [ids(make(30), BatchPlan(16, 8, part(p, processes)), stop_step=5) for p in range(processes)]
    assert one.shape == (5, 2, 8)
    assert parts[0].shape == (5, 2, 8 // processes)
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), one)


@pytest.mark.parametrize("make", [rows, Endless])
def test_each_process_collates_only_its_own_examples(make):
    sizes = []

    def counting(examples):
        sizes.append(len(examples))
        return collate(examples)

    ids(make(30), BatchPlan(16, 8, part(1, 4)), stop_step=3, collate=counting)
    assert sizes == [4, 4, 4]


@pytest.mark.parametrize("make", [rows, Endless])
@pytest.mark.parametrize("start", [0, 1, 7, 20])
def test_a_run_that_starts_later_reads_the_tail_of_the_whole_run(make, start):
    plan = BatchPlan(4, 2)
    whole = ids(make(13), plan, stop_step=20)
    tail = ids(make(13), plan, start_step=start, stop_step=20)
    np.testing.assert_array_equal(tail.reshape(-1, 2, 2), whole[start:])


def test_starting_late_costs_no_reading():
    class Counting(list):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    ids(Counting(rows(10)), BatchPlan(2, 2), start_step=10**12, stop_step=10**12 + 3)
    assert Counting.read == 6


def test_what_a_stream_skips_is_not_collated():
    sizes = []

    def counting(examples):
        sizes.append(len(examples))
        return collate(examples)

    ids(Endless(13), BatchPlan(4, 2), start_step=7, stop_step=9, collate=counting)
    assert sizes == [4, 4]


def test_a_run_without_an_end_goes_on():
    with closing(train(rows(3), BatchPlan(2, 2))) as batches:
        assert len(list(itertools.islice(batches, 100))) == 100


def test_arrays_keep_their_other_dims():
    def images(examples):
        return {"x": np.zeros((len(examples), 5, 0)), "y": np.ones(len(examples), np.int64)}

    with closing(train(rows(9), BatchPlan(8, 2), collate=images)) as batches:
        batch = next(batches)
    assert {key: (value.shape, str(value.dtype)) for key, value in batch.items()} == {
        "x": ((4, 2, 5, 0), "float32"),
        "y": ((4, 2), "int32"),
    }


# Threads.


def test_threads_do_not_change_the_order():
    def uneven(examples):
        time.sleep(0.003 * (examples[0]["id"] % 3))
        return collate(examples)

    plan = BatchPlan(4, 4)
    reference = ids(rows(31), plan, stop_step=30, workers=1)
    np.testing.assert_array_equal(ids(rows(31), plan, stop_step=30, workers=8, collate=uneven), reference)


def test_examples_are_read_together_but_collated_one_batch_at_a_time():
    inside, most = 0, 0

    def watched(examples):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1
        return collate(examples)

    class Meeting(list):
        """Reading waits until two threads are at it."""

        barrier = threading.Barrier(2, timeout=30)

        def __getitem__(self, index):
            Meeting.barrier.wait()
            return super().__getitem__(index)

    assert len(ids(Meeting(rows(8)), BatchPlan(1, 1), stop_step=16, workers=2, collate=watched)) == 16
    assert most == 1


@pytest.mark.parametrize("make", [rows, Endless])
@pytest.mark.parametrize("kind", [PluginError(WHERE, "raised ValueError"), KeyError("x"), MemoryError()])
def test_an_error_in_a_thread_reaches_the_consumer_as_itself_at_its_step(make, kind):
    def failing(examples):
        if any(example["id"] == 9 for example in examples):
            raise kind
        return collate(examples)

    batches = train(make(20), BatchPlan(2, 2), shuffle=False, collate=failing)
    assert [next(batches)["id"].tolist() for _ in range(4)] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    with pytest.raises(type(kind)) as error:
        next(batches)
    assert error.value is kind


def test_a_stop_iteration_in_a_thread_does_not_end_the_run_in_silence():
    def exhausted(examples):
        return next(iter(()))

    batches = train(rows(4), BatchPlan(2, 2), collate=exhausted)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(batches)


def test_a_batch_that_breaks_the_contract_is_told_with_its_place():
    batches = train(rows(4), BatchPlan(2, 2), collate=lambda examples: {"x": np.zeros(3)})
    with pytest.raises(PluginError) as error:
        next(batches)
    assert str(error.value) == (
        f"{WHERE}: batch['x'] has shape (3,)\n"
        "  -> return a dict of numpy arrays with leading dim 2, one row for each of the 2 examples"
    )


@pytest.mark.parametrize("make", [rows, Endless])
def test_closing_stops_the_thread(make):
    """It does not wait for what that is at, and nothing new is begun."""
    collated, held, closed = [], threading.Event(), threading.Event()

    def waiting(examples):
        collated.append(1)
        if examples[0]["id"] >= 6:  # the fourth batch, which is begun at the latest when the second is asked for
            held.set()
            closed.wait(60)
        return collate(examples)

    batches = train(make(100), BatchPlan(2, 2), collate=waiting, workers=1, shuffle=False)
    assert [next(batches)["id"].tolist() for _ in range(2)] == [[[0, 1]], [[2, 3]]]
    assert held.wait(60)
    begun, began = len(collated), time.monotonic()
    batches.close()
    assert time.monotonic() - began < 30
    closed.set()
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("redco-data") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(collated) == begun


# Streams.


def test_a_stream_is_shuffled_within_its_buffer_afresh_in_each_epoch():
    n, buffer = 40, 7
    seen = ids(Endless(n), BatchPlan(4, 4), stop_step=20, shuffle_buffer=buffer).reshape(2, n)
    for epoch in seen:
        assert sorted(epoch) == list(range(n))
        # An example cannot come before the buffer has reached it.
        assert all(example <= position + buffer for position, example in enumerate(epoch))
    assert not np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], np.arange(n))
    np.testing.assert_array_equal(ids(Endless(n), BatchPlan(4, 4), stop_step=20).reshape(2, n), seen)
    assert not np.array_equal(ids(Endless(n), BatchPlan(4, 4), stop_step=20, seed=1).reshape(2, n), seen)


def test_a_buffer_larger_than_the_stream_shuffles_all_of_it():
    seen = ids(Endless(6), BatchPlan(6, 6), stop_step=50, shuffle_buffer=1000).reshape(50, 6)
    assert all(sorted(epoch) == list(range(6)) for epoch in seen)
    assert len({tuple(epoch) for epoch in seen}) > 40
    assert set(seen[:, 0]) == set(range(6))


def test_a_stream_keeps_its_order_without_shuffling():
    seen = ids(Endless(5), BatchPlan(3, 3), stop_step=5, shuffle=False)
    assert seen.reshape(-1).tolist() == [*range(5)] * 3


def test_a_stream_that_cannot_be_read_again_is_refused():
    class Once:
        def __init__(self):
            self.rows = iter(rows(5))

        def __iter__(self):
            return self.rows

    with pytest.raises(DataError) as error:
        ids(Once(), BatchPlan(2, 2), stop_step=10)
    assert str(error.value) == (
        "data.train: the stream holds no examples in epoch 1\n"
        "  -> return an object whose __iter__ starts afresh each time"
    )


# Through `datasets`.


@pytest.mark.parametrize("streaming", [False, True])
def test_loaded_data_comes_in_the_same_order_as_a_list_or_any_other_stream(tmp_path, streaming):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(50)))
    source = SourceSection(path="json", data_files="a.jsonl")
    loaded = load_source(source, "data.train", streaming=streaming, directory=tmp_path, where=str)
    expected = ids(Endless(50) if streaming else rows(50), BatchPlan(8, 4), stop_step=15)
    np.testing.assert_array_equal(ids(loaded, BatchPlan(8, 4), stop_step=15), expected)
    np.testing.assert_array_equal(ids(loaded, BatchPlan(8, 4), start_step=9, stop_step=15), expected[9:])


# Evaluation and prediction.


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 50), processes=st.sampled_from([1, 2, 4]), per_shard=st.integers(1, 3))
def test_evaluation_covers_every_example_once_over_all_processes(n, processes, per_shard):
    shards = 4
    cuts = eval_slices(n, shards * per_shard, shards)
    parts = [part(p, processes) for p in range(processes)]
    runs = [list(eval_batches(rows(n), lambda _: collate, cuts, own, where=WHERE, workers=2)) for own in parts]
    covered = []
    for number, cut_out in enumerate(cuts):
        mine = [run[number] for run in runs]
        assert all(said == cut_out for said, _ in mine)
        if cut_out.sharded:
            assert len({len(batch["id"]) for _, batch in mine}) == 1
            covered += np.concatenate([batch["id"] for _, batch in mine]).tolist()
        else:
            assert all(batch["id"].tolist() == mine[0][1]["id"].tolist() for _, batch in mine)
            covered += mine[0][1]["id"].tolist()
    assert covered == list(range(n))


@pytest.mark.parametrize("start", [0, 4, 9, 10])
@pytest.mark.parametrize("processes", [1, 2])
def test_prediction_batches_have_one_size_and_say_which_rows_count(start, processes):
    runs = [
        list(
            predict_batches(
                rows(10), lambda places: (places, collate), 4, start, part(p, processes), where=WHERE, workers=2
            )
        )
        for p in range(processes)
    ]
    covered = []
    for parts in zip(*runs, strict=True):
        places, indices, _ = parts[0]
        assert indices == places
        batch = np.concatenate([piece["id"] for _, _, piece in parts])
        assert batch.shape == (4,)
        assert batch[: len(indices)].tolist() == list(indices)
        assert all(filling == 9 for filling in batch[len(indices) :])
        covered += indices
    assert covered == list(range(start, 10))
