"""The lengths that rows are padded to: those of fewest positions, and of each batch the least that holds its rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.data.encoded.buckets import LENGTHS, Buckets, chosen_lengths, given_lengths, prompt_lengths

SPREAD = np.clip(np.exp(np.random.default_rng(0).normal(np.log(200), 0.75, 20_000)), 1, 2048).astype(np.int64)


def expected(lengths: tuple[int, ...], rows: np.ndarray, together: int) -> float:
    """Positions of a row, over random batches."""
    reached = np.array([0, *((rows <= length).mean() for length in lengths)]) ** together
    return float((np.diff(reached) * lengths).sum())


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(1, 256), min_size=1, max_size=40),
    together=st.sampled_from([1, 2, 8]),
    most=st.integers(1, LENGTHS),
)
def test_no_other_lengths_have_fewer_positions(rows, together, most):
    lengths = np.array(rows)
    chosen = chosen_lengths(lengths, 256, together, most)
    last = -(-max(rows) // 32) * 32
    assert list(chosen) == sorted(set(chosen))
    assert chosen[-1] == last
    assert len(chosen) <= most
    others = [(*some, last) for count in range(most) for some in itertools.combinations(range(32, last, 32), count)]
    best = min(expected(one, lengths, together) for one in others)
    assert expected(chosen, lengths, together) <= best * 1.05 + 1e-9


@pytest.mark.parametrize(("together", "filled"), [(1, 0.6), (8, 0.3), (64, 0.18)])
def test_a_log_normal_distribution_is_padded_to_a_few_lengths(together, filled):
    """13 % of the positions are real without."""
    chosen = chosen_lengths(SPREAD, 2048, together)
    assert 3 <= len(chosen) <= LENGTHS
    assert SPREAD.mean() / expected(chosen, SPREAD, together) > filled


def test_rows_alike_have_one_length():
    assert chosen_lengths(np.full(1000, 100), 2048, 8) == (128,)
    assert chosen_lengths(np.full(1000, 100), 100, 8) == (100,)
    assert chosen_lengths(np.array([16]), 16, 8) == (16,)


def test_a_list_is_taken_as_far_as_rows_need_it():
    assert given_lengths((64, 16, 128, 256), 100, 512) == (16, 64, 128)
    assert given_lengths((64, 16), 100, 512) == (16, 64, 512)
    assert given_lengths((512,), 100, 512) == (512,)
    assert prompt_lengths(64) == (64,)


def test_a_batch_takes_the_least_length_that_holds_its_longest_row():
    buckets = Buckets((32, 64, 128), np.array([1, 32, 33, 64, 65, 200]))
    assert [buckets.of([index]) for index in range(6)] == [32, 32, 64, 64, 128, 128]
    assert buckets.of([0, 2, 1]) == 64
    assert buckets.shortest(2) == [0, 1]


def test_the_longest_bucket_comes_first_and_each_keeps_its_order():
    buckets = Buckets((32, 64), np.array([5, 60, 30, 40, 1]))
    assert buckets.by_length().tolist() == [1, 3, 0, 2, 4]
