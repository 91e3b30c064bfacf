"""The record of a run: rates, and `metrics.jsonl` through kills and resumes."""

import itertools
import math
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

from redco_cli.errors import PluginError, StorageError
from redco_cli.training.records.metrics import METRICS_NAME, Recorder, read_records
from redco_cli.training.records.speed import Meter, Rates

# ---------------------------------------------------------------- speed


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_rates_leave_out_what_is_no_training(clock):
    meter = Meter(clock)
    for _ in range(4):
        with meter.waiting():
            clock.now += 0.5
        clock.now += 2
        meter.add(8, tokens=100)
    with meter.paused():
        clock.now += 1000
        with meter.paused(), meter.waiting():  # the eval step compiles within an evaluation that waits for its input
            clock.now += 500
    assert meter.read() == Rates(tokens_per_second=40.0, examples_per_second=3.2, input_wait=0.2, seconds=10.0)


def test_padding_is_what_holds_no_token(clock):
    meter = Meter(clock)
    for tokens in (30, 50):
        clock.now += 1
        meter.add(2, tokens, positions=64)
    assert meter.read() == Rates(40.0, 2.0, 0.0, 2.0, padding=0.375)


def test_each_reading_begins_a_window(clock):
    meter = Meter(clock)
    clock.now += 10
    meter.add(10)
    meter.read()
    clock.now += 2
    meter.add(10)
    assert meter.read() == Rates(None, 5.0, 0.0, 2.0)


def test_a_window_without_time_has_no_rate(clock):
    meter = Meter(clock)
    meter.add(8, tokens=5)
    rates = meter.read()
    assert math.isnan(rates.tokens_per_second)
    assert math.isnan(rates.examples_per_second)


def test_a_failure_within_a_pause_still_ends_it(clock):
    meter = Meter(clock)
    with pytest.raises(KeyError), meter.paused():
        {}["missing"]
    with meter.paused():
        clock.now += 5
    clock.now += 1
    meter.add(3)
    assert meter.read().examples_per_second == 3.0


# ---------------------------------------------------------------- the file


def recorder(directory, fresh=True, **more):
    ticks = itertools.count(100)
    return Recorder(directory, fresh=fresh, clock=lambda: next(ticks) + 0.5, **more)


def text(directory):
    return (directory / METRICS_NAME).read_text()


def test_steps_that_devices_are_still_at_are_not_left_out():
    now = iter(range(100))

    class Busy:
        def block_until_ready(self):
            for _ in range(5):  # seconds of the steps
                next(now)

    meter = Meter(lambda: next(now))
    meter.add(12)
    with meter.paused({"state": Busy()}):
        pass
    assert meter.read().seconds == 1 + 5 + 1  # before, the steps, after; the clock goes on at each look


def test_the_file_is_strict_json_line_by_line(tmp_path):
    with recorder(tmp_path / "runs/new") as record:
        record.record(0, "run", {"devices": ["cpu"] * 2, "version": "1"})
        record.record(1, "train", {"loss": 0.1 + 0.2, "lr": 1e-5, "n": np.int64(3), "f1": np.float32(0.5)})
        record.record(2, "eval", {"loss": math.nan, "best": -math.inf, "ok": True})
    assert text(tmp_path / "runs/new") == (
        '{"step": 0, "kind": "run", "time": 100.5, "devices": ["cpu", "cpu"], "version": "1"}\n'
        '{"step": 1, "kind": "train", "time": 101.5, "loss": 0.30000000000000004, "lr": 1e-05, "n": 3, "f1": 0.5}\n'
        '{"step": 2, "kind": "eval", "time": 102.5, "loss": null, "best": null, "ok": true,'
        ' "nonfinite": {"loss": "nan", "best": "-inf"}}\n'
    )


def test_floats_read_back_to_the_same_bits(tmp_path):
    values = {str(i): float(v) for i, v in enumerate(np.random.default_rng(0).standard_normal(500) ** 9)}
    with recorder(tmp_path) as record:
        record.record(1, "train", values)
    found = read_records(tmp_path / METRICS_NAME)[0]
    assert all(struct.pack("d", found[name]) == struct.pack("d", value) for name, value in values.items())


def test_each_record_is_on_disk_at_once(tmp_path):
    with recorder(tmp_path) as record:
        record.record(1, "train", {"loss": 1.0})
        assert len(read_records(tmp_path / METRICS_NAME)) == 1


def test_a_value_cannot_take_the_name_of_a_field(tmp_path):
    with recorder(tmp_path) as record, pytest.raises(PluginError) as caught:
        record.record(1, "eval", {"loss": 1.0, "time": 2.0})
    assert str(caught.value) == (
        "metric time: every record in metrics.jsonl has a field 'time' of its own\n"
        "  -> give the metric another name in the plugin"
    )
    assert text(tmp_path) == ""


def test_a_fresh_recorder_begins_an_empty_file(tmp_path):
    with recorder(tmp_path) as record:
        record.record(1, "train", {"loss": 1.0})
    recorder(tmp_path).close()
    assert text(tmp_path) == ""


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    with recorder(tmp_path) as record:
        for step in (10, 20, 30, 40):
            record.record(step, "train", {"loss": float(step)})
            record.record(step, "eval", {"loss": float(step)})
    before = text(tmp_path).splitlines(keepends=True)
    with recorder(tmp_path, fresh=False) as record:
        record.rewind(20)
        assert text(tmp_path) == "".join(before[:4])
        record.record(30, "train", {"loss": 3.0})
    found = [(one["step"], one["kind"]) for one in read_records(tmp_path / METRICS_NAME)]
    assert found == [(10, "train"), (10, "eval"), (20, "train"), (20, "eval"), (30, "train")]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_NAME]


@pytest.mark.parametrize("cut", range(1, 57, 6))
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    with recorder(tmp_path) as record:
        record.record(10, "train", {"loss": 1.0})
        record.record(20, "train", {"loss": 2.0})
    path = tmp_path / METRICS_NAME
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + cut])
    assert cut < len(whole) - first - 1
    with recorder(tmp_path, fresh=False) as record:
        record.record(20, "train", {"loss": 2.5})
    assert [one["loss"] for one in read_records(path)] == [1.0, 2.5]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / METRICS_NAME
    path.write_text('{"step": 1, "kind": "train", "loss": 1.0}')
    with recorder(tmp_path, fresh=False) as record:
        record.record(2, "train", {"loss": 2.0})
    assert [one["step"] for one in read_records(path)] == [1, 2]


@pytest.mark.parametrize("line", ["rubbish", '{"no": "step"}', "[1]", '{"step": 1, "loss": NaN}'])
def test_a_foreign_line_is_an_error_that_changes_nothing(tmp_path, line):
    path = tmp_path / METRICS_NAME
    content = f'{{"step": 1}}\n{line}\n'
    path.write_text(content)
    with pytest.raises(StorageError) as caught:
        recorder(tmp_path, fresh=False)
    assert str(caught.value) == f"{path}:2: is no record of redco\n  -> delete the line, or move the file away"
    assert path.read_text() == content


def test_a_killed_process_loses_at_most_its_last_line(tmp_path):
    program = (
        "import sys, itertools, pathlib\n"
        "from redco_cli.training.records.metrics import Recorder\n"
        "recorder = Recorder(pathlib.Path(sys.argv[1]), fresh=True)\n"
        "for step in itertools.count(1):\n"
        "    recorder.record(step, 'train', {'loss': 1.0 / step, 'pad': 'x' * 5000})\n"
        "    print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(200):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        last = max([200, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
    steps = [one["step"] for one in read_records(tmp_path / METRICS_NAME)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= last


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told(tmp_path):
    record = recorder(tmp_path)
    (tmp_path / METRICS_NAME).unlink()
    (tmp_path / METRICS_NAME).symlink_to("/dev/full")
    with pytest.raises(StorageError) as caught:
        record.record(1, "train", {"loss": 1.0})
    record.close()
    assert str(caught.value) == (
        f"{tmp_path / METRICS_NAME}: cannot be written: No space left on device\n"
        "  -> free space, or set output_dir to a place you can write to; then start again"
    )


def test_a_directory_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        recorder(tmp_path / "file" / "run")
    assert str(caught.value).startswith(f"{tmp_path / 'file/run' / METRICS_NAME}: cannot be written: Not a directory\n")


# ---------------------------------------------------------------- trackers


class FakeSink:
    name = "fake"
    failures = (OSError,)

    def __init__(self, error=None):
        self.error, self.calls = error, []

    def write(self, step, kind, values):
        self.calls.append((step, kind, dict(values)))
        if self.error:
            raise self.error

    def close(self):
        self.calls.append("closed")


def test_sinks_get_the_numbers(tmp_path):
    sink = FakeSink()
    with recorder(tmp_path, sinks=[sink]) as record:
        record.record(0, "run", {"version": "1", "devices": 2})
        record.record(1, "train", {"loss": np.float32(0.5), "lr": math.inf})
    assert sink.calls == [(0, "run", {"devices": 2.0}), (1, "train", {"loss": 0.5, "lr": math.inf}), "closed"]


def test_a_failing_sink_is_told_once_and_the_run_goes_on(tmp_path, capsys):
    bad, good = FakeSink(OSError("no network")), FakeSink()
    with recorder(tmp_path, sinks=[bad, good]) as record:
        record.record(1, "train", {"loss": 1.0})
        record.record(2, "train", {"loss": 1.0})
    path = tmp_path / METRICS_NAME
    assert capsys.readouterr().err == f"warning: fake gets no more records: no network; {path} stays complete\n"
    assert bad.calls == [(1, "train", {"loss": 1.0}), "closed"]
    assert [call[0] for call in good.calls[:2]] == [1, 2]
    assert len(read_records(path)) == 2


def test_a_defect_in_a_sink_is_not_hidden(tmp_path):
    record = recorder(tmp_path, sinks=[FakeSink(ZeroDivisionError())])
    with pytest.raises(ZeroDivisionError):
        record.record(1, "train", {"loss": 1.0})
    record.close()


def test_records_that_are_not_there(tmp_path):
    with pytest.raises(StorageError) as caught:
        read_records(tmp_path / METRICS_NAME)
    assert str(caught.value) == (
        f"{tmp_path / METRICS_NAME}: cannot be read: No such file or directory\n  -> check the path and its permissions"
    )
