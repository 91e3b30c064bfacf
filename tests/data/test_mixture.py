"""Which examples of which source a mixture has, and what is held out of them."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from redco_cli.data.digests import FileDigests
from redco_cli.data.mixture import Mixture, Part, split_digests


def numbered(name: str, count: int) -> list[dict[str, object]]:
    return [{"from": name, "number": number} for number in range(count)]


def part(count: int) -> Part:
    return Part.whole(numbered("a", count))


def test_one_source_after_the_other_and_each_example_as_its_source_gives_it() -> None:
    one, other = numbered("a", 3), [{"text": "b", "only here": None}]
    mixture = Mixture([Part.whole(one), Part.whole(other)])
    assert len(mixture) == 4
    assert [*mixture] == mixture[:] == [*one, *other]
    assert mixture[-1] is other[0]
    assert mixture.__getitems__([3, 0, 3, 2]) == [other[0], one[0], other[0], one[2]]
    with pytest.raises(IndexError):
        mixture[4]


def test_the_place_is_that_of_the_source() -> None:
    class Placed(list[dict[str, object]]):
        def place(self, number: int) -> str:
            return f"b.jsonl:{number + 1}"

    mixture = Mixture([part(3), Part.whole(Placed(numbered("b", 5))).split(2)[0]])
    assert mixture.place(2) == "examples[2]"
    assert [mixture.place(index) for index in range(3, 6)] == [f"b.jsonl:{one['number'] + 1}" for one in mixture[3:]]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("weight", "times", "extra"), [(1, 1, 0), (2, 2, 0), (0.5, 0, 50), (2.3, 2, 30), (0.004, 0, 0)]
)
def test_a_weight_says_how_often_an_example_comes(weight: float, times: int, extra: int) -> None:
    counts = Counter(part(100).weighed(weight).numbers.tolist())
    assert sum(counts.values()) == 100 * times + extra
    assert sorted(set(counts.values()) | {times}) == ([times, times + 1] if extra else [times])


@pytest.mark.parametrize("share", ["5", "0.5", "12.5", "33", "50", "75", "99.5"])
def test_a_share_is_exact_and_stays_when_the_source_grows(share: str) -> None:
    wanted = Fraction(share) / 100
    before = set(part(1000).split(wanted)[1].numbers.tolist())
    assert abs(len(before) - 1000 * wanted) <= 1
    rest, held = part(1717).split(wanted)
    assert {number for number in held.numbers.tolist() if number < 1000} == before
    assert sorted([*rest.numbers, *held.numbers]) == [*range(1717)]


def test_what_is_held_out_has_no_pattern() -> None:
    held = part(10_000).split(Fraction(1, 20))[1].numbers
    assert np.bincount(held % 20, minlength=20).max() < 50  # of 500: 25 each
    assert np.bincount(held // 500, minlength=20).tolist() == [25] * 20


def test_a_number_is_met_and_the_same_each_time() -> None:
    rest, held = part(1000).split(37)
    assert (len(rest.numbers), len(held.numbers)) == (963, 37)
    assert held.numbers.tolist() == part(1000).split(37)[1].numbers.tolist()
    assert len(part(5).split(9)[0].numbers) == 0


def test_of_few_examples_one_is_held_out() -> None:
    assert [len(one.numbers) for one in part(3).split(Fraction(1, 100))] == [2, 1]


def test_these_examples_are_held_out_under_any_version() -> None:
    """Else a run would be evaluated on what it was trained on, or its choice would be refused as another one."""
    assert part(60).split(Fraction(1, 10))[1].numbers.tolist() == [5, 17, 29, 33, 45, 59]
    assert part(60).split(4)[1].numbers.tolist() == [1, 8, 22, 37]


def test_digests_tell_sources_and_choice_apart(tmp_path: Path) -> None:
    def digests(*parts: Part) -> dict[str, str]:
        return split_digests({}, Mixture(parts), tmp_path, tmp_path, FileDigests(tmp_path))

    one, other = part(9), Part.whole(numbered("b", 9))
    before = digests(one, other)
    assert [*before] == [
        "choice of examples",
        "source 0: number of examples",
        "source 0: examples",
        "source 1: number of examples",
        "source 1: examples",
    ]
    swapped = digests(other, one)
    assert swapped["choice of examples"] == before["choice of examples"]
    assert swapped["source 0: examples"] == before["source 1: examples"] != before["source 0: examples"]
    assert digests(one.weighed(2), other)["choice of examples"] != before["choice of examples"]
    assert [*digests(one.split(2)[0])] == ["choice of examples", "number of examples", "examples"]
