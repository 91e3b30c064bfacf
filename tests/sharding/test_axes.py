"""Unification of axes: exact cases, and against an oracle that follows every element of an array."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redco_cli.sharding.axes import Axis, factors, fresh, fresh_dims, mark_layer, reshape, root, size, split, unify

SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=4).filter(lambda shape: math.prod(shape) <= 576)
quickly = settings(max_examples=200, deadline=None, derandomize=True)


def sizes(dim):
    return [axis.size for axis in factors(dim)]


def reshaped(dims, old, new):
    """The dims of a reshape that can be told, with their own dims for the others."""
    result, lost = reshape(dims, old, new)
    return [fresh(n) if dim is None else dim for dim, n in zip(result, new, strict=True)], lost


def test_a_fresh_dim_is_one_axis_and_a_dim_of_one_has_none():
    (axis,) = fresh(6)
    assert (axis.size, axis.parent, axis.children, axis.layer) == (6, None, (), False)
    assert fresh(1) == ()
    assert [size(dim) for dim in fresh_dims((4, 1, 3))] == [4, 1, 3]
    assert root(axis) is axis


def test_unified_dims_are_one_from_there_on():
    a, b, c, d = fresh_dims((6, 6, 6, 6))
    assert unify(a, b)
    assert unify(c, d)
    assert factors(a) == factors(b) != factors(c)
    assert unify(b, d)
    assert len({factors(dim) for dim in (a, b, c, d)}) == 1


def test_a_product_is_seen_through_everything_unified_before_and_after():
    whole, same, later = fresh_dims((24, 24, 24))
    assert unify(whole, same)
    heads, features = split(whole, [6, 4])
    assert factors(same) == (*factors(heads), *factors(features))
    assert sizes(same) == [6, 4]
    assert unify(later, same)
    assert factors(later) == factors(whole)


def test_two_ways_to_split_meet_in_finer_factors():
    """24 = 2·12 and 24 = 8·3: 2·4·3."""
    first, second = fresh(24), fresh(24)
    two, twelve = split(first, [2, 12])
    eight, three = split(second, [8, 3])
    assert unify(first, second)
    assert sizes(first) == [2, 4, 3]
    assert factors(eight) == (*factors(two), factors(twelve)[0])
    assert factors(three) == (factors(twelve)[1],)


def test_factors_that_do_not_line_up_are_said_and_what_lines_up_before_is_unified():
    first, second = fresh(24), fresh(24)
    a, b, c = split(first, [4, 2, 3])
    d, e, f = split(second, [4, 3, 2])
    assert not unify(first, second)
    assert factors(a) == factors(d)
    assert len({*factors(b), *factors(c), *factors(e), *factors(f)}) == 4


def test_dims_of_other_sizes_are_not_the_same():
    assert not unify(fresh(6), fresh(4))
    assert not unify(fresh(2), ())
    assert unify((), ())


def test_one_axis_twice_in_a_dim():
    """[n·n] and [n, n]: nothing goes round in circles."""
    n, square = fresh(4), fresh(16)
    assert unify(square, n + n)
    assert factors(square) == (*factors(n), *factors(n))
    a, b = fresh_dims((4, 2))
    assert unify(a + b, b + a)
    assert sizes(a) == [2, 2]
    assert len({*factors(a), *factors(b)}) == 1


def test_split_takes_whole_factors_and_divides_others():
    dim = fresh(6) + fresh(4)
    assert [sizes(part) for part in split(dim, [3, 2, 4])] == [[3], [2], [4]]
    assert [sizes(part) for part in split(dim, [3, 8])] == [[3], [2, 4]]
    assert [sizes(part) for part in split(dim, [1, 24, 1])] == [[], [3, 2, 4], []]
    assert split(fresh(6) + fresh(4), [4, 6]) is None


def test_layers_stay_layers():
    dim, other = fresh(12), fresh(12)
    mark_layer(dim)
    assert [axis.layer for part in split(dim, [3, 4]) for axis in factors(part)] == [True, True]
    assert unify(other, dim)
    assert [axis.layer for axis in factors(other)] == [True, True]
    late = fresh(12)
    split(late, [3, 4])
    mark_layer(late)
    assert [axis.layer for axis in factors(late)] == [True, True]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((6, 4), (24,), [[6, 4]]),
        ((24,), (6, 4), [[6], [4]]),
        ((2, 12), (8, 3), [[2, 4], [3]]),
        ((2, 6, 5), (12, 5), [[2, 6], [5]]),
        ((3, 1, 4), (1, 3, 4, 1), [[], [3], [4], []]),
        ((1,), (), []),
        ((), (1, 1), [[], []]),
        ((7,), (7,), [[7]]),
    ],
)
def test_reshape(old, new, expected):
    dims, lost = reshaped(fresh_dims(old), old, new)
    assert [sizes(dim) for dim in dims] == expected
    assert lost == []


def test_what_a_reshape_cuts_unevenly_is_lost_and_nothing_else():
    """[5, 2·3, 7] to [5, 3·2, 7] through 6 = 2·3: the sizes differ, the dims between are no product of each other."""
    dims = fresh_dims((5, 2, 3, 7))
    result, lost = reshape(dims, (5, 2, 3, 7), (5, 3, 2, 7))
    assert result == [dims[0], None, None, dims[3]]
    assert lost == [1, 2]


def coordinates(dims, shape):
    """For each axis of an array its index at every element, in order."""
    found = {}
    for dim, index in zip(dims, np.unravel_index(np.arange(math.prod(shape)), shape), strict=True):
        parts = np.unravel_index(index, [axis.size for axis in factors(dim)]) if factors(dim) else ()
        found.update(zip(factors(dim), parts, strict=True))
    return found


def lines_up(old, new):
    """Whether the cuts of both shapes, as products of the dims behind them, divide each other."""
    cuts = {math.prod(shape[place:]) for shape in (old, new) for place in range(len(shape) + 1)}
    ordered = sorted(cuts)
    return all(after % before == 0 for before, after in itertools.pairwise(ordered))


def other_shapes(shape):
    """Shapes with as many elements."""
    total = math.prod(shape)
    divisors = [n for n in range(1, total + 1) if total % n == 0]

    @st.composite
    def draw(draw):
        left, drawn = total, []
        while left > 1 and len(drawn) < 4:
            drawn.append(draw(st.sampled_from([n for n in divisors if left % n == 0])))
            left //= drawn[-1]
        return (*drawn, left)

    return draw()


@quickly
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(tuple(shape)), other_shapes(shape))))
@example(((6, 4), (4, 6)))
@example(((12, 10), (4, 5, 6)))
@example(((2, 1, 3, 1), (1, 3, 2)))
def test_reshape_keeps_every_element_on_its_axes(shapes):
    old, new = shapes
    dims = fresh_dims(old)
    result, lost = reshape(dims, old, new)
    known = coordinates(dims, old)
    for dim, index, n in zip(result, np.unravel_index(np.arange(math.prod(new)), new), new, strict=True):
        if dim is None:
            continue
        assert size(dim) == n
        if factors(dim):
            parts = [known[axis] for axis in factors(dim)]
            np.testing.assert_array_equal(np.ravel_multi_index(parts, [axis.size for axis in factors(dim)]), index)
    assert (None in result) == bool(lost)
    assert (lost == []) == lines_up(old, new)
    assert all(size(dim) == n for dim, n in zip(dims, old, strict=True))


@quickly
@given(st.data())
def test_reshapes_one_after_the_other_keep_every_element_on_its_axes(data):
    first = tuple(data.draw(SHAPES))
    dims = start = fresh_dims(first)
    shape = first
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(other_shapes(shape))
        dims, lost = reshaped(dims, shape, new)
        shape = new
        if lost:
            return
    known = coordinates(start, first)
    for dim, index in zip(dims, np.unravel_index(np.arange(math.prod(shape)), shape), strict=True):
        if factors(dim):
            parts = [known[axis] for axis in factors(dim)]
            np.testing.assert_array_equal(np.ravel_multi_index(parts, [axis.size for axis in factors(dim)]), index)


@quickly
@given(st.data())
def test_any_order_of_unifications_keeps_sizes_and_ends(data):
    """Eight dims of twelve elements, split and unified at random: each stays twelve, and what is unified is equal."""
    dims = [fresh(12) for _ in range(8)]
    pairs = []
    for _ in range(data.draw(st.integers(1, 12))):
        one, other = data.draw(st.sampled_from(dims)), data.draw(st.sampled_from(dims))
        if data.draw(st.booleans()):
            split(one, data.draw(st.sampled_from([(2, 6), (6, 2), (3, 4), (4, 3), (2, 3, 2), (3, 2, 2)])))
        elif unify(one, other):
            pairs.append((one, other))
    assert all(math.prod(sizes(dim)) == size(dim) == 12 for dim in dims)
    assert all(factors(one) == factors(other) for one, other in pairs)
    leaves = {axis for dim in dims for axis in factors(dim)}
    assert all(root(axis) is axis and not axis.children for axis in leaves)


@quickly
@given(st.permutations([(0, 1), (1, 2), (2, 3), (3, 4)]), st.sampled_from([(2, 6), (4, 3), (2, 2, 3)]))
def test_order_does_not_matter(order, parts):
    dims = [fresh(12) for _ in range(5)]
    split(dims[2], parts)
    assert all(unify(dims[a], dims[b]) for a, b in order)
    assert len({factors(dim) for dim in dims}) == 1
    assert sizes(dims[0]) == list(parts)


def test_long_chains_are_followed_without_recursion():
    axes = [Axis(3) for _ in range(5000)]
    for one, other in itertools.pairwise(axes):
        assert unify((one,), (other,))
    assert len({root(axis) for axis in axes}) == 1
