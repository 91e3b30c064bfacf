"""`planning: compile`: which ways are compiled, which is taken, and what is refused."""

import json
from types import SimpleNamespace

import jax
import pytest

from redco_cli.chips.table import CHIPS
from redco_cli.chips.target import parse_target
from redco_cli.errors import DeviceError, RecipeError
from redco_cli.job import prepare
from redco_cli.planning import choice, inspect
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.planning.targets import fastest
from redco_cli.planning.targets.fastest import CANDIDATES, fastest_here, in_front, own_target, try_for, try_out
from redco_cli.recipe.load import load_recipe
from redco_cli.sharding.compiled.work import Work
from redco_cli.sharding.program.flops import Products
from tests.projects import write_classifier

TARGET = parse_target("h100:8", "--target")
MEMORY = 100


def where(key):
    return f"recipe.yaml:3: {key}"


def way(number, seconds, memory=50):
    plan = SimpleNamespace(mesh={"data": 8 // number, "fsdp": number, "tensor": 1})
    workload = SimpleNamespace(where=where, remat="none", xla={"xla_a": True}, compares=True)
    return Option(workload, plan, 8, False, SimpleNamespace(total=memory), 0, 0, seconds, Products())


def outcome(seconds, memory=60):
    """A program of which nothing but reading and writing is known."""
    read = int(seconds * CHIPS["h100"].bandwidth)
    return Compiled(memory, (), 0.0, None, 0, (), 1, (), "h100:8", None), (Work("memory", 0, "", read),)


def test_the_fastest_program_comes_first(capsys):
    ways = [way(1, 1.0), way(2, 2.0), way(4, 3.0), way(8, 4.0)]
    programs = {id(ways[0]): outcome(5.0), id(ways[1]): outcome(1.0), id(ways[2]): outcome(3.0)}
    tried = try_out(ways, lambda one: programs[id(one)], TARGET, MEMORY)
    assert len(tried) == CANDIDATES
    assert [one.option.plan for one in tried] == [ways[1].plan, ways[2].plan, ways[0].plan]
    assert tried[0].option.seconds == pytest.approx(1.0, rel=0.5)
    assert tried[0].outcome == programs[id(ways[1])]
    assert [one.plan for one in in_front(tried, ways)] == [one.plan for one in (ways[1], ways[2], ways[0], ways[3])]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("compiled 1 of 3, mesh data=8,fsdp=1,tensor=1, micro-batch 8, remat none: ")
    assert said[0].endswith(" s a step by its program, 1 s by plan")


def test_what_does_not_fit_is_left_out(capsys):
    ways = [way(1, 1.0), way(2, 2.0), way(4, 3.0, memory=MEMORY + 1)]
    too_large = Compiled(None, (), 0.0, None, 0, (), 0, (), "h100:8", "does not fit"), None
    programs = {id(ways[0]): too_large, id(ways[1]): outcome(1.0)}
    assert [one.option.plan for one in try_out(ways, lambda one: programs[id(one)], TARGET, MEMORY)] == [ways[1].plan]
    assert "does not fit, it needs more memory than there is" in capsys.readouterr().err
    with pytest.raises(DeviceError, match=r"recipe.yaml:3: planning: .* 2 were compiled, and none fits on h100:8"):
        try_out(ways, lambda one: outcome(1.0, memory=MEMORY + 1), TARGET, MEMORY)
    assert try_out(ways[2:], lambda one: outcome(1.0), TARGET, MEMORY) == []  # none fits by plan: that is told instead


def test_it_needs_devices_whose_speeds_are_known(monkeypatch):
    with pytest.raises(DeviceError, match=r"recipe.yaml:3: planning: .* without a --target"):
        try_for(None, [way(1, 1.0)], {}, MEMORY)
    with pytest.raises(
        DeviceError, match=r"recipe.yaml:3: planning: compile .* the speed of 'cpu' devices is not known"
    ):
        own_target(where)
    devices = [SimpleNamespace(device_kind="TPU v6 lite", slice_index=number // 8) for number in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    target = own_target(where)
    assert (target.chip.name, target.groups, target.of_a_group, target.devices) == ("v6e", 2, 8, 16)


def test_all_processes_take_the_same(monkeypatch):
    ways = [way(1, 1.0), way(2, 2.0)]
    monkeypatch.setattr(fastest, "own_target", lambda where: TARGET)
    monkeypatch.setattr(fastest, "make_mesh", lambda sizes, where: sizes)
    monkeypatch.setattr(fastest, "places_of", lambda target, mesh: [])
    monkeypatch.setattr(fastest, "lower_step", lambda way, mesh: way)
    asked = []
    monkeypatch.setattr(
        fastest, "compile_lowered", lambda lowered, sizes, xla, places, where: asked.append(xla) or sizes
    )
    monkeypatch.setattr(fastest, "as_compiled", lambda sizes, target: outcome(3.0 / sizes["fsdp"]))
    assert fastest_here(ways, MEMORY).plan is ways[1].plan
    assert asked == [{"xla_a": True}] * 2
    first = fastest.described(ways[0])
    monkeypatch.setattr(fastest, "process_allgather", lambda name, said: [[first, "another"], said])
    assert fastest_here(ways, MEMORY).plan is ways[0].plan  # as process 0 found


def test_a_cpu_refuses_by_name(tmp_path, monkeypatch):
    write_classifier(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RecipeError, match=r"command line: planning: compile chooses a mesh, and mesh gives one already"
    ):
        load_recipe("recipe.yaml", ["planning=compile"])
    job = prepare(load_recipe("recipe.yaml", ["planning=compile", "mesh=auto"]), stages=("train",))
    with pytest.raises(DeviceError, match=r"command line: planning: compile compares step times"):
        choice.choose_placement(job)


@pytest.mark.slow
def test_a_plan_for_a_target_takes_it(tmp_path, monkeypatch):
    write_classifier(tmp_path, wide=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDCO_MESH", "auto")
    monkeypatch.setenv("REDCO_PLANNING", "compile")
    asked = []

    def compile_for(target, option, workload):
        asked.append(dict(option.plan.mesh))
        return outcome(1.0 / len(asked), memory=2**20)

    monkeypatch.setattr(fastest, "compile_for", compile_for)
    found = inspect.inspect("recipe.yaml", target="h100:4")
    assert len(asked) == CANDIDATES
    assert dict(found.chosen.mesh) == asked[-1]
    assert found.chosen.reason.startswith(
        "the fastest of 3 that were compiled and fit, by a walk over their programs; "
    )
    assert found.speed.basis == "compiled"
    assert [dict(one.mesh) for one in found.runners_up] == asked[-2::-1]
    assert found.compiled.memory == 2**20
    assert json.dumps(inspect.as_json(found))
    asked.clear()
    given = inspect.inspect("recipe.yaml", target="h100:4", mesh={"fsdp": 4})
    assert (asked, given.compiled) == ([], None)
