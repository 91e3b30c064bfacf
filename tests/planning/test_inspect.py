"""The report of `redco inspect-sharding`: its figures agree with each other, and it says what to change."""

import json
from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.planning.devices import Devices
from redco_cli.planning.inspect import inspect
from redco_cli.planning.search.ways import options
from redco_cli.planning.workload import find_workload
from tests.projects import LLAMA

TINY = json.dumps(LLAMA)
PARAMETERS = 116_032


def test_the_figures_of_a_report_agree() -> None:
    report = inspect(TINY, devices=8, batch_size=16, seq_length=32, device_memory=2**30)
    assert (report.model, report.parameters, report.bytes) == ("llama", PARAMETERS, 4 * PARAMETERS)
    assert (report.devices, report.global_batch_size, report.seq_length) == (8, 16, 32)
    assert report.memory.total == report.chosen.memory
    assert sum(one.bytes for one in report.collectives) == report.chosen.traffic
    assert (report.fits, report.remedies, report.compiled) == (True, (), None)
    assert len(report.runners_up) == 3
    assert report.chosen.reason == (
        "the fastest configuration that fits, by estimate; "
        "in a step a device moves 0 B between hosts, 455 KiB within its own"
    )
    assert all(choice.reason.startswith("estimated 1.") for choice in report.runners_up)


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}])
def test_a_given_mesh_is_the_only_way(mesh: dict[str, int]) -> None:
    report = inspect(TINY, mesh=mesh, batch_size=16, seq_length=32)
    assert report.devices == 8
    assert report.chosen.mesh == {"data": 1, "fsdp": 1, "tensor": 1, **mesh}
    assert report.chosen.reason.startswith("as given; in a step a device moves 0 B between hosts, ")
    assert (report.fits, report.runners_up) == (None, ())
    assert report.memory.parameters == sum(group.bytes_per_device for group in report.groups)


@pytest.mark.slow
def test_what_does_not_fit_has_remedies_with_figures() -> None:
    report = inspect(TINY, devices=2, batch_size=16, seq_length=32, device_memory=900_000)
    assert report.fits is False
    assert report.chosen.reason.startswith("no configuration fits; this one needs least memory")
    assert report.memory.total > 900_000
    more, *others = report.remedies
    count = int(more.split()[0])
    machine = Devices(count, count // 2, 900_000)
    workload = find_workload(TINY, batch_size=16, seq_length=32)
    best = options(workload, machine)[0][0]
    assert best.fits(900_000)
    assert count in (4, 8, 16, 32)
    assert more.startswith(f"{count} devices need ")
    assert others[0].startswith("train.optimizer: adafactor saves most of ")


@pytest.mark.slow
def test_remedies_do_not_fail_where_more_devices_cannot_share_the_batch() -> None:
    report = inspect(TINY, devices=8, batch_size=1, seq_length=32, device_memory=1000)
    assert report.fits is False
    assert not [remedy for remedy in report.remedies if "devices need" in remedy]
    assert any(remedy.startswith("train.optimizer: adafactor") for remedy in report.remedies)


def test_one_device_has_one_way() -> None:
    report = inspect(TINY, devices=1, batch_size=2, seq_length=16)
    assert report.chosen.reason == (
        "the only configuration; in a step a device moves 0 B between hosts, 0 B within its own"
    )
    assert report.collectives == ()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"devices": 8, "mesh": {"tensor": 4}},
            "--mesh: tensor 4 takes 4 devices, but there are 8\n  -> change one of them",
        ),
        (
            {"devices": 8, "mesh": {"model": 8}},
            "--mesh: there is no mesh axis 'model'\n  -> the axes are data, fsdp, tensor",
        ),
        (
            {"devices": 8, "hosts": 3},
            "--hosts: 8 devices cannot be shared evenly by 3 hosts\n  -> take a divisor of 8",
        ),
        (
            {"devices": 8, "hosts": 16},
            "--hosts: 8 devices cannot be shared evenly by 16 hosts\n  -> take a divisor of 8",
        ),
    ],
)
def test_devices_that_contradict_each_other_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(RedcoError) as refused:
        inspect(TINY, batch_size=16, seq_length=16, **settings)
    assert str(refused.value) == text


@pytest.mark.parametrize(("devices", "hosts"), [(8, 1), (12, 2), (9, 3), (16, 2), (20, 4), (64, 8)])
def test_devices_stand_evenly_in_as_few_hosts_as_hold_them(devices: int, hosts: int) -> None:
    from redco_cli.planning.inspect import _hosts

    assert _hosts(devices) == hosts


def test_a_json_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    (tmp_path / "config.json").write_text(TINY)
    for target, problem in ((other, "is no config.json of a model"), (tmp_path / "a.json", "there is no such file")):
        with pytest.raises(RedcoError) as refused:
            inspect(str(target))
        assert str(refused.value) == (
            f"{target}: {problem}\n  -> give the directory of a saved model, or its config.json"
        )
