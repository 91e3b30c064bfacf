"""Trackers: what reaches them, and what happens when they cannot be had."""

import math
import os
import struct
import sys
import types

import pytest

from redco_cli.errors import RedcoError, StorageError
from redco_cli.recipe.keeping import LoggingSection, WandbSection
from redco_cli.training.records.metrics import METRICS_NAME, Recorder, read_records
from redco_cli.training.records.sinks import TensorBoardSink, open_sinks


def events(folder):
    """All events of a folder, oldest file first, read by the layout of the format itself."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir(), key=lambda path: path.name):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            found.append(Event.FromString(data[place + 12 : place + 12 + length]))
            place += 16 + length
    return found


def test_tensorboard_gets_scalars_and_the_step_a_run_resumes_at(tmp_path):
    section = LoggingSection(tensorboard=True)
    (sink,) = open_sinks(section, tmp_path, None, {})
    sink.write(10, "train", {"loss": 2.5, "lr": math.nan})
    sink.close()
    (sink,) = open_sinks(section, tmp_path, 10, {})
    sink.write(20, "eval", {"loss": 1.5})
    sink.close()
    found = events(tmp_path / "tensorboard")
    scalars = [(one.step, v.tag, v.simple_value) for one in found for v in one.summary.value]
    assert scalars[0] == (10, "train/loss", 2.5)
    assert scalars[1][1] == "train/lr"
    assert math.isnan(scalars[1][2])
    assert scalars[2] == (20, "eval/loss", 1.5)
    assert [(one.step, one.session_log.status) for one in found if one.HasField("session_log")] == [(11, 1)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_tensorboard_on_a_full_disk_does_not_hang(tmp_path, capsys):
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink._file.flush()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, sink._file._writer.fileno())
    os.close(full)
    with Recorder(tmp_path, fresh=True, sinks=[sink]) as record:
        for step in range(50):
            record.record(step, "train", {"loss": 1.0})
    assert capsys.readouterr().err == (
        "warning: TensorBoard gets no more records: [Errno 28] No space left on device; "
        f"{tmp_path / METRICS_NAME} stays complete\n"
    )
    assert len(read_records(tmp_path / METRICS_NAME)) == 50


def test_tensorboard_needs_a_place_to_write(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(StorageError) as caught:
        open_sinks(LoggingSection(tensorboard=True), tmp_path, None, {})
    assert str(caught.value) == (
        f"{tmp_path / 'tensorboard'}: cannot be written: File exists\n  -> set output_dir to a place you can write to"
    )


@pytest.mark.parametrize(
    ("section", "package", "extra"),
    [
        (LoggingSection(tensorboard=True), "tensorboardX", "tensorboard"),
        (LoggingSection(wandb=WandbSection(project="p")), "wandb", "wandb"),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, section, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RedcoError) as caught:
        open_sinks(section, tmp_path, None, {})
    assert str(caught.value) == (
        f"logging.{extra}: the package {package} is not installed\n"
        f"  -> install the extra {extra}: pip install 'redco[{extra}]'; or leave logging.{extra} out"
    )


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package that writes down what is asked of it."""
    module = types.ModuleType("wandb")
    module.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    module.calls, module.refusal = [], None

    class Run:
        def define_metric(self, name, step_metric):
            module.calls.append(("define_metric", name, step_metric))

        def log(self, values):
            module.calls.append(("log", values))

        def finish(self):
            module.calls.append(("finish",))

    def init(**settings):
        if module.refusal:
            raise module.refusal
        module.calls.append(("init", settings))
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


SECTION = WandbSection(project="p", name="n", entity="e", mode="offline")


def test_wandb_gets_records_and_a_resumed_run_is_the_same_run(tmp_path, wandb):
    logging = LoggingSection(wandb=SECTION)
    for resume_step in (None, 5, None):
        (sink,) = open_sinks(logging, tmp_path, resume_step, {"seed": 1})
        sink.write(10, "train", {"loss": 2.5})
        sink.close()
    inits = [call[1] for call in wandb.calls if call[0] == "init"]
    ids = [settings.pop("id") for settings in inits]
    assert inits[0] == {
        "project": "p",
        "name": "n",
        "entity": "e",
        "mode": "offline",
        "dir": str(tmp_path),
        "config": {"seed": 1},
        "resume": "allow",
    }
    assert ids[0] == ids[1] != ids[2]
    assert wandb.calls[1:4] == [
        ("define_metric", "*", "step"),
        ("log", {"step": 10, "train/loss": 2.5}),
        ("finish",),
    ]


def test_wandb_sees_no_secret_in_the_command_line(tmp_path, wandb, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["redco", "train", "r.yaml", "plugin.options.api_key=s3cr3t", "train.steps=5"])
    open_sinks(LoggingSection(wandb=SECTION), tmp_path, None, {})
    assert sys.argv == ["redco", "train", "r.yaml", "plugin.options.api_key=<hidden>", "train.steps=5"]


def test_wandb_that_refuses_to_start_is_an_error(tmp_path, wandb):
    wandb.refusal = wandb.errors.Error("api_key not configured")
    with pytest.raises(RedcoError) as caught:
        open_sinks(LoggingSection(wandb=SECTION), tmp_path, None, {})
    assert str(caught.value) == (
        "logging.wandb: wandb cannot start: api_key not configured\n"
        "  -> run `wandb login`, or set logging.wandb.mode=offline"
    )
