"""The time of a run, without a run."""

import time

import pytest

from redco_cli.recipe.durations import WallTime
from redco_cli.runtime.stopping.deadline import stop_in_time
from redco_cli.runtime.stopping.signals import StopRequest


def waited(request: StopRequest) -> bool:
    deadline = time.monotonic() + 5
    while request.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return request.due()


@pytest.mark.parametrize(("limit", "ago"), [(0.1, 0.0), (3600.0, 4000.0)], ids=["soon", "long ago"])
def test_a_run_is_asked_to_stop_when_its_time_is_over(limit: float, ago: float) -> None:
    request, said = StopRequest(), []
    with stop_in_time(request, WallTime(limit), time.monotonic() - ago, said.append):
        assert waited(request)
    assert request.exit_code == 75
    error = request.outcome("run", "after step 3; saved")
    assert str(error).startswith(f"run: stopped by train.max_time {WallTime(limit)} after step 3; saved\n")
    assert said == [f"train.max_time {WallTime(limit)} is over: stopping and saving after this step"]


def test_not_before_and_not_once_it_has_ended() -> None:
    request = StopRequest()
    with stop_in_time(request, WallTime(0.2), time.monotonic(), print):
        assert not request.due()
    time.sleep(0.4)
    assert not request.due()
    with stop_in_time(request, None, 0.0, print):
        assert not request.due()


def test_a_signal_that_came_first_stays_the_reason() -> None:
    request, said = StopRequest(), []
    request.ask(130)
    with stop_in_time(request, WallTime(0.05), time.monotonic(), said.append):
        time.sleep(0.2)
    assert (request.exit_code, request.reason, said) == (130, "a signal", [])
