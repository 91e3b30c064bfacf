"""Streams whose texts are rows of their own: looked at by their first, and each step as long as its longest row."""

import itertools
import json
from contextlib import closing

import numpy as np
import pytest

from redco_cli.data.batch import BatchPlan
from redco_cli.data.encoded.buckets import buckets_of
from redco_cli.data.encoded.rows import Rows
from redco_cli.data.encoded.texts import LOOKED_AT, TextStream
from redco_cli.data.encoded.windows import RowStream
from redco_cli.data.loader import train_batches
from redco_cli.data.stream import is_seekable
from redco_cli.errors import DataError, ExampleError
from redco_cli.recipe.data import DataSection
from tests.data.encoded.test_windows import Plain
from tests.data.test_stream import Numbers

CAPACITY = 128


def length_of(number):
    """1 to 29 tokens; of each eighth text 60 more, and of one beyond the first thousand as many as there may be."""
    return CAPACITY if number == 1500 else number * 7 % 29 + 1 + (60 if number % 8 == 5 else 0)


def encode(example):
    ids = np.full(length_of(example["id"]), example["id"], np.int32)
    return {"input_ids": ids, "labels": ids}


def pack(encoded):
    return Rows(encoded, CAPACITY, "truncate", packed=False, ignored=-100)


def stream(examples, function=encode):
    return TextStream(examples, function, pack, "p.py: encode_fn", "data.train")


def section(buckets="auto"):
    return DataSection(max_length=CAPACITY, packing=False, streaming=True, buckets=buckets)


def measure(examples):
    return [length_of(example["id"]) for example in examples]


def batches(texts, rows=range, *, buckets, start=0, stop=8):
    """The ids of each batch, and what its rows are padded to, as one of several processes makes it."""

    def collate(_step, longest):
        def of(examples):
            shape = len(examples), buckets.holding(max(longest, *measure(examples)))
            return {"id": np.array([example["id"] for example in examples]), "input_ids": np.zeros(shape)}

        return of

    made = train_batches(
        texts,
        collate,
        BatchPlan(8, 4, rows),
        where="p.py: collate_fn",
        seed=0,
        shuffle=True,
        shuffle_buffer=7,
        start_step=start,
        stop_step=stop,
        workers=2,
        measure=measure,
    )
    with closing(made):
        return [(batch["id"].tolist(), batch["input_ids"].shape[-1]) for batch in made]


def test_every_process_pads_a_step_alike_and_the_same_after_it_was_left():
    texts = stream(Numbers(10**5))
    buckets = buckets_of(section(), texts, texts, 8)
    whole = batches(texts, buckets=buckets)
    assert len({length for _, length in whole}) > 1
    for ids, length in whole:
        longest = max(length_of(number) for number in itertools.chain(*ids))
        assert length == min(one for one in buckets.lengths if one >= longest)
    for process in (0, 1):
        part = batches(stream(Numbers(10**5)), lambda size, first=process: range(first, size, 2), buckets=buckets)
        assert part == [([row[process::2] for row in ids], length) for ids, length in whole]
    resumed = stream(Numbers(10**5))
    resumed.journal.load(5, json.loads(json.dumps(texts.journal.saved(5))))
    assert batches(resumed, buckets=buckets, start=5) == whole[5:]


def test_lengths_are_chosen_by_the_first_examples_and_max_length_is_always_among_them():
    source = Numbers(10**5)
    texts = stream(source)
    assert buckets_of(section(), texts, texts, 1).lengths == (32, 96, CAPACITY)
    assert source.read == LOOKED_AT
    assert buckets_of(section((64,)), texts, texts, 8).lengths == (64, CAPACITY)
    assert buckets_of(section(buckets=False), texts, texts, 8) is None
    windows = RowStream(Numbers(99), encode, pack, window=20, seed=0, where="p.py", name="data.train")
    assert buckets_of(section((64,)), windows, windows, 8).lengths == (64, CAPACITY)
    rows = stream(Numbers(5)).first
    assert buckets_of(section(), rows, texts, 1).lengths == (32, 96, CAPACITY)


def test_a_stream_that_can_only_be_read_from_its_start_stays_one():
    assert is_seekable(stream(Numbers(9)))
    plain = stream(Plain(Numbers(9)))
    assert not is_seekable(plain)
    assert [example["id"] for example in plain] == list(range(9))
    assert stream(Numbers(9)).digest == plain.digest != stream(Numbers(7)).digest


def test_what_is_wrong_with_the_first_examples_is_told_with_their_place():
    def bad(example):
        if example["id"] == 700:
            raise ExampleError("encode_fn", "no", "yes")
        return encode(example)

    with pytest.raises(DataError, match=r"examples\[700\]: no"):
        _ = stream(Numbers(900), bad).first


def test_what_is_wrong_with_the_row_of_another_process_has_its_place():
    def refusing(examples):
        raise ExampleError("encode_fn", "no", "yes", row=[example["id"] for example in examples].index(3))

    plan = BatchPlan(4, 4, lambda size: range(2))
    settings = {"seed": 0, "shuffle": False, "shuffle_buffer": 1, "workers": 1, "where": "p.py"}
    made = train_batches(stream(Numbers(9)), lambda *_: encode, plan, **settings, measure=refusing)
    with closing(made), pytest.raises(DataError, match=r"^examples\[3\]: no"):
        next(made)
