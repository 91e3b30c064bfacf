"""The rooms of sharding: one direction, and every public name where it is announced."""

from collections import defaultdict
from graphlib import TopologicalSorter

import pytest

from redco_cli import sharding
from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.decide.follow import follow
from redco_cli.sharding.gather.gathering import gathering
from tests.architecture.source import dotted, imports, modules

BASE = "redco_cli.sharding."
ROOMS = ["program", "pieces", "decide", "predict", "gather", "compiled"]


def room(name):
    return name.removeprefix(BASE).partition(".")[0]


def test_rooms_import_one_way():
    """Contracted to the children of `sharding`, imports form no cycle, and nothing below `compiled` imports it."""
    graph = defaultdict(set)
    for path in modules():
        if dotted(path).startswith(BASE):
            found = {room(name) for _, name in imports(path) if name.startswith(BASE)}
            graph[room(dotted(path))] |= found - {room(dotted(path))}
    TopologicalSorter(graph).prepare()
    assert {one: graph[one] & set(ROOMS) for one in ROOMS} == {
        "program": set(),
        "pieces": {"program"},
        "decide": {"program", "pieces"},
        "predict": {"program", "decide"},
        "gather": {"program", "pieces", "decide"},
        "compiled": set(),
    }
    assert [one for one in graph if graph[one] & {"compiled", "derive"}] == []


def test_public_names():
    assert (sharding.gathering, sharding.follow, sharding.compiled_collectives) == (
        gathering,
        follow,
        compiled_collectives,
    )
    assert all(getattr(sharding, name) is not None for name in sharding.__all__)
    with pytest.raises(AttributeError, match=r"module 'redco_cli\.sharding' has no attribute 'shard'"):
        _ = sharding.shard
