"""Plugins are free of devices, hosts and collectives: where arrays lie, and who computes, is redco's to know."""

import ast

import pytest

from tests.architecture.source import ROOT, parsed

PLUGINS = sorted((ROOT / "plugins").glob("*.py"))
FORBIDDEN = {
    *("process_index", "process_count", "process_indices", "host_id", "host_count", "multihost_utils", "distributed"),
    *("devices", "local_devices", "device_count", "local_device_count", "default_device", "device_put", "device_get"),
    *("device_put_sharded", "device_put_replicated", "make_array_from_process_local_data", "addressable_shards"),
    *("Mesh", "AbstractMesh", "make_mesh", "set_mesh", "PartitionSpec", "NamedSharding", "PositionalSharding"),
    *("SingleDeviceSharding", "with_sharding_constraint", "in_shardings", "out_shardings", "shard_map", "pmap", "xmap"),
    *("psum", "pmean", "pmax", "pmin", "ppermute", "pshuffle", "pswapaxes", "psum_scatter", "all_gather", "all_to_all"),
    *("axis_index", "axis_name", "axis_size", "replicate", "unreplicate", "jax_utils"),
}
"""What the original examples have for every model, and plugins here need not know of."""


def names(tree: ast.AST) -> set[str]:
    """Every name in the code: of variables, attributes, keywords, arguments and imports; not of texts."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.alias(name=path):
                found.update(path.split("."))
            case ast.ImportFrom(module=str(path)):
                found.update(path.split("."))
    return found


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_no_plugin_names_a_device_a_host_or_a_collective(path):
    assert names(parsed(path)) & FORBIDDEN == set()


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import jax\nif jax.process_index() == 0: pass", "process_index"),
        ("from jax import devices as all_of_them", "devices"),
        ("from jax.experimental.shard_map import shard_map as split", "shard_map"),
        ("import jax.experimental.multihost_utils", "multihost_utils"),
        ("from jax.sharding import PartitionSpec as P", "PartitionSpec"),
        ("def f(x):\n    return jax.lax.pmean(x, axis_name='batch')", "pmean"),
        ("jax.jit(f, out_shardings=None)", "out_shardings"),
    ],
)
def test_a_name_is_found_however_it_came(code, name):
    assert name in names(ast.parse(code)) & FORBIDDEN
