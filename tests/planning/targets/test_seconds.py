"""The time of a step from its timeline, reckoned by hand on a chip of round figures."""

from dataclasses import replace

import pytest

from redco_cli.chips.speeds import SPEEDS, Range, Speeds, peak
from redco_cli.chips.table import CHIPS
from redco_cli.chips.target import Target, parse_target
from redco_cli.planning.targets.seconds import KERNELS, step_time
from redco_cli.sharding.compiled.events import Arrival, Loop, Span, Transfer
from redco_cli.sharding.compiled.work import Work

GPU = replace(
    CHIPS["h100"], flops={"bfloat16": 1e15, "float32": 1e14}, bandwidth=1e12, link=1e11, network=1e10, name="h100"
)
TARGET = Target(GPU, 2, (8,))


def exactly(**changed):
    """Speeds without a range: every share is 1, and nothing costs anything beside its work."""
    ones = dict.fromkeys(SPEEDS["h100"].constants, Range(1.0, 1.0, 1.0, "assumed"))
    nothing = Range(0.0, 0.0, 0.0, "assumed")
    return Speeds(**{**ones, "kernel": nothing, "collective": nothing, **changed})


PRODUCT = Work("matmul", int(1e15), "bfloat16", int(1e11))  # 1 s
READING = Work("memory", 0, "", int(5e11))  # 0.5 s
GATHER = Transfer("g", "all-gather", ("fsdp",), int(3e10), Span(8, 1, ()))  # 0.3 s


@pytest.mark.parametrize(
    ("events", "seconds", "hidden"),
    [
        ((PRODUCT, READING), 1.5, 0.0),
        ((replace(PRODUCT, bytes=int(2e12)),), 2.0, 0.0),
        ((GATHER, Arrival("g"), PRODUCT), 1.3, 0.0),
        ((GATHER, PRODUCT, Arrival("g")), 1.0, 0.3),
        ((GATHER, replace(READING, bytes=int(1e11)), Arrival("g")), 0.3, 0.1),
        ((GATHER, replace(GATHER, name="h"), Arrival("g"), Arrival("h")), 0.6, 0.0),
        ((Loop(10, True, (GATHER, PRODUCT, Arrival("g"))), READING), 10.5, 3.0),
        ((Loop(3, True, (GATHER,)),), 0.9, 0.0),
        ((Loop(0, True, (GATHER, PRODUCT)),), 0.0, 0.0),
        ((GATHER, Loop(2, True, (PRODUCT,)), Arrival("g")), 2.0, 0.3),
        ((Loop(0.25, True, (GATHER, PRODUCT, Arrival("g"))),), 0.25, 0.075),
        ((Loop(4, True, (Loop(0.5, True, (PRODUCT, GATHER)), GATHER)),), 4 * (0.65 + 0.3), 0.0),
    ],
)
def test_kernels_follow_each_other_and_transfers_move_beside_them(events, seconds, hidden):
    found = step_time(events, TARGET, exactly())
    assert found.typical == pytest.approx(seconds)
    assert found.hidden == pytest.approx(hidden)
    assert sum(found.terms.values()) == pytest.approx(seconds)
    assert (found.low, found.high) == (pytest.approx(seconds), pytest.approx(seconds))


def test_the_range_is_that_of_each_constant_added_by_squares():
    speeds = exactly(matmul=Range(0.5, 1.0, 2.0, "assumed"), memory=Range(0.2, 1.0, 1.25, "assumed"))
    found = step_time((PRODUCT, READING), TARGET, speeds)
    assert found.high == pytest.approx(1.5 + (1.0**2 + 2.0**2) ** 0.5)
    assert found.low == pytest.approx(1.5 - (0.5**2 + 0.1**2) ** 0.5)


def test_heads_that_are_narrower_than_a_matrix_unit_leave_a_part_of_it_idle():
    tpu = Target(replace(GPU, name="v6e", platform="tpu"), 1, (8,))
    attention = replace(PRODUCT, kind="attention", bytes=0)
    times = [step_time((replace(attention, width=width),), tpu, exactly()).typical for width in (0, 64, 128, 512)]
    assert times == pytest.approx([1.0, 4.0, 2.0, 1.0])


def test_each_kernel_costs_something():
    cost = Range(1e-3, 1e-3, 1e-3, "assumed")
    found = step_time((Loop(5, True, (READING, GATHER, Arrival("g"))),), TARGET, exactly(kernel=cost, collective=cost))
    assert found.terms[KERNELS] == pytest.approx(0.01)


def seconds_of(target, span, sent=int(1e12)):
    return step_time((replace(GATHER, bytes=sent, span=span), Arrival("g")), target, exactly()).typical


def test_links_between_hosts_are_shared_by_the_devices_of_a_host():
    assert seconds_of(TARGET, Span(8, 1, ())) == pytest.approx(1e12 / 1e11)
    assert seconds_of(TARGET, Span(2, 2, ())) == pytest.approx(1e12 / 1e10)
    assert seconds_of(TARGET, Span(16, 2, ())) == pytest.approx(1e12 / (8 * 1e10))


@pytest.mark.parametrize(
    ("typed", "extents", "links"),
    [
        ("v6e:2x4", (2, 4), 2),  # no dim of a small slice closes
        ("v6e:16x16", (16, 16), 4),
        ("v6e:16x16", (4, 1), 1),
        ("v5p:4x4x4", (4, 4, 1), 4),
        ("v5p:2x2x1", (2, 2, 1), 2),
    ],
)
def test_rings_of_a_torus(typed, extents, links):
    target = parse_target(typed, "--target")
    assert seconds_of(target, Span(8, 1, extents)) == pytest.approx(1e12 / (links * target.chip.link))


def test_dtypes_have_the_rate_that_they_are_multiplied_at():
    assert peak(CHIPS["h100"], "tensorfloat32") == CHIPS["h100"].flops["bfloat16"] / 2
    assert peak(CHIPS["h100"], "float32") == 67e12
    assert peak(CHIPS["v6e"], "tensorfloat32") == 918e12
    assert peak(CHIPS["v6e"], "float32") == 918e12 / 6


def test_every_chip_has_speeds_in_order():
    assert set(SPEEDS) == set(CHIPS)
    for speeds in SPEEDS.values():
        for name, one in speeds.constants.items():
            costs = name in ("kernel", "collective", "time")
            assert (one.fast <= one.typical <= one.slow) if costs else (one.slow <= one.typical <= one.fast)
            assert one.origin.startswith(("measured", "assumed", "fitted", "not fitted"))
