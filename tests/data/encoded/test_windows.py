"""Streams packed window by window: every token once, and the same rows from any place as if they had never stopped."""

import itertools
import json
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.data.batch import BatchPlan
from redco_cli.data.encoded.rows import Rows
from redco_cli.data.encoded.windows import RowStream
from redco_cli.data.loader import train_batches
from redco_cli.errors import DataError, ExampleError
from tests.data.test_stream import Numbers

CAPACITY = 8


class Plain:
    """The same examples, which can only be read from their start."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


def length_of(number):
    """1 to 10 tokens, most of them short; none for each ninth text."""
    return 0 if number % 9 == 4 else number * 7919 % 10 + 1


def encode(example):
    number = example["id"]
    if number % 11 == 7:
        return None
    if number == encode.bad:
        raise ExampleError("encode_fn", "no", "yes")
    ids = np.array([100 * number + token for token in range(length_of(number))], np.int32)
    return {"input_ids": ids, "labels": ids}


encode.bad = None


def stream(examples, *, window=20, seed=0, overflow="truncate", packed=True, function=encode):
    return RowStream(
        examples,
        function,
        lambda encoded: Rows(encoded, CAPACITY, overflow, packed=packed, ignored=-100),
        window=window,
        seed=seed,
        where="p.py: encode_fn",
        name="data.train",
    )


def collate(rows):
    padded = {name: np.full((len(rows), CAPACITY), -1) for name in rows[0]}
    for index, row in enumerate(rows):
        for name, field in row.items():
            padded[name][index, : len(field)] = field
    return padded


def batches(rows, *, start=0, stop, batch=4):
    made = train_batches(
        rows,
        lambda *_: collate,
        BatchPlan(batch, batch),
        where="p.py: collate_fn",
        seed=0,
        shuffle=False,
        shuffle_buffer=1,
        start_step=start,
        stop_step=stop,
        workers=2,
    )
    with closing(made):
        return [{name: field.tolist() for name, field in batch.items()} for batch in made]


def tokens(rows):
    """The tokens of the rows of an epoch, and where each text of a row begins."""
    return [list(map(int, row["input_ids"])) for row in rows]


@settings(deadline=None, max_examples=15)
@given(n=st.integers(1, 90), window=st.integers(1, 40), at=st.integers(1, 30), seekable=st.booleans())
def test_rows_go_on_from_any_place(n, window, at, seekable):
    """In the middle of a window, between two, and in a later epoch; whether or not the source can be opened there."""

    def opened():
        return stream(Numbers(n) if seekable else Plain(Numbers(n)), window=window)

    whole = opened()
    expected = batches(whole, stop=at + 8)
    saved = json.loads(json.dumps(whole.journal.saved(at)))
    resumed = opened()
    resumed.journal.load(at, saved)
    assert batches(resumed, start=at, stop=at + 8) == expected[at:]


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_every_token_that_is_kept_comes_once_in_an_epoch(overflow):
    ids = [encode({"id": number}) for number in range(90)]
    texts = [text["input_ids"].tolist() for text in ids if text is not None]
    kept = {
        "truncate": [text[:CAPACITY] for text in texts],
        "split": texts,
        "drop": [text for text in texts if len(text) <= CAPACITY],
    }[overflow]
    rows = stream(Numbers(90), overflow=overflow)
    epochs = [tokens(rows.open(None, epoch)) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == sorted(itertools.chain(*kept))
    full = sum(map(len, kept)) / (len(epochs[0]) * CAPACITY)
    assert full > 0.85
    assert rows.counts.rows == 90
    assert rows.counts.noted["left out by encode_fn"] == 8
    assert rows.counts.noted[
        f"longer than data.max_length {CAPACITY}, and "
        + {"truncate": "cut", "split": "split", "drop": "left out"}[overflow]
    ]


def test_the_rows_of_a_window_follow_from_its_examples_alone():
    rows = stream(Numbers(60), seed=None)
    windows = [tokens(stream(Numbers(20), seed=None).first)]
    assert tokens(rows)[: len(windows[0])] == windows[0]
    assert tokens(rows) == tokens(stream(Numbers(60), seed=None))
    assert sorted(tokens(rows)) == sorted(tokens(stream(Numbers(60), seed=3)))
    assert tokens(rows) != tokens(stream(Numbers(60), seed=3))


def test_a_stream_is_known_by_its_first_tokens():
    def longer(example):
        found = encode(example)
        return found and {name: np.append(field, np.int32(3)) for name, field in found.items()}

    digest = stream(Numbers(30)).digest
    assert digest == stream(Numbers(60)).digest
    assert digest != stream(Numbers(30), function=longer).digest


def test_to_go_on_costs_a_window_or_two_however_much_was_read():
    window, costs = 400, []
    for step in (50, 300):
        whole = stream(Numbers(10**6), window=window)
        expected = batches(whole, batch=16, stop=step + 1)[-1]
        source = Numbers(10**6)
        resumed = stream(source, window=window)
        resumed.journal.load(step, json.loads(json.dumps(whole.journal.saved(step))))
        assert batches(resumed, batch=16, start=step, stop=step + 1) == [expected]
        costs.append(source.read)
    assert max(costs) <= 4 * window
    assert whole.examples.read > 5000


def test_pieces_of_one_window_encode_it_once():
    """As a `run_fn` reads them, which trains a step or two at a time."""
    seen = []

    def noted(example):
        seen.append(example["id"])
        return encode(example)

    rows, expected = (
        stream(Numbers(10**6), window=400, function=noted),
        batches(stream(Numbers(10**6), window=400), stop=60),
    )
    found = [batches(rows, start=step, stop=step + 1)[0] for step in range(60)]
    assert found == expected
    window = [number for number in seen if number < 400]
    assert len(window) == 400


def test_one_text_a_row_of_a_stream():
    rows = stream(Numbers(30), packed=False, overflow="split", seed=None)
    assert all(len({token // 100 for token in row}) == 1 for row in tokens(rows))
    assert "segment_ids" not in rows.first[0]


def test_a_bad_example_is_met_when_its_turn_comes():
    rows = stream(Numbers(90))
    try:
        encode.bad = 50
        found = []
        with pytest.raises(DataError, match=r"examples\[50\]: no"):
            found.extend(tokens([row]) for row in rows)
        assert len(found) == len(list(stream(Numbers(40))))
    finally:
        encode.bad = None


def test_what_is_wrong_with_a_row_has_the_places_of_its_examples():
    rows = stream(Numbers(90), seed=3)
    shared = next(number for number, row in enumerate(rows) if max(row["segment_ids"]) > 1)

    def refuse(some):
        raise ExampleError("collate_fn", "odd", "even", row=shared)

    settings = {"seed": 0, "shuffle": False, "shuffle_buffer": 1, "workers": 1, "where": "p.py"}
    with (
        closing(train_batches(rows, lambda *_: refuse, BatchPlan(8, 8), **settings)) as made,
        pytest.raises(DataError, match=r"^examples\[\d+\], examples\[\d+\].*: odd"),
    ):
        next(made)


def test_data_that_became_shorter_is_refused():
    whole = stream(Numbers(1000))
    batches(whole, stop=50)
    for n in (30, 500):
        resumed = stream(Numbers(n))
        resumed.journal.load(50, whole.journal.saved(50))
        if n == 30:
            with pytest.raises(
                DataError, match=r"data\.train: has fewer rows than when the run was saved, from example"
            ):
                batches(resumed, start=50, stop=51)
        else:
            batches(resumed, start=50, stop=51)


def test_a_stream_of_nothing_is_refused():
    text = "data.train: nothing is left of its first 90 examples: 90 of 90 rows longer than data.max_length 8, and left"
    long = stream(Numbers(90), overflow="drop", function=lambda _: encode({"id": 91}))
    with pytest.raises(DataError) as caught:
        next(zip(long.first, range(1), strict=False))
    assert str(caught.value).startswith(text)


def test_threads_end_with_the_stream():
    rows = iter(stream(Numbers(10**6), window=5000))
    next(rows)
    assert any("redco-encode" in thread.name for thread in threading.enumerate())
    rows.close()
    assert not any("redco-encode" in thread.name for thread in threading.enumerate())
