"""What training chooses for the memory of its devices: the run fits by plan, says so, and computes the same."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import jax
import pytest

from redco_cli.chips.target import parse_target
from redco_cli.console.numbers import format_bytes
from redco_cli.errors import RedcoError
from redco_cli.job import Job, prepare
from redco_cli.planning import choice
from redco_cli.planning.choice import choose_placement
from redco_cli.planning.devices import Devices
from redco_cli.planning.search.ways import options
from redco_cli.planning.targets.fastest import best_ways
from redco_cli.planning.targets.speed import planned_speed
from redco_cli.planning.workload import job_workload
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.shipped import shipped_plugins
from redco_cli.run import train
from tests.projects import write_answers

SECTIONS = """
train: {global_batch_size: 16, steps: 3, learning_rate: 3e-3, schedule: constant}
output_dir: one
"""
PLENTY, TIGHT, TINY = 2**30, 650_000, 10_000


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_answers(tmp_path, lambda i: "x" * (20 + i % 7), SECTIONS, evaluated=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def devices_have(monkeypatch: pytest.MonkeyPatch):
    """Lets the eight devices say how much memory each has."""
    return lambda memory: monkeypatch.setattr(choice, "memory_of_a_device", lambda: memory)


def job_of(*overrides: str) -> Job:
    """The job; what is said of its texts, all of which are cut, is not heard."""
    with redirect_stderr(io.StringIO()):
        return prepare(load_recipe("recipe.yaml", overrides), stages=("train",))


def test_a_cpu_leaves_the_recipe_and_shares_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of()
    found, placement = choose_placement(job)
    assert found is job
    assert dict(placement.mesh.shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert not placement.reshard_after_forward
    assert capsys.readouterr().err == ""


def test_a_run_takes_the_way_that_a_plan_for_its_devices_finds_fastest(
    devices_have, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices_have(PLENTY)
    target, job = parse_target("8*h100:1", "target"), job_of()
    monkeypatch.setattr(choice, "target_here", lambda: target)
    ways, forward = best_ways(job_workload(job), Devices(8, 1, PLENTY), None, target)
    assert forward is not None
    steps = [planned_speed(way, target, forward, None).step for way in ways]
    assert steps == sorted(steps) == [way.seconds for way in ways]
    assert dict(choose_placement(job)[1].mesh.shape) == ways[0].plan.mesh


@pytest.mark.slow
def test_plenty_of_memory_changes_nothing_but_the_mesh(devices_have, capsys: pytest.CaptureFixture[str]) -> None:
    devices_have(PLENTY)
    job = job_of()
    found, placement = choose_placement(job)
    assert found is job
    assert dict(placement.mesh.shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    needed = options(job_workload(job), Devices(8, 1, PLENTY))[0][0].memory.total
    assert capsys.readouterr().err == (
        f"mesh data=8,fsdp=1,tensor=1, micro-batch 16, remat none: {format_bytes(needed)} of 1 GiB per device by plan\n"
    )


@pytest.mark.slow
def test_processes_choose_for_the_least_of_their_memories(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice, "process_allgather", lambda name, value: [PLENTY, TIGHT])
    choose_placement(job_of())
    assert f" of {format_bytes(TIGHT)} per device by plan" in capsys.readouterr().err
    monkeypatch.setattr(choice, "process_allgather", lambda name, value: [PLENTY, None])
    job = job_of()
    assert choose_placement(job)[0] is job


@pytest.mark.slow
def test_little_memory_splits_cuts_and_recomputes_and_the_run_computes_the_same(
    devices_have, capsys: pytest.CaptureFixture[str]
) -> None:
    one = train("recipe.yaml", ["mesh={data: 1}"])
    capsys.readouterr()
    devices_have(TIGHT)
    found, placement = choose_placement(job_of())
    best = options(job_workload(job_of()), Devices(8, 1, TIGHT))[0][0]
    assert best.fits(TIGHT)
    sizes = dict(placement.mesh.shape)
    assert sizes == dict(best.plan.mesh)
    assert sizes["data"] * sizes["fsdp"] * sizes["tensor"] == 8
    assert sizes["fsdp"] * sizes["tensor"] > 1
    assert found.recipe.train.remat == best.workload.remat == "attention"
    assert found.recipe.train.micro_batch_size == best.micro_batch_size < 16
    assert found.loaded.origins["train.remat"] == "chosen for the memory of the devices"
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    assert capsys.readouterr().err == (
        f"mesh {mesh}, micro-batch {best.micro_batch_size}, remat attention: "
        f"{format_bytes(best.memory.total)} of 635 KiB per device by plan\n"
    )
    many = train("recipe.yaml", ["output_dir=many"])
    assert many.train["loss"] == pytest.approx(one.train["loss"], rel=1e-5)
    resolved = load_recipe("many/recipe.resolved.yaml").recipe.train
    assert (resolved.micro_batch_size, resolved.remat) == (best.micro_batch_size, "attention")


def test_what_the_recipe_decides_stays(devices_have) -> None:
    devices_have(TIGHT)
    decided = ["mesh={data: 2, fsdp: 4}", "train.remat=none", "train.micro_batch_size=8"]
    job = job_of(*decided)
    found, placement = choose_placement(job)
    assert found is job
    assert dict(placement.mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}


@pytest.mark.slow
def test_a_batch_that_is_a_whole_is_not_cut(devices_have) -> None:
    whole = Path(shipped_plugins()["instruct"]).read_text() + "\n\nwhole_batch = True\n"
    Path("whole.py").write_text(whole)
    devices_have(TIGHT)
    job = job_of("plugin.module=whole.py")
    found, _ = options(job_workload(job), Devices(8, 1, TIGHT))
    assert {one.micro_batch_size for one in found} == {16}
    assert choose_placement(job)[0].recipe.train.micro_batch_size == "auto"


@pytest.mark.slow
def test_what_cannot_fit_is_warned_of(devices_have, capsys: pytest.CaptureFixture[str]) -> None:
    devices_have(TINY)
    _, placement = choose_placement(job_of())
    assert placement.mesh.size == 8
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"warning: by plan this does not fit; redco inspect-sharding {Path('recipe.yaml')} shows what to change"
    ]


@pytest.mark.slow
def test_a_given_mesh_may_leave_devices_out_but_not_ask_for_more(devices_have) -> None:
    devices_have(PLENTY)
    _, placement = choose_placement(job_of("mesh={fsdp: 2, tensor: 2}"))
    assert placement.mesh.devices.ravel().tolist() == jax.devices()[:4]
    with pytest.raises(RedcoError) as refused:
        choose_placement(job_of("mesh={fsdp: 16}"))
    assert str(refused.value) == (
        "command line: mesh: fsdp 16 takes 16 devices, but 8 cpu devices found\n"
        "  -> take mesh: auto, or sizes with a product of 8"
    )
