"""Which texts share a row, by facts of others and by what must hold of any texts."""

import importlib.util
import itertools

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.data.encoded.packing import best_fit, pieces_of
from tests.oracles import TRL


def packed(texts, capacity, overflow="truncate"):
    """The tokens of each row."""
    pieces = pieces_of([len(text) for text in texts], capacity, overflow)
    order, first = best_fit(pieces.lengths, capacity)
    parts = [texts[text][start:stop] for text, start, stop in zip(pieces.text, pieces.start, pieces.stop, strict=True)]
    rows = [order[begin:end] for begin, end in itertools.pairwise(first)]
    return [[token for piece in row for token in parts[piece]] for row in rows]


@pytest.mark.parametrize(
    ("texts", "overflow", "rows"),
    [
        # of `trl.data_utils.pack_dataset`, strategies bfd and bfd_split (TRL 1.16, its docstring and its tests)
        ([[1, 2, 3], [4, 5, 6, 7], [8]], "truncate", [[4, 5, 6, 7], [1, 2, 3, 8]]),
        ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]], "truncate", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]),
        ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]], "split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]]),
        ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]], "drop", [[8, 9, 10, 11], [6, 7]]),
        ([[], [1], []], "split", [[1]]),
        ([[], []], "truncate", []),
    ],
)
def test_rows(texts, overflow, rows):
    assert packed(texts, 4, overflow) == rows


@pytest.mark.slow
@pytest.mark.skipif(TRL is None, reason="TRL is not here: make test-all, or set TRL_FOLDER")
@pytest.mark.parametrize(("strategy", "overflow"), [("bfd", "truncate"), ("bfd_split", "split")])
def test_as_many_rows_and_tokens_as_trl(strategy, overflow):
    spec = importlib.util.spec_from_file_location("data_utils", TRL / "data_utils.py")
    trl = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trl)
    draw = np.random.default_rng(0)
    for capacity in (4, 16, 64, 256):
        lengths = draw.lognormal(np.log(capacity / 4), 0.8, 200).astype(int).clip(1, 3 * capacity)
        texts = [list(range(length)) for length in lengths]
        theirs = trl.pack_dataset(Dataset.from_dict({"input_ids": texts}), capacity, strategy)["input_ids"]
        ours = packed(texts, capacity, overflow)
        assert (len(ours), sum(map(len, ours))) == (len(theirs), sum(map(len, theirs)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 40)), st.integers(1, 16), st.sampled_from(["truncate", "split", "drop"]))
def test_every_token_that_is_kept_is_in_one_row(lengths, capacity, overflow):
    begins = np.cumsum([0, *lengths])
    texts = [list(range(begin, begin + length)) for begin, length in zip(begins, lengths, strict=False)]
    rows = packed(texts, capacity, overflow)
    kept = {
        "truncate": [token for text in texts for token in text[:capacity]],
        "split": [token for text in texts for token in text],
        "drop": [token for text in texts if len(text) <= capacity for token in text],
    }[overflow]
    assert sorted(token for row in rows for token in row) == kept
    assert all(0 < len(row) <= capacity for row in rows)
    two_least = sorted(map(len, rows))[:2]
    assert len(two_least) < 2 or sum(two_least) > capacity  # else the one would have been put into the other


def test_lengths_of_conversations_leave_little_empty():
    lengths = np.random.default_rng(0).lognormal(np.log(200), 1.0, 20_000).astype(int).clip(1, 2048)
    _, first = best_fit(lengths, 2048)
    assert lengths.sum() / ((len(first) - 1) * 2048) > 0.99
    assert lengths.sum() / (len(lengths) * 2048) < 0.16  # as padded rows


def test_what_does_not_fit_is_a_mistake():
    with pytest.raises(ValueError, match="pieces of 3 to 5 tokens do not fit rows of 4"):
        best_fit([3, 5], 4)
