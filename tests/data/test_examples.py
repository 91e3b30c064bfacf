import itertools

import datasets
import pytest

from redco_cli.data.examples import check_examples, is_indexed
from redco_cli.errors import DataError, PluginError

WHERE = "plugins/p.py:9: load_examples"
REMEDY = "return a list of dicts, or any object with __len__ and __getitem__, or with __iter__, that gives dicts"
ROWS = [{"a": 1}, {"a": 2}]


class Restarting:
    """Counts what is read of it."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for row in ROWS:
            self.read += 1
            yield row


class Sized:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return ROWS[index]


@pytest.mark.parametrize("examples", [ROWS, tuple(ROWS), Sized(), datasets.Dataset.from_list(ROWS)])
def test_sequences_are_kept(examples):
    assert check_examples(examples, WHERE) is examples
    assert is_indexed(examples)


def test_an_iterable_is_kept_and_only_its_first_example_read():
    examples = Restarting()
    assert check_examples(examples, WHERE) is examples
    assert not is_indexed(examples)
    assert examples.read == 1


def test_an_iterator_is_copied_because_it_can_be_read_only_once():
    assert check_examples((row for row in ROWS), WHERE) == ROWS


@pytest.mark.parametrize("examples", [[], (), iter([]), datasets.Dataset.from_list([]), itertools.chain()])
def test_no_examples_are_refused(examples):
    with pytest.raises(DataError) as error:
        check_examples(examples, WHERE)
    assert str(error.value) == f"{WHERE}: holds no examples\n  -> check what the data is made from"


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        (None, "an object of type NoneType is no sequence of examples"),
        ("text", "an object of type str is no sequence of examples"),
        ({"train": ROWS}, "an object of type dict is no sequence of examples"),
        (datasets.DatasetDict(), "an object of type DatasetDict is no sequence of examples"),
        (3, "an object of type int is no sequence of examples"),
        (["a", "b"], "the first example is of type str, not a dict"),
        ([None], "the first example is of type NoneType, not a dict"),
        ({1, 2}, "the first example is of type int, not a dict"),
    ],
)
def test_what_gives_no_dicts_is_refused(examples, problem):
    with pytest.raises(PluginError) as error:
        check_examples(examples, WHERE)
    assert str(error.value) == f"{WHERE}: {problem}\n  -> {REMEDY}"


def test_a_table_that_is_indexed_by_column_is_refused():
    class Table(Sized):
        def __getitem__(self, index):
            raise KeyError(index)

    with pytest.raises(PluginError) as error:
        check_examples(Table(), WHERE)
    assert str(error.value) == f"{WHERE}: [0] of a Table raised KeyError(0)\n  -> {REMEDY}"
