"""Streams that are read on from any place: the same examples as if they had never stopped, and few read twice."""

import itertools
import json
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.data.batch import BatchPlan
from redco_cli.data.loader import train_batches
from redco_cli.data.source import load_source
from redco_cli.data.stream import Journal, ShuffledStream, ShuffleOrder
from redco_cli.errors import DataError
from redco_cli.recipe.data import SourceSection


class Numbers:
    """Examples 0, 1, ..., n - 1, which can be opened anywhere; says how many were read."""

    def __init__(self, n, journal=None):
        self.n, self.read, self.journal = n, 0, journal or Journal()

    def __iter__(self):
        return iter(self.open(None))

    def open(self, bookmark, epoch=0):
        return OpenNumbers(self, bookmark or 0)


class OpenNumbers:
    def __init__(self, numbers, start):
        self.numbers, self.start = numbers, start

    def __iter__(self):
        for number in range(self.start, self.numbers.n):
            self.start = number + 1
            self.numbers.read += 1
            yield {"id": number}

    def bookmark(self):
        return self.start


def ids(examples, batch=4, *, start=0, stop, buffer=7, seed=0, shuffle=True):
    def collate(some):
        return {"id": np.array([example["id"] for example in some])}

    batches = train_batches(
        examples,
        lambda *_: collate,
        BatchPlan(batch, batch),
        where="p.py: collate_fn",
        seed=seed,
        shuffle=shuffle,
        shuffle_buffer=buffer,
        start_step=start,
        stop_step=stop,
        workers=2,
    )
    with closing(batches):
        return [batch["id"].ravel().tolist() for batch in batches]


def naive(n, buffer, seed, epoch):
    """An epoch as the docstring of the module tells it, example by example."""
    order = ShuffleOrder(seed, buffer)
    places, held = order.places(epoch, 0), list(range(min(n, buffer)))
    for number in range(buffer, n):
        place = next(places)
        yield held[place]
        held[place] = number
    for place in order.rest(epoch, len(held)):
        yield held[place]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 300), buffer=st.integers(0, 40), at=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
def test_a_stream_goes_on_from_any_place(n, buffer, at, seed):
    """In the middle of an epoch, in what is left at its end, between two, and where the buffer holds all of it."""
    journal = Journal()
    journal.begin(seed, buffer)
    whole = ShuffledStream(Numbers(n, journal), ShuffleOrder(seed, buffer), 1, None)
    expected = []
    for example in itertools.islice(whole, at):
        expected.append(example["id"])
        assert whole.number(whole.position) == example["id"]
    journal.mark(9, whole.position)
    after = [example["id"] for example in itertools.islice(whole, 60)]
    epochs = [list(naive(n, buffer, seed, epoch)) if buffer else list(range(n)) for epoch in range(760 // n + 1)]
    assert expected + after == list(itertools.chain(*epochs))[: at + 60]

    saved = json.loads(json.dumps(journal.saved(9)))
    resumed = Numbers(n)
    resumed.journal.load(9, saved)
    assert resumed.journal.saved(9) == saved
    reading = ShuffledStream(resumed, ShuffleOrder(seed, buffer), 1, resumed.journal.position(9))
    assert [example["id"] for example in itertools.islice(reading, 60)] == after


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 50), draws=st.integers(0, 40_000), epoch=st.integers(0, 3))
def test_what_the_buffer_holds_is_known_without_drawing(size, draws, epoch):
    order, held = ShuffleOrder(3, size), list(range(size))
    for number, place in enumerate(itertools.islice(order.places(epoch, 0), draws), size):
        held[place] = number
    assert order.held(epoch, draws) == held


def test_the_order_of_a_seed_never_changes():
    assert list(naive(12, 5, 3, 0)) == [0, 4, 5, 7, 2, 1, 9, 8, 10, 3, 11, 6]
    assert list(naive(12, 5, 3, 1)) == [0, 4, 6, 5, 8, 1, 9, 11, 3, 7, 2, 10]
    assert list(itertools.islice(ShuffleOrder(3, 1000).places(2, 2**14 - 2), 4)) == [353, 66, 828, 210]


def test_to_go_on_costs_no_more_however_much_was_read():
    buffer, batch, n, costs = 100, 10, 10**6, []
    for step in (1_000, 4_000):
        examples = Numbers(n)
        expected = ids(examples, batch, stop=step + 3, buffer=buffer)[-3:]
        resumed = Numbers(n)
        resumed.journal.load(step, json.loads(json.dumps(examples.journal.saved(step))))
        assert ids(resumed, batch, start=step, stop=step + 3, buffer=buffer) == expected
        costs.append(resumed.read)
    assert max(costs) < 12 * buffer
    assert examples.read > 40_000


def test_calls_of_one_process_do_not_begin_anew():
    """As a `run_fn` does that trains in rounds."""
    examples = Numbers(10**6)
    whole = ids(Numbers(10**6), stop=1000)
    assert [ids(examples, start=start, stop=start + 50) for start in range(0, 1000, 50)] == [
        whole[start : start + 50] for start in range(0, 1000, 50)
    ]
    assert examples.read < 20 * (50 * 4 + 12 * 7 + 64)


def test_a_place_of_another_order_is_not_taken():
    examples = Numbers(50)
    ids(examples, stop=10)
    assert ids(examples, start=5, stop=8, seed=1) == ids(Numbers(50), stop=8, seed=1)[5:]
    assert ids(examples, start=5, stop=8, buffer=9) == ids(Numbers(50), stop=8, buffer=9)[5:]
    assert ids(examples, start=5, stop=8, shuffle=False) == ids(Numbers(50), stop=8, shuffle=False)[5:]


def test_data_that_became_shorter_is_refused():
    examples = Numbers(1000)
    ids(examples, stop=100)
    shorter = Numbers(300)
    shorter.journal.load(100, examples.journal.saved(100))
    with pytest.raises(
        DataError, match=r"data.train: has fewer examples than when the run was saved: example 4\d\d is"
    ):
        ids(shorter, start=100, stop=101)


@pytest.mark.parametrize("form", ["json", "parquet", "text", "saved"])
@pytest.mark.parametrize("limit", [None, 130])
@pytest.mark.parametrize("shuffle", [True, False])
def test_files_go_on_in_another_process(tmp_path, form, limit, shuffle):
    import datasets

    rows = datasets.Dataset.from_list([{"id": number} for number in range(150)])
    for part in range(3):
        shard = rows.shard(3, part, contiguous=True)
        if form == "parquet":
            shard.to_parquet(tmp_path / f"{part}.parquet")
        elif form == "text":
            (tmp_path / f"{part}.text").write_text("".join(f"{number}\n" for number in shard["id"]))
        else:
            (tmp_path / f"{part}.json").write_text("".join(f'{{"id": {number}}}\n' for number in shard["id"]))
    rows.save_to_disk(tmp_path / "rows")
    source = {"path": str(tmp_path / "rows")} if form == "saved" else {"path": form, "data_files": f"*.{form}"}

    def opened():
        section = SourceSection(**source, limit=limit)
        return load_source(section, "data.train", streaming=True, directory=tmp_path, where=str)

    def numbered(examples, **rest):
        plan = BatchPlan(8, 8)

        def collate(some):
            return {"id": np.array([int(example.get("id", example.get("text"))) for example in some])}

        settings = {"seed": 0, "shuffle": shuffle, "shuffle_buffer": 9, "workers": 1, "where": "p.py"}
        with closing(train_batches(examples, lambda *_: collate, plan, **settings, **rest)) as batches:
            return [batch["id"].ravel().tolist() for batch in batches]

    examples = opened()
    whole = numbered(examples, stop_step=45)
    assert sorted(list(itertools.chain(*whole))[: limit or 150]) == list(range(limit or 150))
    for step in (1, 13, 18, 33, 44):
        resumed = opened()
        resumed.journal.load(step, json.loads(json.dumps(examples.journal.saved(step))))
        assert numbered(resumed, start_step=step, stop_step=45) == whole[step:]
