import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redco_cli.data.batch import BatchPlan, Slice, check_batch, eval_slices
from redco_cli.errors import DataError, PluginError

WHERE = "plugins/p.py:3: collate_fn"
EXPECTED = "return a dict of numpy arrays with leading dim 2, one row for each of the 2 examples"


def part(process, processes):
    """The contiguous rows of a process, as those of all tile a batch."""
    return lambda size: range(process * size // processes, (process + 1) * size // processes)


@given(n_micro=st.integers(1, 5), share=st.integers(1, 4), processes=st.sampled_from([1, 2, 4]))
def test_the_shares_of_all_processes_tile_the_global_batch(n_micro, share, processes):
    micro = share * processes
    plans = [BatchPlan(n_micro * micro, micro, part(p, processes)) for p in range(processes)]
    rows = np.array([plan.rows() for plan in plans]).reshape(processes, n_micro, share)
    together = rows.transpose(1, 0, 2).reshape(-1)  # micro-batch by micro-batch, process by process within
    assert together.tolist() == list(range(n_micro * micro))


def test_a_process_may_hold_rows_that_others_hold_too_or_that_are_apart():
    assert BatchPlan(16, 8, lambda size: range(size // 2)).rows() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert BatchPlan(16, 8, lambda _size: [1, 6]).rows() == [1, 6, 9, 14]


def test_a_plan_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="does not divide evenly"):
        BatchPlan(8, 3)


@given(n=st.integers(0, 200), shards=st.integers(1, 9), per_shard=st.integers(1, 6))
def test_cut_tiles_every_example_exactly_once(n, shards, per_shard):
    batch_size = shards * per_shard
    slices = eval_slices(n, batch_size, shards)
    assert [index for part in slices for index in range(part.start, part.stop)] == list(range(n))
    sharded = [part.stop - part.start for part in slices if part.sharded]
    alone = [part.stop - part.start for part in slices if not part.sharded]
    assert sharded[: n // batch_size] == [batch_size] * (n // batch_size)
    assert len(sharded) <= n // batch_size + 1
    assert all(size % shards == 0 for size in sharded)
    assert sum(alone) == n % shards
    assert all(0 < size <= per_shard for size in alone)
    assert [part.sharded for part in slices] == sorted((part.sharded for part in slices), reverse=True)


def test_cut_of_an_uneven_end():
    assert eval_slices(30, 16, 8) == [
        Slice(0, 16, True),
        Slice(16, 24, True),
        Slice(24, 26, False),
        Slice(26, 28, False),
        Slice(28, 30, False),
    ]


def test_cut_needs_a_batch_that_divides():
    with pytest.raises(ValueError, match="a batch of 6 does not divide over 4 shards"):
        eval_slices(10, 6, 4)


def test_wide_numbers_are_narrowed_and_others_left_alone():
    batch = check_batch(
        {
            "i8": np.array([1, -2], np.int64),
            "u8": np.array([1, 2], np.uint64),
            "f8": np.array([[0.1], [np.nan]]),
            "inf": np.array([np.inf, -np.inf]),
            "i2": np.array([1, 2], np.int16),
            "flag": np.array([True, False]),
            "half": np.array([1, 2], ml_dtypes.bfloat16),
            "empty": np.zeros((2, 0), np.int64),
        },
        2,
        WHERE,
    )
    assert {key: str(value.dtype) for key, value in batch.items()} == {
        "i8": "int32",
        "u8": "uint32",
        "f8": "float32",
        "inf": "float32",
        "i2": "int16",
        "flag": "bool",
        "half": "bfloat16",
        "empty": "int32",
    }
    np.testing.assert_array_equal(batch["i8"], [1, -2])
    np.testing.assert_array_equal(batch["f8"], np.array([[0.1], [np.nan]], np.float32))
    np.testing.assert_array_equal(batch["inf"], [np.inf, -np.inf])


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.array([1, 2**31]), "batch['x'] holds 2147483648, which does not fit int32"),
        (np.array([-(2**31) - 1, 0]), "batch['x'] holds -2147483649, which does not fit int32"),
        (np.array([2**32, 0], np.uint64), "batch['x'] holds 4294967296, which does not fit uint32"),
        (np.array([0.0, -1e39]), "batch['x'] holds -1e+39, which does not fit float32"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value, problem):
    with pytest.raises(DataError) as error:
        check_batch({"x": value}, 2, WHERE)
    assert str(error.value) == f"{WHERE}: {problem}\n  -> scale the values, or drop what the model does not read"


@pytest.mark.parametrize(
    ("batch", "problem", "remedy"),
    [
        (None, "returned a NoneType instead of a dict", EXPECTED),
        ([1, 2], "returned a list instead of a dict", EXPECTED),
        (np.zeros(2), "returned a ndarray instead of a dict", EXPECTED),
        ({}, "returned an empty dict", EXPECTED),
        ({3: np.zeros(2)}, "returned the key 3, but keys are names", EXPECTED),
        ({"x": [1, 2]}, "batch['x'] is a list, not a numpy array", EXPECTED),
        ({"x": 3}, "batch['x'] is an int, not a numpy array", EXPECTED),
        (
            {"x": np.ones(2, np.complex64)},
            "batch['x'] is complex, which a batch is not",
            "give real and imaginary parts as two arrays",
        ),
        (
            {"x": np.array(["a", "b"])},
            "batch['x'] has dtype <U1, which no device can hold",
            "turn text into token ids, and rows of unequal length into one padded array",
        ),
        (
            {"x": np.array([[1], [1, 2]], dtype=object)},
            "batch['x'] has dtype object, which no device can hold",
            "turn text into token ids, and rows of unequal length into one padded array",
        ),
        ({"x": np.zeros((3, 2))}, "batch['x'] has shape (3, 2)", EXPECTED),
        ({"x": np.float32(1)}, "batch['x'] is a float32, not a numpy array", EXPECTED),
        ({"ok": np.zeros(2), "x": np.array(1)}, "batch['x'] has shape ()", EXPECTED),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(batch, problem, remedy):
    with pytest.raises(PluginError) as error:
        check_batch(batch, 2, WHERE)
    assert str(error.value) == f"{WHERE}: {problem}\n  -> {remedy}"
