import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.recipe.durations import Duration, WallTime
from redco_cli.recipe.load import load_recipe, resolved_yaml
from redco_cli.recipe.schema import json_schema

EXPECTED = "expected a number of optimizer steps (200), a share of the run (10%) or epochs (1 epoch)"
JSON_SCHEMA = json_schema()["$defs"]["TrainSection"]["properties"]["warmup"]
DECIMALS = st.decimals(0, 100, places=4).map(lambda number: f"{number.normalize():f}")
TEXTS = st.one_of(
    st.integers(0, 10**11).map(str),
    st.integers(0, 10**11).map("{} steps".format),
    DECIMALS.map("{}%".format),
    DECIMALS.map("{} epochs".format),
)


@pytest.mark.parametrize(
    ("given_", "duration", "shown"),
    [
        (200, Duration(200, "steps"), "200"),
        ("200 steps", Duration(200, "steps"), "200"),
        ("1 step", Duration(1, "steps"), "1"),
        ("1 epoch", Duration(1, "epochs"), "1 epoch"),
        ("0.5 epochs", Duration(0.5, "epochs"), "0.5 epochs"),
        ("10%", Duration(10, "%"), "10%"),
        (" 2.5 % ", Duration(2.5, "%"), "2.5%"),
        (12_345_678, Duration(12_345_678, "steps"), "12345678"),
        ("0.00001%", Duration(1e-5, "%"), "0.00001%"),
    ],
)
def test_what_people_write(given_, duration, shown):
    assert Duration.parse(given_) == duration
    assert str(duration) == shown


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ("soon", EXPECTED),
        ("", EXPECTED),
        ("-5", f"it is negative: {EXPECTED}"),
        (-5, f"it is negative: {EXPECTED}"),
        (-0.5, f"it is negative: {EXPECTED}"),
        (" -10%", f"it is negative: {EXPECTED}"),
        ("- soon", EXPECTED),
        (1.5, EXPECTED),
        (True, EXPECTED),
        (None, EXPECTED),
        ([1], EXPECTED),
        ("200", EXPECTED),
        ("1e3 steps", EXPECTED),
        (f"{'9' * 400} steps", EXPECTED),
        ("101%", "a share of the run cannot exceed 100%"),
        ("1.5 steps", "a number of steps must be whole"),
    ],
)
def test_refusals(given_, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        Duration.parse(given_)


@pytest.mark.parametrize(
    ("text", "total", "per_epoch", "steps"),
    [
        ("5 steps", None, None, 5),
        ("2 epochs", None, Fraction(25, 2), 25),
        ("1.1 epochs", None, Fraction(10), 11),
        ("100 epochs", None, Fraction(7, 100), 7),  # floats: 7.000000000000001
        ("1 epoch", None, Fraction(10, 3), 4),
        ("7%", 100, None, 7),  # floats: 7.000000000000001
        ("14%", 50, None, 7),
        ("10%", 1001, None, 101),
        ("0%", 1000, None, 0),
        ("100%", 999, None, 999),
    ],
)
def test_in_steps_is_exact_and_rounds_up(text, total, per_epoch, steps):
    assert Duration.parse(text).in_steps(total_steps=total, steps_per_epoch=per_epoch) == steps


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 100), st.integers(1, 10**9))
def test_whole_shares_of_whole_runs(percent, hundreds):
    assert Duration(percent, "%").in_steps(total_steps=100 * hundreds) == percent * hundreds


def test_units_that_need_to_know_more():
    with pytest.raises(ValueError, match=r"^a share needs a whole: give the length of the run in steps or epochs$"):
        Duration(10, "%").in_steps()
    with pytest.raises(ValueError, match=r"^the data has no known length, so epochs cannot be counted; give steps$"):
        Duration(1, "epochs").in_steps(total_steps=10)


@settings(deadline=None, max_examples=50)
@given(TEXTS)
def test_reads_back_what_it_shows(text):
    duration = Duration.parse(int(text) if text.isdecimal() else text)
    shown = str(duration)
    assert Duration.parse(int(shown) if shown.isdecimal() else shown) == duration


@settings(deadline=None, max_examples=50)
@given(text=TEXTS)
def test_survives_the_resolved_recipe(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    source, resolved = folder / "r.yaml", folder / "resolved.yaml"
    source.write_text(f"plugin: {{module: m}}\noutput_dir: o\neval: {{every: {text}}}\n")
    loaded = load_recipe(source, (), {})
    resolved.write_text(resolved_yaml(loaded))
    assert load_recipe(resolved, (), {}).recipe == loaded.recipe


@settings(deadline=None, max_examples=50)
@given(TEXTS)
def test_the_json_schema_knows_the_same_texts(text):
    integer, pattern = JSON_SCHEMA["anyOf"]
    assert integer == {"type": "integer", "minimum": 0}
    assert text.isdecimal() or re.search(pattern["pattern"], text)
    assert not re.search(pattern["pattern"], f"{text} and more")


def test_the_json_schema_of_the_run_knows_no_share():
    integer, pattern = json_schema()["$defs"]["TrainSection"]["properties"]["steps"]["anyOf"]
    assert integer == {"type": "integer", "minimum": 1}
    assert [bool(re.search(pattern["pattern"], text)) for text in ("3 epochs", "200 steps", "10%")] == [
        True,
        True,
        False,
    ]


TIME = "expected a time with its unit, more than none (8h, 90m, 1h 30m, 2d)"


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("8h", 28_800, "8h"),
        ("90m", 5400, "1h 30m"),
        ("1h30m", 5400, "1h 30m"),
        (" 1d 12h ", 129_600, "1d 12h"),
        ("1.5h", 5400, "1h 30m"),
        ("0.5s", 0.5, "0.5s"),
        ("2d 1s", 172_801, "2d 1s"),
    ],
)
def test_times(text, seconds, shown):
    time = WallTime.parse(text)
    assert (time.seconds, str(time)) == (seconds, shown)
    assert WallTime.parse(shown) == time


@pytest.mark.parametrize("given_", [8, 8.0, True, None, "", "8", "0h", "h", "-1h", "8 hours", "30m 1h", "08:00"])
def test_what_is_no_time(given_):
    with pytest.raises(ValueError, match=f"^{re.escape(TIME)}$"):
        WallTime.parse(given_)


def test_a_time_survives_the_resolved_recipe_and_the_json_schema_knows_it(tmp_path):
    source, resolved = tmp_path / "r.yaml", tmp_path / "resolved.yaml"
    source.write_text("plugin: {module: m}\noutput_dir: o\ntrain: {max_time: 90m}\n")
    loaded = load_recipe(source, (), {})
    resolved.write_text(resolved_yaml(loaded))
    assert load_recipe(resolved, (), {}).recipe.train.max_time == WallTime(5400)
    text, _ = json_schema()["$defs"]["TrainSection"]["properties"]["max_time"]["anyOf"]
    assert [bool(re.search(text["pattern"], one)) for one in ("90m", "1h 30m", "", "8")] == [True, True, False, False]
