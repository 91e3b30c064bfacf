"""Several streams as one: what data of known length would give, spread evenly, and the same from any place."""

import itertools
import json
from collections import Counter
from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.data.batch import BatchPlan
from redco_cli.data.digests import FileDigests
from redco_cli.data.loader import train_batches
from redco_cli.data.mixed.choice import HELD_OUT, WEIGHED, is_one, one_of_each
from redco_cli.data.mixed.streams import MixedStream, Source
from redco_cli.data.mixture import Mixture, Part, split_digests
from redco_cli.errors import DataError
from redco_cli.examples import find_examples
from redco_cli.recipe.load import load_recipe
from tests.data.encoded import test_windows as windows
from tests.data.test_stream import Numbers


class Named(Numbers):
    """Numbers that say which source they are of, as their places do."""

    def __init__(self, name, n):
        super().__init__(n)
        self.name = name

    def open(self, bookmark, epoch=0):
        return OpenNamed(super().open(bookmark, epoch), self.name)

    def place(self, number):
        return f"{self.name}:{number}"


class OpenNamed:
    def __init__(self, opened, name):
        self.opened, self.name = opened, name

    def __iter__(self):
        return ({"at": f"{self.name}:{example['id']}"} for example in self.opened)

    def bookmark(self):
        return self.opened.bookmark()


def mixed(*sources, in_turn=False, known=True):
    """Of (length, weight) each."""
    return MixedStream(
        [
            Source(Named("abcd"[number], n), weight, n if known else None, f"data.train.{number}")
            for number, (n, weight) in enumerate(sources)
        ],
        in_turn=in_turn,
    )


def epoch(stream, number=0):
    return [example["at"] for example in stream.open(None, number)]


def indexed(*sources):
    parts = [
        Part.whole([{"at": f"{'abcd'[number]}:{index}"} for index in range(n)]).weighed(weight)
        for number, (n, weight) in enumerate(sources)
    ]
    return [example["at"] for example in Mixture(parts)]


SOURCES = [(60, 1.0), (20, 2), (7, 1), (9, 3)]


def test_an_epoch_is_that_of_data_of_known_length():
    assert sorted(epoch(mixed(*SOURCES))) == sorted(indexed(*SOURCES))
    assert sorted(epoch(mixed(*SOURCES, known=False))) == sorted(indexed(*SOURCES))
    assert epoch(mixed(*SOURCES, in_turn=True)) == indexed(*SOURCES)


def test_sources_are_spread_over_all_of_an_epoch():
    found, total = epoch(mixed(*SOURCES)), sum(n * weight for n, weight in SOURCES)
    for number, (n, weight) in enumerate(SOURCES):
        given = np.cumsum([one.startswith("abcd"[number]) for one in found])
        assert np.abs(given - np.arange(1, len(found) + 1) * n * weight / total).max() < 2


def test_where_lengths_are_not_known_the_weights_say_how_examples_come_until_a_source_ends():
    found = epoch(mixed((100, 1), (10, 2), known=False))
    assert Counter(one[0] for one in found[:30]) == {"a": 10, "b": 20}
    assert {one[0] for one in found[30:]} == {"a"}


@pytest.mark.parametrize("weight", [0.5, 2.3, 0.013])
def test_a_fraction_of_a_weight_is_the_same_examples_in_each_epoch(weight):
    stream = mixed((300, weight), (10, 1))
    found = [Counter(one for one in epoch(stream, number) if one[0] == "a") for number in (0, 1)]
    assert found[0] == found[1]
    assert abs(sum(found[0].values()) - 300 * weight) <= 1
    assert set(found[0].values()) <= {int(weight), int(weight) + 1}


def test_who_is_left_out_by_a_weight_is_not_who_is_held_out():
    held, weighed = (set(one_of_each(Fraction(3, 10), 1000, purpose).tolist()) for purpose in (HELD_OUT, WEIGHED))
    assert len(held) == len(weighed) == 300
    assert 60 < len(held & weighed) < 120
    assert weighed == {number for number in range(1000) if is_one(Fraction(3, 10), number, WEIGHED)}


def batches(stream, *, start=0, stop, shuffle=True):
    def collate(examples):
        return {"at": np.array([[ord(one["at"][0]), int(one["at"][2:])] for one in examples])}

    made = train_batches(
        stream,
        lambda *_: collate,
        BatchPlan(4, 4),
        where="p.py",
        seed=0,
        shuffle=shuffle,
        shuffle_buffer=7,
        start_step=start,
        stop_step=stop,
        workers=2,
    )
    with closing(made):
        return [batch["at"].reshape(-1, 2).tolist() for batch in made]


@settings(deadline=None, max_examples=25)
@given(
    sources=st.lists(st.tuples(st.integers(3, 60), st.sampled_from([1, 2, 0.5, 1.5, 0.4])), min_size=1, max_size=4),
    at=st.integers(1, 60),
    known=st.booleans(),
    shuffle=st.booleans(),
)
def test_a_mixture_goes_on_from_any_place(sources, at, known, shuffle):
    """In any pass over a source, after one of them has ended, and in a later epoch."""
    whole = mixed(*sources, known=known, in_turn=not shuffle)
    expected = batches(whole, stop=at + 10, shuffle=shuffle)
    saved = json.loads(json.dumps(whole.journal.saved(at)))
    resumed = mixed(*sources, known=known, in_turn=not shuffle)
    resumed.journal.load(at, saved)
    assert batches(resumed, start=at, stop=at + 10, shuffle=shuffle) == expected[at:]


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_place_of_an_example_is_worked_out(in_turn):
    sources = [(40, 1), (9, 2.5), (12, 0.5)]
    stream = mixed(*sources, in_turn=in_turn)
    opened = stream.open(None)
    found, saved = [], None
    for number, example in enumerate(opened):
        found.append(example["at"])
        assert stream.place(number) == example["at"]
        saved = json.loads(json.dumps(opened.bookmark())) if number == 50 else saved
    resumed = mixed(*sources, in_turn=in_turn)
    rest = [example["at"] for example in resumed.open(saved)]
    assert rest == found[51:]
    assert [resumed.place(number) for number in range(51, len(found))] == rest


def test_to_go_on_reads_no_source_from_its_start():
    stream = mixed((10**5, 1), (10**4, 2))
    expected = batches(stream, stop=1000)[-3:]
    saved = json.loads(json.dumps(stream.journal.saved(997)))
    resumed = mixed((10**5, 1), (10**4, 2))
    resumed.journal.load(997, saved)
    assert batches(resumed, start=997, stop=1000) == expected
    assert sum(source.examples.read for source in resumed.sources) < 500


def test_a_weight_that_leaves_nothing_is_refused():
    stream = mixed((2, 1), (3, 0.004))
    with pytest.raises(DataError) as refused:
        epoch(stream)
    assert str(refused.value) == (
        "data.train.1.weight: 0.004 of 3 examples is none\n  -> give a larger weight, or leave the dataset out"
    )


def test_a_source_that_became_shorter_is_refused():
    class Plain(Named):
        def open(self, bookmark, epoch=0):
            opened = super().open(bookmark, epoch)
            opened.bookmark = lambda: None
            return opened

    stream, shorter = (MixedStream([Source(Plain("a", n), 1.0, n, "data.train.0")], in_turn=True) for n in (50, 20))
    opened = stream.open(None)
    list(itertools.islice(opened, 30))
    with pytest.raises(
        DataError, match=r"data\.train\.0: has fewer examples than when the run was saved: example 20 is"
    ):
        list(shorter.open(opened.bookmark()))


def test_digests_tell_sources_and_weights_apart(tmp_path):
    def digests(stream):
        return split_digests({}, stream, tmp_path, tmp_path, FileDigests(tmp_path))

    before = digests(mixed((30, 1), (20, 1)))
    assert [*before] == ["choice of examples", "source 0: first examples", "source 1: first examples"]
    assert digests(mixed((30, 1), (20, 1))) == before
    for other in (mixed((30, 1), (20, 2)), mixed((30, 1), (20, 1), in_turn=True)):
        assert digests(other)["choice of examples"] != before["choice of examples"]


RECIPE = """
plugin: {module: causal_lm}
output_dir: run
data:
  streaming: true
  train:
    - {path: json, data_files: a.jsonl}
    - {path: text, data_files: b.txt, weight: 2}
    - {path: rows, weight: 0.5, limit: 30}
"""


def test_files_of_a_recipe_are_mixed_and_go_on_in_another_process(tmp_path, capfd):
    """Each example as its file has it; the order is that of the numbers of examples alone."""
    import datasets

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"at": "a:{number}", "only": 1}}\n' for number in range(100)))
    (tmp_path / "b.txt").write_text("".join(f"b:{number}\n" for number in range(25)))
    datasets.Dataset.from_list([{"at": f"c:{number}"} for number in range(40)]).save_to_disk(tmp_path / "rows")

    def opened(*overrides):
        loaded = load_recipe(tmp_path / "recipe.yaml", overrides, {})
        return find_examples(loaded, None, None, "train")

    def read(stream):
        return [example.get("at", example.get("text")) for example in stream]

    stream = opened()
    assert [round(share, 2) for share in stream.shares] == [0.61, 0.3, 0.09]
    assert {frozenset(example) for example in stream} == {
        frozenset({"at", "only"}),
        frozenset({"text"}),
        frozenset({"at"}),
    }
    found = read(stream)
    assert Counter(one[0] for one in found) == {"a": 100, "b": 50, "c": 15}
    assert Counter(found[:100])["b:3"] == 2 - (found[100:].count("b:3"))
    assert read(opened("data.shuffle=false"))[:125] == [*(f"a:{n}" for n in range(100)), *(f"b:{n}" for n in range(25))]
    reading = stream.open(None)
    begun = [example.get("at", example.get("text")) for example in itertools.islice(reading, 90)]
    for _ in range(2):  # the first one only proves that sources can be opened there
        saved = json.loads(json.dumps(reading.bookmark()))
        begun += [example.get("at", example.get("text")) for example in itertools.islice(reading, 30)]
    assert begun == found[:150]
    assert all(mark is not None for _, _, number, mark in saved["places"] if number)
    assert read(opened().open(saved)) == found[120:]
    assert capfd.readouterr().err == ""
    (tmp_path / "a.jsonl").write_text('[{"at": "a:0"}]')
    assert opened().shares == [1 / 3.5, 2 / 3.5, 0.5 / 3.5]
    assert "data.train: nobody knows how long data.train.0 is, so that examples come in" in capfd.readouterr().err


def test_windows_of_a_mixture_are_packed_and_go_on_from_any_place():
    def encode(example):
        source, number = "abc".index(example["at"][0]), int(example["at"][2:])
        return windows.encode({"id": 1000 * source + number})

    def opened():
        return windows.stream(mixed((40, 1), (9, 2.5), (20, 0.5)), window=11, function=encode)

    whole = opened()
    expected = windows.batches(whole, stop=40)
    for step in (1, 7, 16, 33):
        resumed = opened()
        resumed.journal.load(step, json.loads(json.dumps(whole.journal.saved(step))))
        assert windows.batches(resumed, start=step, stop=40) == expected[step:]
