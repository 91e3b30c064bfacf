"""Predicted step times beside published ones: the bounds that they keep, and the table of them in README.md."""

import json
import re
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from redco_cli.sharding.compiled.events import HOST, PREFETCH, Arrival, Loop, Transfer, from_json
from redco_cli.sharding.compiled.work import Work
from tests.bench.seconds import compared, lines, rank_correlation
from tests.chips.steps import FITTED, JUDGED, STEPS, UNSEEN, fingerprint, foreseen, kept

README = Path(__file__).resolve().parents[2] / "README.md"
QUICK = ("26", "1")
KEPT = kept()


def test_every_row_is_kept_as_it_is_asked():
    assert set(KEPT) == set(STEPS)
    assert {*JUDGED, *FITTED} <= set(STEPS)
    for name, step in STEPS.items():
        assert {key: asdict(step)[key] for key in KEPT[name]["asked"]} == KEPT[name]["asked"], name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in STEPS]
)
def test_the_step_is_the_one_that_was_compiled(name):
    said = f"run python -m tests.chips.steps {name!r} where the compilers are, and commit steps.json.gz"
    assert KEPT[name]["fingerprint"] == fingerprint(STEPS[name]), said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in STEPS]
)
def test_the_plan_is_the_one_that_is_kept(name):
    found = json.loads(json.dumps(foreseen(STEPS[name])))
    said = "run python -m tests.chips.steps --plans, and commit steps.json.gz"
    assert {key: KEPT[name][key] for key in found} == found, said


@pytest.mark.parametrize("names", [JUDGED, UNSEEN], ids=["judged", "unseen"])
def test_errors_are_within_their_bounds(names):
    rows = [compared(name) for name in names]
    errors = [abs(row.ratio - 1) for row in rows]
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.25
    assert rank_correlation([row.mfu for row in rows]) >= 0.7


@pytest.mark.parametrize("name", FITTED)
def test_what_was_fitted_on_is_met(name):
    assert compared(name).ratio == pytest.approx(1.0, abs=0.09)


def test_published_times_of_fitted_chips_are_mostly_within_the_range():
    found = [compared(name) for name in JUDGED]
    assert sum(row.found.low <= row.published <= row.found.high for row in found) >= 0.75 * len(found)


def moved_beside_products(events, least=1e9):
    """Bytes that one device sends in collectives, and those that move while a product or attention runs."""
    sent, beside, under_way, loops = 0.0, 0.0, {}, [event for event in events if isinstance(event, Loop)]
    for event in events:
        if isinstance(event, Transfer) and event.kind not in (HOST, PREFETCH):
            under_way[event.name] = event.bytes, False
        elif isinstance(event, Work) and event.flops > least:
            under_way = {name: (size, True) for name, (size, _) in under_way.items()}
        elif isinstance(event, Arrival):
            size, is_beside = under_way.pop(event.name, (0, False))
            sent, beside = sent + size, beside + size * is_beside
    for loop in loops:
        inside = moved_beside_products(loop.events)
        sent, beside = sent + loop.times * inside[0], beside + loop.times * inside[1]
    return sent, beside


@pytest.mark.parametrize(
    ("name", "share"),
    [(name, 0.8) for name in ("1", "2", "3", "5", "6", "7", "8", "9", "10", "11", "Mistral", "Mixtral", "19")]
    + [("14", 0.75), ("15 on 2", 0.75), ("25", 0.4)],  # the last has all-reduces over `tensor`
)
def test_bytes_of_collectives_move_beside_products(name, share):
    sent, beside = moved_beside_products(from_json(KEPT[name]["timeline"]))
    assert beside >= share * sent > 0


def test_the_table_of_the_readme_is_this_one():
    table = [line for line in lines(JUDGED) if not line.startswith("=>")]
    assert "\n".join(table).strip() in README.read_text(), "copy what python tests/bench/seconds.py prints"


def test_the_readme_says_how_far_off_unseen_steps_are():
    *_, said, _ = lines(UNSEEN)
    figures = re.findall(r"[\d.]+%|0\.\d+", said)
    (sentence,) = re.findall(r"Of \d+ more steps.*--unseen", README.read_text())
    assert figures == re.findall(r"[\d.]+%|0\.\d+", sentence), "copy what python tests/bench/seconds.py --unseen prints"
